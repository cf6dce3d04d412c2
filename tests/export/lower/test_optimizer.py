"""onnxscript's optimizer: a step that breaks a graph is left out, and constants are matched exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_ir.passes.common import LiftConstantsToInitializersPass
from onnxscript import rewriter
from torch import Tensor, nn

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.export.lower import optimizer
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array
from tests.export.models import Function


class ClampedTwice(nn.Module):
    """Clamps one tensor by two pairs of buffers, for which onnxscript makes two initializers of one name."""

    def __init__(self) -> None:
        super().__init__()
        self.low: Tensor
        self.high: Tensor
        self.lower: Tensor
        self.higher: Tensor
        for name, value in {"low": -1.0, "high": 1.0, "lower": -0.5, "higher": 0.5}.items():
            self.register_buffer(name, torch.tensor(value))

    def forward(self, x: Tensor) -> Tensor:
        return torch.clamp(x, self.low, self.high) - 2 * torch.clamp(x, self.lower, self.higher)


@pytest.mark.matrix
def test_a_step_whose_result_does_not_load_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "_rules", lambda: list(rewriter._DEFAULT_REWRITE_RULES))
    archive = export_model(ClampedTwice(), inputs="x:float32[batch,4]")
    (note,) = [note for note in archive.variant().serving.provenance.notes if "optimizer" in note]
    assert "left out: FuseMaxMinToClip (" in note
    assert len(note) < 300


@pytest.mark.matrix
def test_a_fault_of_a_step_costs_this_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(op: Any, x: Any) -> Any:
        raise ValueError("a fault")

    rules = [*optimizer._rules(), rewriter.pattern.RewriteRule(lambda op, x: op.Relu(x), fail, name="Faulty")]
    monkeypatch.setattr(optimizer, "_rules", lambda: rules)
    archive = export_model(Function(torch.relu), inputs="x:float32[batch,4]")
    (note,) = [note for note in archive.variant().serving.provenance.notes if "optimizer" in note]
    assert note.endswith("left out: Faulty (ValueError)")


@pytest.mark.matrix
def test_numbers_near_zero_or_one_are_kept() -> None:
    def divide(x: Tensor) -> Tensor:
        return x * 1.000009 / (x.square().sum(-1, keepdim=True).sqrt() + 1e-9) + 1e-8

    archive = export_model(Function(divide), inputs="x:float32[batch,4]")
    rows = torch.tensor([[0.0] * 4, [1e-9, 0, 0, 0], [1, 2, 3, 4]])
    engine = load_engine(EngineSpec(archive.variants[0].path()))
    np.testing.assert_allclose(engine.run({"x": rows.numpy()})["output"], divide(rows).numpy(), rtol=1e-6)
    engine.close()


def test_each_step_is_accepted_or_undone() -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 18]> f (float[n] x) => (float[n] y) '
        "{ zero = Constant <value_float = 0.0> () sum = Sub (x, zero) lost = Neg (sum) y = Relu (sum) }"
    )

    def accept(graph: ir.Model) -> None:
        if "Sub" not in {node.op_type for node in graph.graph}:
            raise ExportError("the sum is gone")

    optimized, rejected = optimizer.optimize_gradually(model, accept)
    assert {node.op_type for node in optimized.graph} == {"Sub", "Relu"}
    assert [(name, str(error)) for name, error in rejected.items()] == [("the rule for Sub", "the sum is gone")]
    assert {node.op_type for node in optimizer.optimize_gradually(model)[0].graph} == {"Relu"}


@pytest.mark.parametrize("value", [1e-9, -1e-9])
def test_a_rule_for_zero_takes_zero_only(value: float) -> None:
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 18]> f (float[n] x) => (float[n] y) '
        f"{{ tiny = Constant <value_float = {value}> () y = Sub (x, tiny) }}"
    )
    optimizer.optimize(model)
    assert [node.op_type for node in model.graph] == ["Sub"]


ONE = "one = Constant <value_float = 1.0> ()"
ZERO = "zero = Constant <value_float = 0.0> ()"
LESS = "less = Constant <value_float = -2.0> ()"
# Each rule with a graph that it changes, and the type of the graph's output.
EXACT: Mapping[str, tuple[str, str]] = {
    "the rule for Mul": ("float[n]", f"{ONE} y = Mul (x, one)"),
    "the rule for Add": ("int64[k]", "none = Constant <value_int = 0> () y = Add (i, none)"),
    "the rule for Sub": ("float[n]", f"{ZERO} y = Sub (x, zero)"),
    "the rule for Div": ("float[n]", f"{ONE} y = Div (x, one)"),
    "the rule for ConstantOfShape and Cast": (
        "int64[n]",
        "size = Shape (x) made = ConstantOfShape <value = float[1] {-1.7}> (size) y = Cast <to = 7> (made)",
    ),
    "the rule for Slice": (
        "float[n]",
        "start = Constant <value_ints = [0]> () end = Constant <value_ints = [9223372036854775807]> () "
        "step = Constant <value_ints = [1]> () y = Slice (x, start, end, start, step)",
    ),
    "FuseSuccessiveRelu": ("float[n]", "a = Relu (x) y = Relu (a)"),
    "CastCast": ("float16[n]", "a = Cast <to = 1> (x) y = Cast <to = 10> (a)"),
    "CastIdentity": ("float[n]", "y = Cast <to = 1> (x)"),
    "ExpandIdentity": ("float[3,6]", "shape = Constant <value_ints = [3, 6]> () y = Expand (m, shape)"),
    "Flatten2Reshape": ("float[a,b]", "y = Flatten <axis = 0> (m)"),
    "ReshapeReshape": (
        "float[a,b]",
        "all = Constant <value_ints = [18]> () pairs = Constant <value_ints = [9, 2]> () "
        "a = Reshape (m, all) y = Reshape (a, pairs)",
    ),
    "TransposeIdentity": ("float[a,b]", "y = Transpose <perm = [0, 1]> (m)"),
    "TransposeTranspose": ("float[a,b]", "a = Transpose <perm = [1, 0]> (m) y = Transpose <perm = [1, 0]> (a)"),
    "UnsqueezeUnsqueeze": (
        "float[a,b,c,d]",
        "first = Constant <value_ints = [0]> () third = Constant <value_ints = [2]> () "
        "a = Unsqueeze (m, third) y = Unsqueeze (a, first)",
    ),
    "SqueezeReshape1d": ("float[n]", "all = Constant <value_ints = [-1]> () a = Squeeze (x) y = Reshape (a, all)"),
}
# Rules that move values, fold weights or drop sums with a bias of 0. Their conditions are on shapes and weights.
BY_SHAPE = {
    "the rule for Dropout",
    "the rule for Reshape and MatMul and Reshape",
    "the rule for Reshape and Reshape and MatMul and Reshape",
    "MaterializeReshapeShape",
    "SlicesSplit",
    "ScatterAllDynamic",
    "ScatterAllStatic",
    "NormalizePadFormatConv",
    "NormalizePadFormatConvInteger",
    "FuseConvPad",
    "FuseConvIntegerPad",
    *(f"FuseBatchNormInto{layer}" for layer in ("Conv", "ConvTranspose", "Gemm")),
    *(f"RemoveOptionalBiasFrom{layer}" for layer in ("Conv", "ConvTranspose", "QLinearConv", "Gemm")),
}
# Graphs that a rule of onnxscript would change wrongly for some values.
KEPT: Mapping[str, tuple[str, str]] = {
    "a sum with zero": ("float[n]", f"{ZERO} y = Add (x, zero)"),
    "two roundings": ("float16[k]", "a = Cast <to = 1> (d) y = Cast <to = 10> (a)"),
    "disjoint bounds": (
        "float[n]",
        f"{ZERO} {ONE} two = Constant <value_float = 2.0> () three = Constant <value_float = 3.0> () "
        "a = Clip (x, zero, one) y = Clip (a, two, three)",
    ),
    "relu of numbers below zero": ("float[n]", f"{LESS} a = Clip (x, , less) y = Relu (a)"),
    "one bound": ("float[n]", f"{ONE} a = Relu (x) y = Clip (a, one)"),
    "unequal parts": (
        "float[a,b]",
        "last = Constant <value_ints = [1]> () a = Constant <value_ints = [0]> () b = Constant <value_ints = [2]> () "
        "c = Constant <value_ints = [5]> () left = Slice (odd, a, b, last) right = Slice (odd, b, c, last) "
        "y = Concat <axis = 1> (right, left)",
    ),
}
ATTACK: Mapping[str, Array] = {
    "x": np.array([0.0, -0.0, 1, -1, 2.5, -2.5, 1e-45, 65519, 3.4e38, np.inf, -np.inf, np.nan], np.float32),
    "i": np.array([0, -1, 2**53 + 1, -(2**63)]),
    "d": np.array([1 + 2**-11 + 2**-40, 65520 - 1e-9, 0.1, -0.0]),
    "m": np.arange(18, dtype=np.float32).reshape(3, 6),
    "odd": np.arange(15, dtype=np.float32).reshape(3, 5),
}


def graph(kind: str, body: str) -> ir.Model:
    inputs = "float[12] x, int64[4] i, double[4] d, float[3,6] m, float[3,5] odd"
    model = ir.from_onnx_text(f'<ir_version: 8, opset_import: ["" : 18]> f ({inputs}) => ({kind} y) {{ {body} }}')
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    return model


def run(model: ir.Model) -> Array:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options)
    return np.asarray(session.run(None, dict(ATTACK))[0])


def same_bits(left: Array, right: Array) -> bool:
    return np.array_equal(left, right, equal_nan=left.dtype.kind == "f") and np.array_equal(
        np.signbit(left[left == left]), np.signbit(right[right == right])
    )


def test_each_rule_is_an_identity_for_all_values() -> None:
    rules = optimizer._rules()
    assert {optimizer._name(rule) for rule in rules} == EXACT.keys() | BY_SHAPE
    for rule in rules:
        name = optimizer._name(rule)
        if name in EXACT:
            model = graph(*EXACT[name])
            expected = run(model)
            fired = [optimizer._rewrite([other], model) for other in rules if optimizer._name(other) == name]
            assert any(fired), name
            assert same_bits(run(model), expected), name


def test_graphs_whose_values_a_rule_would_change_are_kept() -> None:
    for name, parts in KEPT.items():
        model = graph(*parts)
        expected = run(model)
        optimizer.optimize(model)
        assert same_bits(run(model), expected), name
