"""Random graphs and random calls of every operator: no tensor of a run leaves the bounds of its size and its values."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from ingot.bounds.abstract import Tensor
from ingot.bounds.analysis import Analysis, Scope
from ingot.bounds.graph import opened
from ingot.bounds.interval import Interval
from ingot.bounds.operators import RULES
from ingot.bounds.poly import Poly

FLOAT, UINT8, INT32, INT64 = TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT32, TensorProto.INT64
SIZES = ("batch", "width")
LARGEST = 1 << 22


class Graph:
    """A random graph with the inputs x: FP32 [batch, width] and v: UINT8 [3], which makes an output of every tensor."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.lists, self.data = list[str](), ["x"]
        shape = self.add("Shape", ["x"])
        self.lists += [shape, self.add("Cast", ["v"], to=INT64), self.constant([2, 3])]

    def add(self, operator: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [name], **attributes))
        return name

    def constant(self, values: Sequence[float], dtype: type[np.generic] = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.array(values, dtype), name))
        return name

    def number(self) -> str:
        """Return a constant: small, or one that makes integers wrap around."""
        large = [1 << 31, (1 << 32) - 1, 1 << 62, 0x5555555555555555, -(1 << 63)]
        return self.constant([self.rng.choice([-2, -1, 0, 1, 2, 3, 5, 7, self.rng.choice(large)])])

    def values(self) -> str:
        return self.rng.choice(self.lists[-6:] + self.lists[:2])

    def element(self) -> str:
        return self.add("Gather", [self.values(), self.constant([self.rng.randrange(-1, 2)])])

    def positive(self, name: str) -> str:
        """Return the values between 1 and 6."""
        return self.add("Max", [self.add("Min", [name, self.constant([6])]), self.constant([1])])

    def step(self) -> None:
        shapes = [self.arithmetic, self.arithmetic, self.through_floats, self.narrowed, self.rearranged, self.chosen]
        data = [self.expanded, self.ranged, self.cut, self.reshaped, self.tiled, self.joined]
        self.rng.choice([*shapes, *data])()

    def arithmetic(self) -> None:
        operator = self.rng.choice(["Add", "Sub", "Mul", "Min", "Max", "Mod", "Div"])
        second = self.rng.choice([self.number, self.element])()
        if operator in ("Div", "Mod"):
            second = self.positive(second)
        self.lists.append(self.add(operator, [self.values(), second]))

    def through_floats(self) -> None:
        real = self.add("Cast", [self.values()], to=FLOAT)
        factor = self.rng.choice([0.5, 1.5, 2.0, 0.1, 3e10, 1e30, -1.0])
        operator = self.rng.choice(["Mul", "Add", "Div", "Sub", "Min", "Max"])
        real = self.add(operator, [real, self.constant([factor], np.float32)])
        if self.rng.random() < 0.5:
            real = self.add(self.rng.choice(["Floor", "Ceil", "Neg", "Abs"]), [real])
        self.lists.append(self.add("Cast", [real], to=INT64))

    def narrowed(self) -> None:
        narrow = self.add("Cast", [self.values()], to=self.rng.choice([INT32, UINT8]))
        self.lists.append(self.add("Cast", [narrow], to=INT64))

    def rearranged(self) -> None:
        joined = self.add("Concat", [self.element(), self.element()], axis=0)
        reduced = self.add(self.rng.choice(["ReduceSum", "ReduceProd", "ReduceMax"]), [self.values()], keepdims=1)
        self.lists.append(self.rng.choice([joined, reduced]))

    def chosen(self) -> None:
        one = self.values()
        test = self.add(self.rng.choice(["Equal", "Less", "Greater"]), [one, self.number()])
        self.lists.append(self.add("Where", [test, one, self.number()]))

    def sizes(self) -> str:
        """Return two values that may be sizes."""
        pair = self.add("Concat", [self.element(), self.element()], axis=0)
        return self.positive(pair) if self.rng.random() < 0.5 else self.add("Min", [pair, self.constant([9])])

    def expanded(self) -> None:
        if self.rng.random() < 0.5:
            self.data.append(self.add("ConstantOfShape", [self.sizes()]))
        else:
            self.data.append(self.add("Expand", [self.constant([1], np.float32), self.sizes()]))

    def ranged(self) -> None:
        limit = self.add("Squeeze", [self.add("Min", [self.element(), self.constant([50])])])
        zero, one = (self.add("Squeeze", [self.constant([value])]) for value in (0, self.rng.choice([1, 2])))
        self.lists.append(self.add("Range", [zero, limit, one]))

    def cut(self) -> None:
        source = self.rng.choice(self.data)
        axes, steps = self.constant([self.rng.randrange(2)]), self.constant([self.rng.choice([1, 1, 2, -1])])
        self.data.append(self.add("Slice", [source, self.element(), self.element(), axes, steps]))

    def reshaped(self) -> None:
        rest = self.constant([-1])
        wanted = self.add("Concat", self.rng.sample([rest, self.element()], 2), axis=0)
        self.data.append(self.add("Reshape", [self.rng.choice(self.data), wanted]))

    def tiled(self) -> None:
        self.data.append(self.add("Tile", [self.rng.choice(self.data), self.sizes()]))

    def joined(self) -> None:
        one, two = self.rng.choice(self.data), self.rng.choice(self.data)
        operator: Callable[[], str] = self.rng.choice(
            [
                lambda: self.add("Concat", [one, two], axis=self.rng.randrange(2)),
                lambda: self.add("Add", [one, two]),
                lambda: self.add("MatMul", [one, self.add("Transpose", [two])]),
            ]
        )
        self.data.append(operator())
        self.lists.append(self.add("Shape", [self.data[-1]]))

    def save(self, path: Path) -> list[str]:
        """Write the graph and return the names of its outputs, which are all tensors."""
        names = [name for node in self.nodes for name in node.output]
        inputs = [
            helper.make_tensor_value_info("x", FLOAT, list(SIZES)),
            helper.make_tensor_value_info("v", UINT8, [3]),
        ]
        outputs = [onnx.ValueInfoProto(name=name) for name in names]
        graph = helper.make_graph(self.nodes, "random", inputs, outputs, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        path.write_bytes(model.SerializeToString())
        return names


def analysed(path: Path) -> tuple[list[str], Sequence[Tensor | None], Poly]:
    x = Tensor.of(FLOAT, [Interval.exactly(Poly.symbol(name)) for name in SIZES])
    with opened(path) as model:
        analysis = Analysis(model)
        outputs, peak = analysis.analyse(model.graph, Scope({"x": x, "v": Tensor.of(UINT8, [Interval.exactly(3)])}))
    return analysis.reasons, outputs, peak


def departures(tensor: Tensor, answer: np.ndarray[Any, Any], sizes: dict[str, int]) -> list[str]:
    found = []
    if answer.size > tensor.count.at(sizes):
        found.append(f"{answer.size} elements over {tensor.count.at(sizes)}")
    if tensor.dims is not None:
        pairs = [(size, dim) for size, dim in zip(answer.shape, tensor.dims, strict=True)]
        found += [f"size {size} outside {dim}" for size, dim in pairs if not within(size, dim, sizes)]
    values = answer.reshape(-1).tolist()
    if answer.dtype.kind in "iub":
        found += [
            f"value {value} outside {tensor.bounds}" for value in values if not within(value, tensor.bounds, sizes)
        ]
    if tensor.items is not None:
        if len(tensor.items) != len(values):
            return [*found, "number of values"]
        pairs = [(value, item) for value, item in zip(values, tensor.items, strict=True)]
        found += [f"value {value} outside {item}" for value, item in pairs if not within(value, item, sizes)]
    return found


def within(value: float, interval: Interval, sizes: dict[str, int]) -> bool:
    low_holds = interval.low is None or value >= interval.low.value(sizes)
    return low_holds and (interval.high is None or value <= interval.high.value(sizes))


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(5))
def test_no_tensor_leaves_its_bounds(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    path = tmp_path / "random.onnx"
    checked = 0
    for _ in range(60):
        graph = Graph(rng)
        for _ in range(rng.randrange(2, 9)):
            graph.step()
        names = graph.save(path)
        reasons, bounds, peak = analysed(path)
        sizes = {"batch": rng.choice([1, 2, 5]), "width": rng.choice([1, 3, 7])}
        if reasons or peak.at(sizes) > LARGEST:
            continue
        x = np.zeros((sizes["batch"], sizes["width"]), np.float32)
        v = np.array([rng.choice([0, 1, 2, 3, 255]) for _ in range(3)], np.uint8)
        answers = run(path, {"x": x, "v": v})
        checked += bool(answers)
        wrong = list[str]()
        for name, tensor, answer in zip(names, bounds, answers, strict=False):
            found = ["unknown"] if tensor is None else departures(tensor, answer, sizes)
            wrong += [f"{name}: {text}" for text in found]
        assert wrong == [], "\n".join(map(str, graph.nodes))
    assert checked >= 15


def run(path: Path, inputs: dict[str, np.ndarray[Any, Any]]) -> Sequence[Any]:
    """Return all tensors, or none if the graph is not valid for these inputs."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        found: Sequence[Any] = onnxruntime.InferenceSession(str(path), options).run(None, inputs)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises classes without a common base for invalid graphs
        return ()
    return found


def calls(seed: int, rounds: int) -> dict[str, Any]:
    """Return the outcomes of random calls, made in another process; see __main__.py."""
    command = [sys.executable, "-m", "tests.bounds", str(seed), str(rounds)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.fixture(scope="module")
def few() -> dict[str, Any]:
    return calls(0, 8)


@pytest.mark.matrix
def test_no_output_of_any_operator_leaves_its_bounds(few: dict[str, Any]) -> None:
    assert few["wrong"] == []


def test_every_rule_is_covered(few: dict[str, Any]) -> None:
    """A rule that nothing compares with the engine must not call a graph bounded: remove it, or make calls of it."""
    names = {f"{domain}.{operator}" if domain else operator for domain, operator in RULES}
    missing = (names | {"If", "Loop", "Scan"}) - set(few["ran"])
    assert {name: few["refused"].get(name, "no recipe in recipes") for name in missing} == {}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 1100, 100))
def test_many_calls(seed: int) -> None:
    assert calls(seed, 100)["wrong"] == []
