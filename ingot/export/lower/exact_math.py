"""ONNX forms of functions that PyTorch's exporter approximates at the ends of their domains.

At exact multiples, at zeros with a sign, at infinities and where a sum loses small terms, the exporter's forms differ
from PyTorch's kernels. The forms here agree with these kernels for all values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import core

from ingot.export.lower.size_arithmetic import is_integer

aten = torch.ops.aten
op: Any = opset18


def _like(value: Any, x: Any) -> Any:
    """Return a number, or a tensor, in the datatype of ``x``. Values made by ``op`` have none until it is set."""
    if isinstance(value, bool | int | float):
        made = op.Constant(value=ir.tensor(value, x.dtype))
    elif value.dtype == x.dtype:
        return value
    else:
        made = op.CastLike(value, x)
    made.dtype = x.dtype
    return made


def _is_negative(x: Any) -> Any:
    """Return where a floating-point number has its sign set, as that of -0.0 is; NaN has none."""
    zero = _like(0.0, x)
    return op.Less(op.Where(op.Equal(x, zero), op.Reciprocal(x), x), zero)


def _has_other_sign(rest: Any, y: Any, zero: Any) -> Any:
    """Return where a remainder with the sign of the dividend is to be moved to the sign of the divisor."""
    return op.And(op.Not(op.Equal(rest, zero)), op.Xor(op.Less(rest, zero), op.Less(y, zero)))


def remainder(x: Any, y: Any) -> Any:
    """Express ``aten.remainder``; the exporter's ``x - floor(x / y) * y`` is wrong at multiples and for infinite y."""
    if isinstance(x, float) and is_integer(y):
        y = op.Cast(y, to=ir.DataType.FLOAT)
        y.dtype = ir.DataType.FLOAT
    if not isinstance(x, ir.Value):
        x = _like(x, y)
    if is_integer(x):
        return core.aten_remainder(x, _like(y, x))
    y = _like(y, x)
    rest = op.Mod(x, y, fmod=1)
    return op.Where(_has_other_sign(rest, y, _like(0.0, x)), op.Add(rest, y), rest)


def floor_divide(x: Any, y: Any) -> Any:
    """Express ``aten.floor_divide``.

    The quotient of floating-point numbers may be rounded up to a whole number that the exact quotient does not reach,
    as that of 1.0 by 0.1. So the remainder is subtracted before the division, as PyTorch's kernel does.
    """
    if not isinstance(x, ir.Value):
        x = _like(x, y)
    y = _like(y, x)
    if x.dtype.is_integer():
        return core.aten_floor_divide(x, y)
    rest = op.Mod(x, y, fmod=1)
    one, zero, half = (_like(number, x) for number in (1.0, 0.0, 0.5))
    quotient = op.Div(op.Sub(x, rest), y)
    quotient = op.Where(_has_other_sign(rest, y, zero), op.Sub(quotient, one), quotient)
    down = op.Floor(quotient)
    whole = op.Where(op.Greater(op.Sub(quotient, down), half), op.Add(down, one), down)
    plain = op.Div(x, y)
    return op.Where(op.Equal(y, zero), plain, op.Where(op.Equal(quotient, zero), op.Mul(plain, zero), whole))


