"""Samples that influence each other are found in the graph, whatever the values and the number of samples are."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto
from torch import nn

from ingot.bounds import inputs_of
from ingot.bounds.analysis import Scope
from ingot.bounds.flow import SHARED, Flow, Kind
from ingot.bounds.graph import opened
from ingot.bounds.poly import Poly
from ingot.bounds.samples import mixings
from ingot.bounds.samples.tracing import Tracing
from ingot.export.lower import onnx as lower_onnx
from ingot.export.lower.forms.translations import TRANSLATIONS
from ingot.tensors import DType, Range, Signature, TensorSpec
from tests.bounds.samples.cases import APART, MIXING, Function
from tests.bounds.test_random_graphs import INT64, UINT8, Graph, run

X = TensorSpec("x", DType.FP32, ("batch", "seq", 4))
N = TensorSpec("n", DType.INT64, ("batch",))
W = TensorSpec("w", DType.FP32, (4, 4))
# One of each mechanism; the others run in the matrix.
FEW_MIXING = ("any below -500", "capacity of experts", "division by n.max()", "rows beyond 500", "rows joined")
FEW_APART = (
    "heads merged with the batch",
    "own value by position",
    "two copies, both taken",
    "masked by length",
    "mean of every second step",
    "sines and cosines",
)


class All(nn.Module):
    """Each function makes an output."""

    def __init__(self, functions: Mapping[str, Function]):
        super().__init__()
        self.functions = list(functions.values())

    def forward(self, x: torch.Tensor, n: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(function(x, n, w) * 1 for function in self.functions)


def found(functions: Mapping[str, Function], path: Path) -> dict[str, str]:
    """Return why samples influence each other, by the name of the function; those that keep them apart are left out."""
    example = torch.randn(5, 7, 4), torch.tensor([0, 1, 2, 1, 0]), torch.randn(4, 4)
    batch, seq = torch.export.Dim("batch", min=2, max=4096), torch.export.Dim("seq", min=3, max=512)
    dims = {"x": {0: batch, 1: seq}, "n": {0: batch}, "w": None}
    program = torch.export.export(All(functions), example, dynamic_shapes=dims, strict=False)
    names = [f"o{index}" for index in range(len(functions))]
    registry = lower_onnx.make_registry(None, TRANSLATIONS)
    ir.save(lower_onnx._translate(program, ["x", "n", "w"], "", registry, names, optimize=True), path)
    *_, last = program.graph.nodes
    ranks = [len(node.meta["val"].shape) for node in last.args[0]]
    outputs = [
        TensorSpec(name, DType.FP32, ("batch", *[f"{name}_{axis}" for axis in range(1, rank)]))
        for name, rank in zip(names, ranks, strict=True)
    ]
    signature = Signature((X, N, W), tuple(outputs), ranges={"seq": Range(3, 512)})
    by_output = dict(zip(names, functions, strict=True))
    return {by_output[mixing.output]: mixing.reason for mixing in mixings(path, signature, "batch")}


@pytest.mark.matrix
def test_functions_of_each_mechanism(tmp_path: Path) -> None:
    mixing, apart = ({name: MIXING[name] for name in FEW_MIXING}, {name: APART[name] for name in FEW_APART})
    reasons = found({**mixing, **apart}, tmp_path / "graph.onnx")
    assert set(reasons) == set(mixing)
    assert reasons["any below -500"].endswith("(ReduceMax): it reduces over the samples")


@pytest.mark.matrix
def test_no_function_that_mixes_samples_passes(tmp_path: Path) -> None:
    assert len(MIXING) >= 60
    assert set(MIXING) - set(found(MIXING, tmp_path / "graph.onnx")) == set()


@pytest.mark.matrix
def test_no_function_that_keeps_them_apart_is_refused(tmp_path: Path) -> None:
    assert len(APART) >= 40
    assert found(APART, tmp_path / "graph.onnx") == {}


@pytest.mark.parametrize("name", APART)
def test_samples_that_are_called_apart_are(name: str) -> None:
    function = APART[name]
    x, n, w = torch.randn(5, 7, 4), torch.tensor([0, 1, 2, 1, 0]), torch.randn(4, 4)
    alone = torch.cat([function(x[index : index + 1], n[index : index + 1], w) for index in range(5)])
    torch.testing.assert_close(function(x, n, w), alone)


class Mixed(Graph):
    """A random graph in which samples are moved, combined and selected too."""

    def placed(self, source: str) -> None:
        """Combine values that count from the first sample, or positions of samples, with others."""
        cube = self.add("Unsqueeze", [source, self.constant([1])])
        places = f"{self.add('MaxPool', [cube], kernel_shape=[1])}places"
        self.nodes[-1].output.append(places)
        zero, one = (self.add("Squeeze", [self.constant([value])]) for value in (0, 1))
        count = self.add("Squeeze", [self.add("Shape", [source], start=0, end=1)])
        row = self.add("Range", [zero, count, one])
        positions = self.add("Unsqueeze", [row, self.constant([1, 2])])
        located = self.rng.choice([places, positions])
        other = self.rng.choice([self.add("Cast", [cube], to=INT64), places, positions])
        pair = self.rng.sample([located, other], 2)
        condition = self.add("Cast", [self.add("Gather", ["v", self.constant([0])])], to=TensorProto.BOOL)
        index = self.add("Unsqueeze", [row, self.constant([1])])
        narrow = self.rng.choice([UINT8, TensorProto.BOOL, TensorProto.FLOAT16])
        axis = self.rng.randrange(3)
        steps = [
            lambda: self.add("Concat", pair, axis=axis),
            lambda: self.add("If", [condition], then_branch=branch(pair[0]), else_branch=branch(pair[1])),
            lambda: self.add("Where", [condition, *pair]),
            lambda: self.add("Mod", [places, self.add("Shape", [cube], start=2)]),
            lambda: self.add("Cast", [self.add("Cast", [located], to=narrow)], to=INT64),
            lambda: self.add("Gather", [located, row]),
            lambda: self.add("GatherND", [located, index]),
            lambda: self.add("ScatterND", [other, index, located]),
        ]
        self.rng.choice(steps)()

    def step(self) -> None:
        if self.rng.random() < 0.2:
            self.placed(self.rng.choice(["x", self.data[-1]]))
            return
        if self.rng.random() < 0.4:
            super().step()
            return
        source, other = self.rng.choice(self.data[-3:]), self.rng.choice(self.data[-3:])
        axis = self.rng.randrange(2)
        axes = self.constant([axis])
        keep = self.rng.randrange(2)
        steps = [
            lambda: self.add("Transpose", [source]),
            lambda: self.add("Softmax", [source], axis=axis),
            lambda: self.add("ReduceMax", [source, axes], keepdims=1),
            lambda: self.add("CumSum", [source, self.add("Squeeze", [axes])]),
            lambda: self.add("Sub", [source, self.add("ReduceSum", [other, axes], keepdims=1)]),
            lambda: self.add("Mul", [source, other]),
            lambda: self.add("Concat", [source, other], axis=axis),
            lambda: self.add("MatMul", [source, other]),
            lambda: self.add("Gather", [source, self.constant([0])], axis=axis),
            lambda: self.add("Reshape", [source, self.add("Shape", [other])]),
            lambda: self.add("Reshape", [source, self.constant([-1, 1][:: 1 if keep else -1])]),
            lambda: self.add("Reshape", [self.add("Unsqueeze", [source, axes]), self.add("Shape", [source])]),
            lambda: self.add("GatherElements", [source, self.add("ArgMax", [source], axis=axis)], axis=axis),
            lambda: self.add("TopK", [source, self.constant([1])], axis=axis),
            lambda: self.add("Mul", [source, self.add("Cast", [self.element()], to=1)]),
        ]
        self.data.append(self.rng.choice(steps)())
        self.lists.append(self.add("Shape", [self.data[-1]]))


def branch(name: str) -> onnx.GraphProto:
    """Return an inner graph whose output is a tensor of the outer graph."""
    inner = onnx.helper.make_node("Identity", [name], [f"{name}inner"])
    return onnx.helper.make_graph([inner], "inner", [], [onnx.ValueInfoProto(name=f"{name}inner")])


@pytest.mark.matrix
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 100))])
def test_random_graphs(tmp_path: Path, seed: int) -> None:
    """Samples that are called apart are equal for each sample alone and in a batch, in all tensors of the graph."""
    rng = random.Random(seed)
    signature = Signature((TensorSpec("x", DType.FP32, ("batch", "width")), TensorSpec("v", DType.UINT8, (3,))), ())
    checked = 0
    for _ in range(80):
        graph = Mixed(rng)
        for _ in range(rng.randrange(2, 7)):
            graph.step()
        names = graph.save(tmp_path / "random.onnx")
        flows = traced(tmp_path / "random.onnx", signature)
        width, count = rng.choice([1, 3, 4]), rng.choice([2, 4, 5])
        x = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
        v = np.array([rng.choice([0, 1, 2, 3]) for _ in range(3)], np.uint8)
        whole = run(tmp_path / "random.onnx", {"x": x, "v": v})
        alone = [run(tmp_path / "random.onnx", {"x": x[index : index + 1], "v": v}) for index in range(count)]
        if not whole or not all(alone):
            continue
        for place, name in enumerate(names):
            flow = flows.get(name, SHARED)
            if flow.kind in (Kind.SHARED, Kind.SAMPLES):
                for index in range(count):
                    part = sample(whole[place], flow, index, {"batch": count, "width": width})
                    expected = sample(alone[index][place], flow, 0, {"batch": 1, "width": width})
                    if flow.located:
                        continue
                    same = part.shape == expected.shape and np.allclose(part, expected, 1e-4, 1e-4, equal_nan=True)
                    assert same, f"{name} {flow}\n" + "\n".join(map(str, graph.nodes))
                checked += flow.sampled
    assert checked > 20


def traced(path: Path, signature: Signature) -> dict[str, Flow]:
    with opened(path) as model:
        scope = Scope(dict(inputs_of(model, signature, empty=False)))
        scope.flows = {"x": Flow(Kind.SAMPLES, 0, 2, Poly.symbol("batch")), "v": SHARED}
        Tracing(model, "batch").analyse(model.graph, scope)
        return scope.flows


def sample(array: Any, flow: Flow, index: int, sizes: dict[str, int]) -> Any:
    """Return the part of an array that depends on one sample."""
    if not flow.sampled:
        return array
    inner = flow.size.at(sizes) // sizes["batch"] if flow.inner is None else flow.inner.at(sizes)
    shape = array.shape
    outer = shape[flow.axis] // (sizes["batch"] * inner)
    parts = array.reshape(*shape[: flow.axis], outer, sizes["batch"], inner, *shape[flow.axis + 1 :])
    return parts.take(index, flow.axis + 1)


_CHOSEN = """c = Constant<value_float = 0.0>() w1 = ReduceMax<keepdims = 0>(w) b = Less(w1, c)
    f = If(b) <then_branch = one () => (int64[batch, seq, 4] p) {p = Identity(k)},
               else_branch = two () => (int64[batch, seq, 4] q) {q = Identity(i)}>"""
_POSITIONS = """s = Shape<start = 0, end = 1>(x) h = Squeeze(s) o = Constant<value_int = 0>()
    j = Constant<value_int = 1>() n = Range(o, h, j)"""
GRAPHS = {
    "a branch that one condition chooses": (
        """c = Constant<value_float = 0.0>() m = ReduceMax<keepdims = 0>(x) b = Greater(m, c)
        y = If(b) <then_branch = t () => (float[batch, seq, 4] p) {p = Neg(x)},
                   else_branch = e () => (float[batch, seq, 4] q) {q = Identity(x)}>""",
        "(ReduceMax): it reduces over the samples",
    ),
    "a branch that the number of samples chooses": (
        """c = Constant<value_ints = [8]>() s = Shape<start = 0, end = 1>(x) b = Greater(s, c)
        y = If(b) <then_branch = t () => (float[batch, seq, 4] p) {p = Neg(x)},
                   else_branch = e () => (float[batch, seq, 4] q) {q = Identity(x)}>""",
        "(If): which of its branches runs is one choice for all samples, and the number of samples decides",
    ),
    "a branch that a weight chooses": (
        """c = Constant<value_float = 0.0>() m = ReduceMax<keepdims = 0>(w) b = Greater(m, c)
        y = If(b) <then_branch = t () => (float[batch, seq, 4] p) {p = Neg(x)},
                   else_branch = e () => (float[batch, seq, 4] q) {q = Softmax<axis = 1>(x)}>""",
        "",
    ),
    "a loop that a weight ends": (
        """n = Constant<value_int = 3>() t = Constant<value_int = 1>() k = Cast<to = 9>(t)
        y = Loop(n, k, x) <body = b (int64 i, bool c, float[batch, seq, 4] h)
            => (bool d, float[batch, seq, 4] o) {d = Identity(c) o = MatMul(h, w)}>""",
        "",
    ),
    "a loop that all samples end": (
        """n = Constant<value_int = 3>() t = Constant<value_int = 1>() k = Cast<to = 9>(t)
        z = Constant<value_float = 9.0>()
        y = Loop(n, k, x) <body = b (int64 i, bool c, float[batch, seq, 4] h)
            => (bool d, float[batch, seq, 4] o) {m = ReduceMax<keepdims = 0>(h) d = Less(m, z) o = MatMul(h, w)}>""",
        "(ReduceMax): it reduces over the samples",
    ),
    "a loop that the number of samples ends": (
        """s = Shape<start = 0, end = 1>(x) n = Squeeze(s) t = Constant<value_int = 1>() k = Cast<to = 9>(t)
        y = Loop(n, k, x) <body = b (int64 i, bool c, float[batch, seq, 4] h)
            => (bool d, float[batch, seq, 4] o) {d = Identity(c) o = MatMul(h, w)}>""",
        "(Loop): how often it repeats is one number for all samples, and depends on them",
    ),
    "a loop over the samples": (
        """y = Scan(x) <num_scan_inputs = 1, body = b (float[seq, 4] h) => (float[seq, 4] o) {o = Neg(h)}>""",
        "it goes from sample to sample",
    ),
    "a custom operator": ("""y = my.domain.Mystery(x)""", "whether this custom operator combines samples is not known"),
    "a sum in the body of a loop over the sequence": (
        """a = Constant<value_ints = [1]>() s = ReduceSum<keepdims = 0>(x, a) z = Sub(s, s)
        f, g = Scan(z, x) <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
            body = b (float[batch, 4] h, float[batch, 4] v) => (float[batch, 4] o, float[batch, 4] u)
            {o = Add(h, v) u = Identity(o)}> y = Identity(g)""",
        "",
    ),
    "places within each sample": (
        """v, i = MaxPool<kernel_shape = [1]>(x) d = Constant<value_ints = [4]>() m = Mod(i, d)
        y = Cast<to = 1>(m)""",
        "",
    ),
    "places from the first sample on": (
        """v, i = MaxPool<kernel_shape = [1]>(x) d = Constant<value_ints = [3]>() m = Mod(i, d)
        y = Cast<to = 1>(m)""",
        "it computes with the positions of samples in the batch",
    ),
    "places that no remainder is taken of": (
        "v, i = MaxPool<kernel_shape = [1]>(x) y = Cast<to = 11>(i)",
        "has the positions of samples in the batch",
    ),
    "places after other values": (
        """v, i = MaxPool<kernel_shape = [1]>(x) k = Cast<to = 7>(x) c = Concat<axis = 2>(k, i)
        a = Constant<value_ints = [4]>() e = Constant<value_ints = [8]>() b = Constant<value_ints = [2]>()
        z = Slice(c, a, e, b) y = Cast<to = 1>(z)""",
        "(Concat): it joins the positions of samples with other values",
    ),
    "places in one of two branches": (
        f"v, i = MaxPool<kernel_shape = [1]>(x) k = Cast<to = 7>(x) {_CHOSEN} y = Cast<to = 1>(f)",
        "it has positions of samples in one case, and other values in another",
    ),
    "positions in one of two branches": (
        f"""{_POSITIONS} i = Identity(n) a = Constant<value_ints = [1, 2]>() g = ReduceMax<keepdims = 0>(x, a)
        k = Cast<to = 7>(g) {_CHOSEN.replace("[batch, seq, 4]", "[batch]")} y = Gather(w, f)""",
        "it has positions of samples in one case, and other values in another",
    ),
    "a step replaced in each sample": (
        """i = Constant<value_ints = [0]>() j = Unsqueeze(i, i) t = Transpose<perm = [1, 0, 2]>(x)
        u = Gather(t, i) v = Neg(u) s = ScatterND(t, j, v) y = Transpose<perm = [1, 0, 2]>(s)""",
        "",
    ),
    "a step replaced by a shared row": (
        """i = Constant<value_ints = [0]>() j = Unsqueeze(i, i) t = Transpose<perm = [1, 0, 2]>(x)
        u = Gather(w, i) v = Unsqueeze(u, i) s = ScatterND(t, j, v) y = Transpose<perm = [1, 0, 2]>(s)""",
        "it combines samples with values of certain positions in the batch",
    ),
    "own value by position": (f"{_POSITIONS} y = Gather(x, n)", ""),
    "positions by position": (
        f"{_POSITIONS} m = Gather(n, n) y = Gather(x, m)",
        "it computes with the positions of samples in the batch",
    ),
    "positions in too narrow a datatype": (
        f"{_POSITIONS} b = Cast<to = 2>(n) m = Cast<to = 7>(b) y = Gather(x, m)",
        "it computes with the positions of samples in the batch",
    ),
    "positions by another name": (
        f"""{_POSITIONS} m = ai.onnx.ml.LabelEncoder<keys_int64s = [5], values_int64s = [1], default_int64 = 0>(n)
        y = Gather(x, m)""",
        "it computes with the positions of samples in the batch",
    ),
    "places whose remainder may be negative": (
        """v, i = MaxPool<kernel_shape = [1]>(x) d = Constant<value_ints = [4]>() m = Mod<fmod = 1>(i, d)
        y = Cast<to = 1>(m)""",
        "it computes with the positions of samples in the batch",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_control_flow(tmp_path: Path, name: str) -> None:
    text, reason = GRAPHS[name]
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20, "my.domain": 1, "ai.onnx.ml": 4]> '
        f"g (float[batch, seq, 4] x, float[4, 4] w) => (float[batch, seq, 4] y) {{{text}}}"
    )
    onnx.save(model, tmp_path / "graph.onnx")
    signature = Signature((X, W), (TensorSpec("y", DType.FP32, ("batch", "seq", 4)),))
    found = [mixing.reason for mixing in mixings(tmp_path / "graph.onnx", signature, "batch")]
    assert found == [] if not reason else found[0].endswith(reason), found
