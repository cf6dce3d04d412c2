"""A bias followed by GELU becomes ONNX Runtime's one kernel for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

from ingot.export.rewrite.passes.onnx import PatternRule, Replacement, producer, spans_last


class _BiasGelu:
    """``gelu(x + bias)``, the exact one: ``h / 2 * (1 + erf(h / sqrt(2)))``, in any order of its products."""

    def __init__(self, form: int):
        self._form = form

    def pattern(self, op: Any, x: Any, bias: Any) -> Any:
        total = op.Add(x, bias)
        if self._form == 0:
            return op.Gelu(total, _outputs=["gelu"])
        inner = pattern.OrValue([op.Div(total, math.sqrt(2)), op.Mul(total, math.sqrt(0.5))])
        rest = op.Add(op.Erf(inner), 1.0)
        products = (
            lambda: op.Mul(op.Mul(total, 0.5), rest),
            lambda: op.Mul(total, op.Mul(rest, 0.5)),
            lambda: op.Mul(op.Mul(total, rest), 0.5),
        )
        return products[self._form - 1]()

    def check(self, context: Any, x: ir.Value, bias: ir.Value, gelu: ir.Value | None = None) -> bool:
        if gelu is not None and producer(gelu).attributes.get_string("approximate", "none") != "none":
            return False
        return x.dtype is bias.dtype is ir.DataType.FLOAT and spans_last(bias, x)

    def rewrite(self, op: Any, x: ir.Value, bias: ir.Value, **_: Any) -> Any:
        return op.BiasGelu(x, bias, _domain="com.microsoft")


class BiasGelu(PatternRule):
    """Finds ``Add`` and exact GELU, as the operator or written out with ``Erf``, and writes ``BiasGelu``.

    Not a default: ONNX Runtime fuses most of these itself when it loads a model.
    """

    name = "bias-gelu"
    default = False
    anchors = ("Gelu", "Erf")

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return tuple(_BiasGelu(form) for form in range(4))
