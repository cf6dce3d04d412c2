"""ONNX forms of operators beside those that PyTorch's exporter has.

Most are of what the capture and the rewrite rules put into a graph; the rest are of what the exporter gets wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18

from ingot.export.capture import recurrent
from ingot.export.rules.fx import onnx_forms

op: Any = opset18


def subtract_from_scalar(x: Any, number: float, alpha: float = 1) -> Any:
    """Express ``aten.rsub.Scalar``, ``number - alpha * x``.

    PyTorch decomposes it to a subtraction with the number first, which its exporter refuses where integers turn to
    floating point, as in ``1.0 - attention_mask``.
    """
    if x.dtype.is_integer() and not (isinstance(number, int) and isinstance(alpha, int)):
        x = op.Cast(x, to=ir.DataType.FLOAT)
    literal, factor = (op.Constant(value=ir.tensor(value, x.dtype)) for value in (number, alpha))
    return op.Sub(literal, x if alpha == 1 else op.Mul(factor, x))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.rsub.Scalar: subtract_from_scalar,
    **recurrent.TRANSLATIONS,
    **onnx_forms.TRANSLATIONS,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
