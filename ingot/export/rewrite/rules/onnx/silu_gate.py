"""The gate of SwiGLU layers, ``silu(x) * y``, gets ONNX Runtime's kernel for SiLU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement


class _SiluGate:
    """``x * sigmoid(x) * y``."""

    def pattern(self, op: Any, x: Any, y: Any) -> Any:
        return op.Mul(op.Mul(x, op.Sigmoid(x)), y)

    def check(self, context: Any, x: ir.Value, y: ir.Value) -> bool:
        return x.dtype is ir.DataType.FLOAT

    def rewrite(self, op: Any, x: ir.Value, y: ir.Value) -> Any:
        return op.Mul(op.QuickGelu(x, alpha=1.0, _domain="com.microsoft"), y)


class SiluGate(PatternRule):
    """Finds ``x * sigmoid(x) * y`` and writes ``QuickGelu(x, alpha=1) * y``.

    Not a default: ONNX Runtime does the same itself when it loads a model.
    """

    name = "silu-gate"
    default = False
    anchors = ("Sigmoid",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (_SiluGate(),)