def divide(x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """Express ``aten.div`` with rounding; the exporter divides integers as 32-bit floating-point numbers."""
    if rounding_mode == "floor":
        return floor_divide(x, y)
    if rounding_mode == "trunc" and is_integer(x) and is_integer(y):
        return op.Div(x, _like(y, x))
    return core.aten_div_mode(x, y, rounding_mode)


def power(x: Any, exponent: Any) -> Any:
    """Express ``aten.pow`` with an exponent that is a number, or depends on a size.

    PyTorch computes the powers 1/2 and -1/2 as roots, which differ for -inf and -0.0. ONNX Runtime computes powers of
    integers in floating point.
    """
    if is_integer(x) and isinstance(exponent, int) and not isinstance(exponent, bool) and 0 < exponent <= 8:
        found = x
        for _ in range(exponent - 1):
            found = op.Mul(found, x)
        return found if exponent > 1 else op.Identity(x)
    if not isinstance(exponent, int | float):
        return op.Pow(op.Cast(x, to=ir.DataType.FLOAT) if is_integer(x) else x, exponent)
    if is_integer(x) or abs(exponent) != 0.5:
        return core.aten_pow_tensor_scalar(x, exponent)
    root = op.Sqrt(x)
    return root if exponent > 0 else op.Reciprocal(root)


def atan2(y: Any, x: Any) -> Any:
    """Express ``aten.atan2``: the angle of the first quadrant, then the quadrant by both signs.

    The exporter's form is NaN for two infinities, and has the wrong sign or value on the negative axis.
    """
    height, width = op.Abs(y), op.Abs(x)
    slope = op.Where(op.Equal(height, width), op.Sign(width), op.Div(height, width))  # also 0 / 0 and inf / inf
    angle = op.Atan(slope)
    angle = op.Where(_is_negative(x), op.Sub(_like(math.pi, x), angle), angle)
    return op.Where(_is_negative(y), op.Neg(angle), angle)


def sign(x: Any) -> Any:
    """Express ``aten.sign`` by comparisons: NaN has the sign 0, and ONNX Runtime's kernel is wrong beyond 32 bits.

    See https://github.com/microsoft/onnxruntime/pull/25280.
    """
    zero = _like(0, x) if x.dtype.is_integer() else _like(0.0, x)
    return op.Sub(op.CastLike(op.Greater(x, zero), x), op.CastLike(op.Less(x, zero), x))


def log1p(x: Any) -> Any:
    """Express ``aten.log1p``."""
    return _log1p(x, x)


def _log1p(x: Any, like: Any) -> Any:
    """Return ``log(1 + x)``, which loses the digits of a small x; the quotient restores them (Kahan)."""
    one = _like(1.0, like)
    total = op.Add(one, x)
    gained = op.Sub(total, one)
    log = op.Log(total)
    exact = op.Mul(log, op.Div(x, gained))
    exact = op.Where(op.Equal(gained, _like(0.0, like)), x, exact)
    return op.Where(op.Equal(total, _like(math.inf, like)), log, exact)


def log_sigmoid(x: Any) -> Any:
    """Express ``aten.log_sigmoid``; the exporter's logarithm of a sigmoid is infinite below -20."""
    return op.Sub(op.Min(x, _like(0.0, x)), _log1p_exp(op.Neg(op.Abs(x)), x))


def log_add_exp(x: Any, y: Any) -> Any:
    """Express ``aten.logaddexp``; the exporter's sum of exponentials overflows."""
    distance = op.Where(op.Equal(x, y), _like(0.0, x), op.Abs(op.Sub(x, y)))  # equal infinities have none
    return op.Add(op.Max(x, y), _log1p_exp(op.Neg(distance), x))


def log_add_exp2(x: Any, y: Any) -> Any:
    """Express ``aten.logaddexp2``; see :func:`log_add_exp`."""
    distance = op.Where(op.Equal(x, y), _like(0.0, x), op.Abs(op.Sub(x, y)))
    added = _log1p_exp(op.Mul(op.Neg(distance), _like(math.log(2), x)), x)
    return op.Add(op.Max(x, y), op.Mul(added, _like(1 / math.log(2), x)))


def log_cum_sum_exp(x: Any, dim: int) -> Any:
    """Express ``aten.logcumsumexp``; each prefix is scaled by its largest value, so that it does not overflow."""
    rank = len(x.shape)
    last = [axis for axis in range(rank) if axis != dim % rank] + [dim % rank]
    values = op.Transpose(x, perm=last)
    place = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(values, start=rank - 1)), op.Constant(value_int=1))
    seen = op.GreaterOrEqual(op.Unsqueeze(place, [1]), op.Unsqueeze(place, [0]))
    each = op.Where(seen, op.Unsqueeze(values, [-2]), _like(-math.inf, x))
    largest = op.ReduceMax(each, op.Constant(value_ints=[-1]), keepdims=1)
    infinite = op.Equal(op.Abs(largest), _like(math.inf, x))
    shift = op.Where(infinite, _like(0.0, x), largest)  # infinities minus themselves are NaN
    total = op.ReduceSum(op.Exp(op.Sub(each, shift)), op.Constant(value_ints=[-1]), keepdims=0)
    result = op.Add(op.Log(total), op.Squeeze(shift, [-1]))
    return op.Transpose(result, perm=[last.index(axis) for axis in range(rank)])


def _log1p_exp(x: Any, like: Any) -> Any:
    """Return ``log(1 + exp(x))`` for ``x`` of at most 0. ONNX Runtime's kernel has one datatype."""
    return op.Softplus(x) if like.dtype == ir.DataType.FLOAT else _log1p(op.Exp(x), like)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.remainder.Tensor: remainder,
    aten.remainder.Scalar: remainder,
    aten.remainder.Scalar_Tensor: remainder,
    aten.floor_divide.default: floor_divide,
    aten.div.Tensor_mode: divide,
    aten.div.Scalar_mode: divide,
    aten.pow.Tensor_Scalar: power,
    aten.atan2.default: atan2,
    aten.sign.default: sign,
    aten.log1p.default: log1p,
    aten.log_sigmoid.default: log_sigmoid,
    aten.logaddexp.default: log_add_exp,
    aten.logaddexp2.default: log_add_exp2,
    aten.logcumsumexp.default: log_cum_sum_exp,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
