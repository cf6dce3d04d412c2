"""RMS normalization, which frameworks write as six operators, becomes one that engines run as a single kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement, producer, reduces_last, scalar, spans_last

# The first operator set with an operator for it.
_OPSET = 23


class _RmsNorm:
    """``x / sqrt(mean(x * x) + epsilon) * scale`` over the last axis, computed in FP32."""

    def __init__(self, opset: int):
        self._opset = opset

    def pattern(self, op: Any, x: Any, scale: Any, epsilon: Any) -> Any:
        square = pattern.OrValue([op.Pow(x, 2.0), op.Mul(x, x)], tag_var="square")
        mean = op.ReduceMean(square, _allow_other_inputs=True, _outputs=["mean"])
        root = op.Sqrt(op.Add(mean, epsilon))
        normal = pattern.OrValue([op.Div(x, root), op.Mul(x, op.Reciprocal(root))], tag_var="division")
        result = pattern.OrValue([op.Cast(normal, _outputs=["narrow"]), normal], tag_var="cast")
        return op.Mul(result, scale)

    def check(
        self,
        context: Any,
        *,
        x: ir.Value,
        scale: ir.Value,
        epsilon: ir.Value,
        mean: ir.Value,
        square: int,
        division: int,
        narrow: ir.Value | None = None,
        **_: Any,
    ) -> bool:
        if self._opset < _OPSET and square == division == 0:
            return False  # already the form that ONNX Runtime fuses
        return (
            x.dtype is ir.DataType.FLOAT
            and reduces_last(mean, x)
            and spans_last(scale, x)
            and scalar(epsilon) is not None
            and (self._opset < _OPSET or _source(x, narrow).dtype == scale.dtype)
        )

    def rewrite(
        self,
        op: Any,
        *,
        x: ir.Value,
        scale: ir.Value,
        epsilon: ir.Value,
        mean: ir.Value,
        narrow: ir.Value | None = None,
        **_: Any,
    ) -> Any:
        if self._opset >= _OPSET:
            return op.RMSNormalization(_source(x, narrow), scale, axis=-1, epsilon=scalar(epsilon), stash_type=1)
        reduction = producer(mean)
        square = op.Pow(x, op.Constant(value_float=2.0))
        mean = op.ReduceMean(square, *reduction.inputs[1:], **reduction.attributes)
        normal = op.Div(x, op.Sqrt(op.Add(mean, epsilon)))
        return op.Mul(normal if narrow is None else op.Cast(normal, **producer(narrow).attributes), scale)


def _source(x: ir.Value, narrow: ir.Value | None) -> ir.Value:
    """Return the value that was cast to FP32 for the normalization, or the FP32 value itself."""
    cast = x.producer()
    if narrow is None or cast is None or cast.op_type != "Cast" or cast.inputs[0] is None:
        return x
    return cast.inputs[0]


class RmsNorm(PatternRule):
    """Finds RMS normalization over the last axis.

    From opset 23 on it becomes ``RMSNormalization``. Earlier sets lack the operator; there it becomes the form that
    ONNX Runtime fuses into a single kernel, which is not the one that PyTorch's exporter writes.
    """

    name = "rms-norm"
    anchors = ("ReduceMean",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (_RmsNorm(opset),)
