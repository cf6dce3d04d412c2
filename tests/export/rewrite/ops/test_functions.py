"""User-defined operators in ONNX run in onnxruntime without Ingot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import Tensor

import ingot
from ingot.errors import ExportError, InvalidArgument
from ingot.export.lower.onnx import lower
from ingot.export.program import Program, quiet
from ingot.tensors import DType, Signature, TensorSpec
from tests.export.models import Function
from tests.export.rewrite.ops import operators as ops


def program(function: Callable[..., Any], width: int = 4, strict: bool = False) -> Program:
    """Capture a function of one tensor [batch, width] of float32."""
    batch = torch.export.Dim("batch")
    with quiet():
        exported = torch.export.export(
            Function(function), (torch.randn(3, width),), dynamic_shapes=({0: batch},), strict=strict
        )
    results = [node.meta["val"] for node in exported.graph.output_node().args[0]]
    outputs = tuple(
        TensorSpec(f"y{index}", DType.FP32, ("batch", *result.shape[1:])) for index, result in enumerate(results)
    )
    return Program(exported, Signature((TensorSpec("x", DType.FP32, ("batch", width)),), outputs))


def prove(function: Callable[..., Any], model: ir.Model, width: int = 4) -> None:
    """Compare a model with the function at another batch size than it was captured with."""
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = torch.randn(7, width)
    expected = function(x)
    actual = session.run(None, {"x": x.numpy()})
    for left, right in zip(expected if isinstance(expected, tuple) else (expected,), actual, strict=True):
        assert np.allclose(left.numpy(), right, atol=1e-5)


def own(model: ir.Model) -> list[tuple[str, str, str]]:
    """The nodes whose operators are not ONNX's."""
    return [node.op_identifier() for node in model.graph if node.domain]


@pytest.mark.matrix
def test_it_is_a_node_of_its_domain_and_a_function() -> None:
    weight = torch.rand(4)

    def function(x: Tensor) -> Tensor:
        return ops.gated_norm(x, x + 1, weight, 1e-5)

    model = lower(program(function))
    assert own(model) == list(model.functions) == [("tests", "gated_norm", "")]
    (node,) = (node for node in model.graph if node.domain)
    assert node.attributes["eps"].as_float() == pytest.approx(1e-5)
    (made,) = model.functions.values()
    assert [value.name for value in made.inputs] == ["x", "gate", "weight"]
    assert all(value.shape is None for value in made.inputs)  # nothing ties it to this model
    prove(function, model)


@pytest.mark.matrix
def test_calls_share_a_function_where_their_bodies_are_the_same() -> None:
    def function(x: Tensor) -> Tensor:
        narrow = ops.gated_norm(x[:, :2], x[:, 2:], torch.ones(2), 0.5)
        wide = ops.gated_norm(x, x + 1, torch.ones(4), 0.5)
        return wide + ops.gated_norm(x, x + 1, torch.ones(4), 1e-6) + narrow.repeat(1, 2)

    model = lower(program(function))
    assert [overload for _, _, overload in own(model)] == ["", "", "2"]
    assert list(model.functions) == [("tests", "gated_norm", ""), ("tests", "gated_norm", "2")]
    prove(function, model)


