"""ONNX forms of operators that PyTorch's exporter lacks or gets wrong.

Most of them are of operators that the capture and the rewrite rules insert into a graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import core

from ingot.export.capture import recurrent
from ingot.export.lower.forms import (
    exact_math,
    integers,
    losses,
    missing_forms,
    order_statistics,
    reductions,
    resizing,
    scattering,
    size_arithmetic,
    special_functions,
    tails,
)
from ingot.export.lower.forms.exact_math import in_single, like
from ingot.export.lower.forms.size_arithmetic import is_integer
from ingot.export.rewrite.rules.fx import onnx_forms

aten = torch.ops.aten
op: Any = opset18


def subtract_from_scalar(x: Any, number: float, alpha: float = 1) -> Any:
    """Express ``aten.rsub.Scalar``, ``number - alpha * x``.

    PyTorch decomposes it to a subtraction with the number first, which its exporter rejects if an integer tensor
    becomes floating point, as in ``1.0 - attention_mask``.
    """
    if x.dtype.is_integer() and not (is_integer(number) and is_integer(alpha)):
        x = op.Cast(x, to=ir.DataType.FLOAT)
    literal, factor = (
        op.Constant(value=ir.tensor(value, x.dtype)) if isinstance(value, int | float) else op.CastLike(value, x)
        for value in (number, alpha)
    )
    return op.Sub(literal, x if alpha == 1 else op.Mul(factor, x))


def clamp(x: Any, least: Any = None, most: Any = None) -> Any:
    """Express ``aten.clamp``, for integers by comparisons: ONNX Runtime's kernels are wrong beyond 32 bits.

    See https://github.com/microsoft/onnxruntime/pull/25280. Without both bounds, ``Clip`` replaces infinities by the
    extreme finite numbers.
    """
    if not x.dtype.is_integer():
        if least is None and most is None:
            return op.Identity(x)
        bounds = (like(-math.inf if least is None else least, x), like(math.inf if most is None else most, x))
        return op.Clip(x, *bounds)
    for bound, beyond in ((least, op.Less), (most, op.Greater)):
        if bound is not None:
            is_number = isinstance(bound, int | float)
            limit = op.Constant(value=ir.tensor(int(bound), x.dtype)) if is_number else op.CastLike(bound, x)
            x = op.Where(beyond(x, limit), limit, x)
    return x


def clamp_max(x: Any, most: Any) -> Any:
    """Express ``aten.clamp_max``."""
    return clamp(x, None, most)


def minimum(x: Any, y: Any) -> Any:
    """Express ``aten.minimum``; see :func:`clamp`."""
    return op.Where(op.Less(x, y), x, y) if x.dtype.is_integer() else core.aten_minimum(x, y)


def maximum(x: Any, y: Any) -> Any:
    """Express ``aten.maximum``; see :func:`clamp`."""
    return op.Where(op.Greater(x, y), x, y) if x.dtype.is_integer() else core.aten_maximum(x, y)


@in_single
def interpolated(x: Any, end: Any, weight: Any) -> Any:
    """Express ``aten.lerp``, which counts from the nearer end; the exporter takes every weight below 0 for a small one.

    With an infinite ``end``, the two forms differ: one is infinite, the other NaN.
    """
    end, weight = like(end, x), like(weight, x)
    gap = op.Sub(end, x)
    near = op.Add(x, op.Mul(weight, gap))
    far = op.Sub(end, op.Mul(gap, op.Sub(like(1.0, x), weight)))
    return op.Where(op.Less(op.Abs(weight), like(0.5, x)), near, far)


def _primitive(name: str) -> Callable[..., Any]:
    """Return the form of an operator that decompositions write, one of whose operands may depend on a size.

    The exporter does not promote such a number, which is in double precision, to the type of the tensor.
    """

    def apply(x: Any, y: Any) -> Any:
        if isinstance(x, ir.Value) and isinstance(y, ir.Value) and not (x.shape and y.shape):
            x, y = (op.CastLike(x, y), y) if y.shape else (x, op.CastLike(y, x))
        return getattr(op, name)(x, y)

    apply.__name__ = f"primitive_{name}"  # the exporter's registry reads it
    return apply


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.rsub.Scalar: subtract_from_scalar,
    aten.lerp.Scalar: interpolated,
    aten.lerp.Tensor: interpolated,
    aten.clamp.default: clamp,
    aten.clamp_min.default: clamp,
    aten.clamp_max.default: clamp_max,
    aten.clamp_min.Tensor: maximum,
    aten.clamp_max.Tensor: minimum,
    aten.minimum.default: minimum,
    aten.maximum.default: maximum,
    **{getattr(torch.ops.prims, name.lower()).default: _primitive(name) for name in ("Add", "Sub", "Mul", "Div")},
    **exact_math.TRANSLATIONS,
    **tails.TRANSLATIONS,
    **special_functions.TRANSLATIONS,
    **reductions.TRANSLATIONS,
    **integers.TRANSLATIONS,
    **losses.TRANSLATIONS,
    **resizing.TRANSLATIONS,
    **order_statistics.TRANSLATIONS,
    **missing_forms.TRANSLATIONS,
    **scattering.TRANSLATIONS,
    **size_arithmetic.TRANSLATIONS,
    **recurrent.TRANSLATIONS,
    **onnx_forms.TRANSLATIONS,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
