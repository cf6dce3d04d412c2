"""Layer normalization as a formula becomes the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement, reduces_last, scalar, spans_last


class _LayerNorm:
    """``(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * scale`` over the last axis, perhaps ``+ bias``."""

    def __init__(self, with_bias: bool):
        self._with_bias = with_bias

    def pattern(self, op: Any, x: Any, scale: Any, bias: Any, epsilon: Any) -> Any:
        centered = op.Sub(x, op.ReduceMean(x, _allow_other_inputs=True, _outputs=["mean"]))
        square = pattern.OrValue([op.Pow(centered, 2.0), op.Mul(centered, centered)])
        variance = op.ReduceMean(square, _allow_other_inputs=True, _outputs=["variance"])
        root = op.Sqrt(op.Add(variance, epsilon))
        scaled = op.Mul(pattern.OrValue([op.Div(centered, root), op.Mul(centered, op.Reciprocal(root))]), scale)
        return op.Add(scaled, bias) if self._with_bias else scaled

    def check(
        self,
        context: Any,
        x: ir.Value,
        scale: ir.Value,
        bias: ir.Value | None,
        epsilon: ir.Value,
        mean: ir.Value,
        variance: ir.Value,
    ) -> bool:
        return (
            x.dtype is ir.DataType.FLOAT
            and reduces_last(mean, x)
            and reduces_last(variance, x)
            and spans_last(scale, x)
            and (bias is None or spans_last(bias, x))
            and scalar(epsilon) is not None
        )

    def rewrite(self, op: Any, x: ir.Value, scale: ir.Value, bias: ir.Value | None, epsilon: ir.Value, **_: Any) -> Any:
        weights = (scale,) if bias is None else (scale, bias)
        return op.LayerNormalization(x, *weights, axis=-1, epsilon=scalar(epsilon))


class LayerNorm(PatternRule):
    """Finds layer normalization over the last axis and writes ``LayerNormalization``, which exists from opset 17 on."""

    name = "layer-norm"
    anchors = ("ReduceMean",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (_LayerNorm(with_bias=True), _LayerNorm(with_bias=False)) if opset >= 17 else ()