@pytest.mark.matrix
def test_several_results() -> None:
    """Captured in the strict way, which reads the code of the operator's call too."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = ops.add_norm(x, x * 2)
        return normed + 1, total

    model = lower(program(function, strict=True))
    assert own(model) == [("tests", "add_norm", "")]
    prove(function, model)


@pytest.mark.matrix
def test_every_kind_of_parameter() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        one = ops.mix(x, None, [x, x * 2], [1], mode="max")
        return one, ops.mix(x, x + 3, [x], [-1], True)

    model = lower(program(function))
    node = next(node for node in model.graph if node.domain)
    assert {name: attribute.value for name, attribute in node.attributes.items()} == {
        "dims": (1,),
        "negate": 0,
        "mode": "max",
        "to": onnx.TensorProto.FLOAT,
    }
    prove(function, model)


@pytest.mark.matrix
def test_a_size_of_the_model_stays_dynamic_in_the_body() -> None:
    def function(x: Tensor) -> Tensor:
        return ops.shuffle(x, 2)

    model = lower(program(function, width=8))
    assert own(model) == [("tests", "shuffle", "")]
    prove(function, model, width=8)


@pytest.mark.matrix
def test_an_operator_made_of_another() -> None:
    """ONNX Runtime 1.31 takes the wrong overload of a function inside of another, so the graph must not have any."""

    def function(x: Tensor) -> Tensor:
        return ops.nested(x) + ops.scale(x, 5.0)

    model = lower(program(function))
    assert {name for _, name, _ in own(model)} == {"nested", "scale"}
    assert not any(node.domain for made in model.functions.values() for node in made)
    prove(function, model)


@pytest.mark.matrix
def test_an_older_opset_has_the_operators_without_their_functions() -> None:
    def function(x: Tensor) -> Tensor:
        return ops.scale(x, 5.0)

    model = lower(program(function), 17)
    assert (own(model), model.opset_imports[""]) == ([], 17)
    prove(function, model)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("function", "node"),
    [
        (lambda x: ops.bias_gelu(x, torch.ones(4)), ("com.microsoft", "BiasGelu", "")),
        (lambda x: ops.quick_gelu(x, 1.5), ("com.microsoft", "QuickGelu", "")),
    ],
    ids=["inputs", "attribute"],
)
def test_a_native_kernel_of_onnx_runtime(function: Callable[..., Any], node: tuple[str, str, str]) -> None:
    model = lower(program(function))
    assert own(model) == [node]
    assert not model.functions
    prove(function, model)


@pytest.mark.matrix
def test_a_function_written_in_onnxscript() -> None:
    def function(x: Tensor) -> Tensor:
        return ops.square_plus(x, 3.0) * ops.square_plus(x, 4.0)

    model = lower(program(function))
    assert own(model) == [("tests", "square_plus", "")] * 2
    assert set(model.functions) == {("tests", "square_plus", ""), ("helpers", "_square", "")}
    prove(function, model)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (ops.opaque, r"body of operator 'tests::opaque' cannot be captured; state .* \(onnx= or native=\)"),
        (
            ops.bessel,
            r"the body of operator 'tests::bessel' has no ONNX form: there is no translation of "
            r"prims\.bessel_i1e\.default \(operators\.py:\d+\); rewrite that part, or pass onnx= in its definition",
        ),
        (lambda x: ops.repeated(x, x.shape[0]), r"models\.py:\d+\): argument 'times' .* is a size that changes"),
    ],
    ids=["opaque", "bessel", "size"],
)
def test_operators_impossible_in_onnx_are_refused_with_the_reason(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        lower(program(function))


def test_an_onnx_form_that_is_not_an_onnx_function_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"'tests::plain' is function; make it .* @onnxscript\.script\(\)"):
        ingot.op("tests::plain", onnx=lambda x: x)  # type: ignore[arg-type]


@pytest.mark.matrix
def test_an_operator_that_fails_pytorchs_checks_is_refused() -> None:
    @ingot.op("tests::misshapen", example=(torch.ones(2, 4),), fake=lambda x: x.new_empty(x.shape[0], 7))
    def misshapen(x: Tensor) -> Tensor:
        return x * 2

    with pytest.raises(
        ExportError, match=r"'tests::misshapen' fails torch\.library\.opcheck: .*\[2, 4\]\) and .*\[2, 7\]"
    ):
        lower(program(misshapen))


@pytest.mark.matrix
def test_a_body_that_does_nothing() -> None:
    @ingot.op("tests::same")
    def same(x: Tensor) -> Tensor:
        return x.clone()

    model = lower(program(lambda x: same(x) + 1))
    assert own(model) == [("tests", "same", "")]
    prove(lambda x: x + 1, model)
