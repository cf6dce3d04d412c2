"""Operators without an ONNX form are named with the line of the user's code; other tests cover the rest of lowering."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from onnxscript import opset20 as onnx_ops
from torch import Tensor, nn
from torch.nn import functional

from ingot.errors import ExportError, ParityError
from ingot.export import export_model
from ingot.export.capture import routes
from ingot.export.lower.onnx import lower, outside
from ingot.export.program import Program, quiet
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import DType, Signature, TensorSpec
from tests.export.models import Function
from tests.export.rewrite.ops import operators


def capture(function: Callable[..., Any]) -> Program:
    """Capture a function of one tensor [batch, 4] of float32."""
    with quiet():
        dims = ({0: torch.export.Dim("batch")},)
        exported = torch.export.export(Function(function), (torch.randn(3, 4),), dynamic_shapes=dims)
    specs = (TensorSpec("x", DType.FP32, ("batch", 4)),), (TensorSpec("y", DType.FP32, ("batch", 4)),)
    return Program(exported, Signature(*specs))


def _loss(targets: Tensor) -> Tensor:
    scores = torch.zeros(50, 2, 20, dtype=torch.float64).log_softmax(-1)
    return functional.ctc_loss(scores, targets, torch.tensor([50, 50]), torch.tensor([30, 30]))


def exotic(x: Tensor) -> Tensor:
    result: Tensor = torch.special.i1e(x) + torch.special.i1e(x + 1) + torch.special.airy_ai(x)
    return result


@pytest.mark.matrix
def test_operators_without_an_onnx_form_are_listed_once_each_with_a_line_of_the_model() -> None:
    program = capture(lambda x: torch.relu(exotic(x)))
    first, second = outside(program)
    assert first.startswith("prims.bessel_i1e.default (models.py:")
    assert second.startswith("aten.special_airy_ai.default (models.py:")
    assert outside(program.exported) == (first, second)
    with pytest.raises(
        ExportError, match=r"the model has no ONNX form: there is no translation of prims\.bessel_i1e\.default \("
    ):
        lower(program)


@pytest.mark.matrix
def test_a_number_of_groups_that_is_a_size_is_refused_with_a_remedy() -> None:
    """Convolutions whose filters come from each sample, as in StyleGAN."""

    def filtered(x: Tensor) -> Tensor:
        return torch.conv1d(x.unsqueeze(0), x[:, None, :2], groups=x.shape[0])

    with pytest.raises(ExportError, match=r"aten\.conv1d.*number of groups; declare a number instead of the dim"):
        lower(capture(filtered))


@pytest.mark.matrix
def test_the_failure_of_the_first_route_is_named_with_an_operator_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(task: routes.Task) -> routes.Captured:
        raise ParityError("the first graph differs")

    monkeypatch.setitem(routes.ROUTES, "export", refuse)
    with pytest.raises(
        ExportError, match=r"no translation of .*route 'strict': 'export' failed: the first graph differs"
    ):
        export_model(Function(torch.special.airy_ai), inputs="x:float32[batch,4]")


@pytest.mark.matrix
def test_operators_with_other_translations_are_not_listed() -> None:
    program = capture(lambda x: operators.scale(torch.special.airy_ai(x), 2.0))
    assert [item.split()[0] for item in outside(program)] == ["aten.special_airy_ai.default"]
    table = {torch.ops.aten.special_airy_ai.default: lambda x: onnx_ops.Cos(x)}
    assert outside(program, translations=table) == ()
    assert [node.op_type for node in lower(program, translations=table).graph] == ["Cos", "scale"]


@pytest.mark.matrix
def test_an_operator_that_cannot_be_translated_as_it_is_called_is_named_too() -> None:
    program = capture(lambda x: torch.histc(x, 4))
    assert outside(program) == ()
    with pytest.raises(
        ExportError, match=r"form: aten\.histc\.default \(models\.py:\d+\): aten_histc with min == max.*; rewrite that"
    ):
        lower(program)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("function", "spec", "says"),
    [
        (functional.softplus, "x:float64[n,4]", r"Softplus\(1\).* \(models\.py:\d+\); rewrite that.*--partition"),
        (lambda x: x + x, "x:bool[n,4]", r"operator \(Add\).* \(models\.py:\d+\); rewrite that.*--partition"),
        (lambda x: x[0, 0].nonzero(), "x:bool[n,4]", "depends on values.*; compute a result of a fixed size"),
        (
            lambda x: torch.linalg.lstsq(x, x).solution,
            "x:float32[n,4]",
            r"shapes.*linalg_lstsq.*; rewrite .*\.py:\d+",
        ),
        (
            lambda i: functional.embedding_bag(i, torch.eye(5).double(), mode="mean"),
            "x:int64[n,2]=0..4",
            "FP32; convert",
        ),
        (
            _loss,
            "x:int64[2,30]=0..10000000",
            "ctc_loss",
        ),
    ],
)
def test_a_refusal_names_the_line_or_the_remedy(function: Callable[[Tensor], Tensor], spec: str, says: str) -> None:
    with pytest.raises(ExportError, match=says):
        export_model(Function(function), inputs=[spec])


@pytest.mark.matrix
def test_a_form_of_several_nodes_is_rounded_to_bfloat16_once() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        x = x.bfloat16()
        return torch.logaddexp(x, x / 2).float(), torch.hstack((x[:, 0], x[:, 1])).float(), functional.mish(x).float()

    x = torch.linspace(-4, 4, 64).reshape(16, 4)
    archive = export_model(Function(function), inputs=["x:float32[n,4]"])
    outputs = load_engine(EngineSpec(archive.variant().path())).run({"x": x.numpy()})
    for expected, actual in zip(function(x), outputs.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=2**-8, atol=0)


@pytest.mark.matrix
def test_results_of_forms_that_end_in_single_precision_are_in_bfloat16() -> None:
    """The last node of these forms reads only results of the nodes before it, which are not rounded."""

    def function(x: Tensor) -> tuple[Tensor, ...]:
        smoothed = functional.cross_entropy(x, x.argmax(-1), label_smoothing=0.1)
        return functional.group_norm(x, 2), torch.logaddexp(x, x / 2), smoothed

    archive = export_model(Function(function), inputs=["x:bfloat16[n,4]"])
    assert [output.dtype.value for output in archive.variant().signature.outputs] == ["BF16"] * 3


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.matrix
def test_a_number_less_a_tensor(dtype: str) -> None:
    def functions(x: Tensor) -> tuple[Tensor, ...]:
        return 1 - x, 0.1 - x, torch.rsub(x, 3, alpha=2), torch.rsub(x, 0.1)

    archive = export_model(Function(functions), inputs=[f"x:{dtype}[batch,4]"], rewrite="none")
    x = torch.arange(8).reshape(2, 4).to(getattr(torch, dtype))
    actual = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()})
    for expected, array in zip(functions(x), actual.values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(array), expected)


@pytest.mark.parametrize(
    "function",
    [
        functional.logsigmoid,
        lambda x: functional.binary_cross_entropy_with_logits(x, torch.sigmoid(x), reduction="none"),
        lambda x: torch.logaddexp(x, x - 1),
        lambda x: torch.logcumsumexp(x, 1),
    ],
    ids=["logsigmoid", "bce", "logaddexp", "logcumsumexp"],
)
@pytest.mark.matrix
def test_logarithms_of_exponentials_do_not_overflow(function: Callable[[Tensor], Tensor]) -> None:
    archive = export_model(Function(function), inputs="x:float32[batch,4]")
    assert not [note for note in archive.variant().serving.provenance.notes if "50 times" in note]
    x = torch.tensor([[-100.0, -90, -20, 5], [0, 100, 60, -3]])
    (actual,) = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(actual), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(min=0),
        lambda x: x.clamp(-2, 5),
        lambda x: x.clamp(0, x.shape[0]),
        lambda x: torch.minimum(x, x * 0),
        lambda x: torch.maximum(x, x * 0),
        torch.sign,
        lambda x: torch.div(x, 10, rounding_mode="trunc"),
    ],
    ids=["least", "clamp", "size", "minimum", "maximum", "sign", "trunc"],
)
@pytest.mark.one_case
def test_wide_integers_are_exact(function: Callable[[Tensor], Tensor]) -> None:
    archive = export_model(Function(function), inputs="x:int64[batch,4]")
    assert not [note for note in archive.variant().serving.provenance.notes if "integers" in note]
    x = torch.tensor([[2**31, -(2**31) - 5, 1700000000123, -3], [0, 7, -1700000000123, 2**62]])
    (actual,) = load_engine(EngineSpec(archive.variants[0].path())).run({"x": x.numpy()}).values()
    torch.testing.assert_close(torch.from_numpy(actual), function(x))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("function", "opset", "message"),
    [
        (nn.LayerNorm(4), 13, "LayerNormalization needs opset 17"),
        (lambda x: x.chunk(2, 1)[0], 17, "Split needs opset 18"),
    ],
    ids=["operator", "attribute"],
)
def test_an_opset_that_cannot_be_reached_names_what_needs_a_newer_one(
    function: Callable[..., Any], opset: int, message: str
) -> None:
    with pytest.raises(ExportError, match=f"cannot be expressed in opset {opset}: {message}"):
        lower(capture(function), opset)


@pytest.mark.matrix
@pytest.mark.parametrize("opset", [16, 18])
def test_an_opset_that_can_be_reached(opset: int) -> None:
    assert lower(capture(torch.cos), opset).opset_imports[""] == opset


@pytest.mark.matrix
def test_sizes_below_zero_are_divided_as_python_does() -> None:
    """EfficientNet's padding rounds up by ``-(-size // 2)``; PyTorch's exporter rounds it to zero."""

    def pad(x: Tensor) -> Tensor:
        missing = (-(-x.shape[1] // 2) - 1) * 2 + 3 - x.shape[1]
        return functional.pad(x, (0, missing))

    archive = export_model(Function(pad), inputs="x:float32[batch,width=3..64]")
    assert archive.signature.symbols == ("batch", "width")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "divided",
    [lambda n: ((3 - n) // 2) // 2, lambda n: n // -2, lambda n: n // 2 // -2, lambda n: (n // 2) // 3],
    ids=["twice", "negative-divisor", "negative-divisor-of-half", "sizes"],
)
def test_quotients_of_sizes_are_rounded_down(divided: Callable[[int], int]) -> None:
    archive = export_model(Function(lambda x: x[0] * 0 + divided(x.shape[0])), inputs="x:float32[n=1..64,2]")
    with contextlib.closing(load_engine(EngineSpec(archive.variants[0].path()))) as engine:
        for n in range(1, 12):
            found = engine.run({"x": np.zeros((n, 2), np.float32)})["output"]
            assert found.tolist() == [divided(n)] * 2


@pytest.mark.parametrize("p", [0.0, 1.0, 2.0, 3.0, float("inf")])
@pytest.mark.matrix
def test_distances_between_rows_have_an_onnx_form(p: float) -> None:
    archive = export_model(Function(lambda x: torch.cdist(x, x.flip(1), p=p)), inputs="x:float32[batch,points,3]")
    assert archive.signature.outputs[0].shape == ("batch", "points", "points")
