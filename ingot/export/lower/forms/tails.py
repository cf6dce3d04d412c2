"""ONNX forms of logarithms and exponentials where a sum loses small terms, or overflows.

The forms agree with PyTorch's kernels for all values; ``erfcx`` within a relative error of 1.2e-7.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18

from ingot.export.lower.forms.exact_math import in_single, like
from ingot.export.lower.forms.integers import converted
from ingot.export.lower.forms.size_arithmetic import named, to_double

aten = torch.ops.aten
op: Any = opset18

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772848170429916717, 1.0507009873554804934193349852946
_ERFC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


def log1p(x: Any) -> Any:
    """Express ``aten.log1p``."""
    return _log1p(x, x)


def _log1p(x: Any, typed: Any) -> Any:
    """Return ``log(1 + x)``, which loses the digits of a small x; the quotient restores them (Kahan)."""
    one = like(1.0, typed)
    total = op.Add(one, x)
    gained = op.Sub(total, one)
    log = op.Log(total)
    exact = op.Mul(log, op.Div(x, gained))
    exact = op.Where(op.Equal(gained, like(0.0, typed)), x, exact)
    return op.Where(op.Equal(total, like(math.inf, typed)), log, exact)


def _log_of_base(base: int) -> Callable[[Any], Any]:
    """Return the form of ``aten.log2`` or ``aten.log10``, which is exact for powers of the base.

    The quotient of two logarithms may be slightly less than the exponent; its ``floor`` would then be one too low.
    """

    def apply(x: Any) -> Any:
        quotient = op.Div(op.Log(x), like(math.log(base), x))
        nearest = op.Round(quotient)
        return op.Where(op.Equal(op.Pow(like(float(base), x), nearest), x), nearest, quotient)

    return in_single(named(f"log_of_base_{base}", apply))


def log_sigmoid(x: Any) -> Any:
    """Express ``aten.log_sigmoid``; the exporter's logarithm of a sigmoid is infinite below -20."""
    return op.Sub(op.Min(x, like(0.0, x)), _log1p_exp(op.Neg(op.Abs(x)), x))


def log_add_exp(x: Any, y: Any) -> Any:
    """Express ``aten.logaddexp``; the exporter's sum of exponentials overflows."""
    distance = op.Where(op.Equal(x, y), like(0.0, x), op.Abs(op.Sub(x, y)))  # equal infinities have none
    return op.Add(op.Max(x, y), _log1p_exp(op.Neg(distance), x))


def log_add_exp2(x: Any, y: Any) -> Any:
    """Express ``aten.logaddexp2``; see :func:`log_add_exp`."""
    distance = op.Where(op.Equal(x, y), like(0.0, x), op.Abs(op.Sub(x, y)))
    added = _log1p_exp(op.Mul(op.Neg(distance), like(math.log(2), x)), x)
    return op.Add(op.Max(x, y), op.Mul(added, like(1 / math.log(2), x)))


def log_cum_sum_exp(x: Any, dim: int) -> Any:
    """Express ``aten.logcumsumexp``. Each prefix is scaled by its largest value, so that no exponential overflows."""
    rank = len(x.shape)
    last = [axis for axis in range(rank) if axis != dim % rank] + [dim % rank]
    values = op.Transpose(x, perm=last)
    place = op.Range(op.Constant(value_int=0), op.Squeeze(op.Shape(values, start=rank - 1)), op.Constant(value_int=1))
    seen = op.GreaterOrEqual(op.Unsqueeze(place, [1]), op.Unsqueeze(place, [0]))
    each = op.Where(seen, op.Unsqueeze(values, [-2]), like(-math.inf, x))
    largest = op.ReduceMax(each, op.Constant(value_ints=[-1]), keepdims=1)
    infinite = op.Equal(op.Abs(largest), like(math.inf, x))
    shift = op.Where(infinite, like(0.0, x), largest)  # infinities minus themselves are NaN
    total = op.ReduceSum(op.Exp(op.Sub(each, shift)), op.Constant(value_ints=[-1]), keepdims=0)
    result = op.Add(op.Log(total), op.Squeeze(shift, [-1]))
    return op.Transpose(result, perm=[last.index(axis) for axis in range(rank)])


def _log1p_exp(x: Any, typed: Any) -> Any:
    """Return ``log(1 + exp(x))`` for ``x`` of at most 0. ONNX Runtime's kernel has one datatype."""
    return op.Softplus(x) if typed.dtype == ir.DataType.FLOAT else _log1p(op.Exp(x), typed)


def logit(x: Any, eps: float | None = None) -> Any:
    """Express ``aten.logit``; the exporter's comparisons replace NaN by a bound."""
    if eps is not None:
        x, kind = op.Min(op.Max(x, like(eps, x)), like(1 - eps, x)), x.dtype
        x.dtype = kind
    return op.Log(op.Div(x, op.Sub(like(1.0, x), x)))


@in_single
def expm1(x: Any) -> Any:
    """Express ``aten.expm1`` as ``tanh(x / 2) * (exp(x) + 1)``: the difference ``exp(x) - 1`` loses a small x."""
    return op.Mul(op.Tanh(op.Mul(x, like(0.5, x))), op.Add(op.Exp(x), like(1.0, x)))


@in_single
def elu(x: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """Express ``aten.elu``; ONNX Runtime's kernel computes ``exp(x) - 1``."""
    above = x if scale == 1 else op.Mul(x, like(scale, x))
    below = x if input_scale == 1 else op.Mul(x, like(input_scale, x))
    below.dtype = x.dtype
    factor = alpha * scale
    below = expm1(below) if factor == 1 else op.Mul(expm1(below), like(factor, x))
    return op.Where(op.Greater(x, like(0.0, x)), above, below)


def selu(x: Any) -> Any:
    """Express ``aten.selu``."""
    return elu(x, _SELU_ALPHA, _SELU_SCALE)


def celu(x: Any, alpha: float = 1.0) -> Any:
    """Express ``aten.celu``."""
    return elu(x, alpha, 1.0, 1 / alpha)


@in_single
def sinc(x: Any) -> Any:
    """Express ``aten.sinc``; decomposed, a product with pi in half precision is off by whole turns."""
    angle = op.Mul(x, like(math.pi, x))
    return op.Where(op.Equal(x, like(0.0, x)), like(1.0, x), op.Div(op.Sin(angle), angle))


def hypotenuse(x: Any, y: Any) -> Any:
    """Express ``aten.hypot``: squares of single precision neither overflow nor vanish in double precision."""
    wide, other = op.Abs(to_double(x)), op.Abs(to_double(y))
    if x.dtype is ir.DataType.DOUBLE:
        longer, shorter = op.Max(wide, other), op.Min(wide, other)
        share = op.Where(op.Equal(longer, to_double(0.0)), longer, op.Div(shorter, longer))
        length = op.Mul(longer, op.Sqrt(op.Add(to_double(1.0), op.Mul(share, share))))
    else:
        length = op.Sqrt(op.Add(op.Mul(wide, wide), op.Mul(other, other)))
    infinite = to_double(math.inf)
    endless = op.Or(op.Equal(wide, infinite), op.Equal(other, infinite))  # even if the other is NaN
    return op.CastLike(op.Where(endless, infinite, length), x)


def erfc(x: Any) -> Any:
    """Express ``aten.erfc``, whose tail ``1 - erf(x)`` loses; see :func:`_erfcx_of_positive`."""
    if x.dtype is ir.DataType.DOUBLE:
        return op.Sub(like(1.0, x), op.Erf(x))
    wide = to_double(x)
    tail = op.Mul(_erfcx_of_positive(op.Abs(wide)), op.Exp(op.Neg(op.Mul(wide, wide))))
    tail = op.CastLike(tail, x)
    return op.Where(op.Greater(x, like(0.5, x)), tail, op.Sub(like(1.0, x), op.Erf(x)))


def erfcx(x: Any) -> Any:
    """Express ``aten.special_erfcx``; the exporter's product of infinity and 0 is NaN."""
    wide = to_double(x)
    above = _erfcx_of_positive(op.Abs(wide))
    below = op.Sub(op.Mul(to_double(2.0), op.Exp(op.Mul(wide, wide))), above)
    return op.CastLike(op.Where(op.Less(wide, to_double(0.0)), below, above), x)


def _erfcx_of_positive(x: Any) -> Any:
    """Return ``exp(x * x) * erfc(x)`` in double precision, with a relative error below 1.2e-7.

    The approximation is that of Press et al., Numerical Recipes in C, 2nd edition, section 6.2.
    """
    t = op.Reciprocal(op.Add(to_double(1.0), op.Mul(to_double(0.5), x)))
    total = to_double(_ERFC[-1])
    for coefficient in reversed(_ERFC[:-1]):
        total = op.Add(to_double(coefficient), op.Mul(t, total))
    return op.Mul(t, op.Exp(total))


def softmax(x: Any, dim: int, dtype: int | None = None) -> Any:
    """Express ``aten.softmax``; the exporter converts the result to ``dtype``, PyTorch the values."""
    return _along(lambda values, axis: op.Softmax(values, axis=axis), x, dim, dtype)


def log_softmax(x: Any, dim: int, dtype: int | None = None) -> Any:
    """Express ``aten.log_softmax``."""
    return _along(_log_softmax, x, dim, dtype)


def log_softmax_of_half(x: Any, dim: int, half_to_float: bool) -> Any:
    """Express ``aten._log_softmax``."""
    return log_softmax(x, dim, ir.DataType.FLOAT.value if half_to_float else None)


def _log_softmax(x: Any, axis: int) -> Any:
    """Return the logarithms. In double precision, ONNX Runtime returns -inf for NaN in a row with an infinity."""
    if x.dtype is not ir.DataType.DOUBLE:
        return op.LogSoftmax(x, axis=axis)
    shifted = op.Sub(x, op.ReduceMax(x, op.Constant(value_ints=[axis]), keepdims=1))
    return op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), op.Constant(value_ints=[axis]), keepdims=1)))


def _along(form: Callable[[Any, int], Any], x: Any, dim: int, dtype: int | None) -> Any:
    if dtype not in (None, -1):
        x = converted(x, dtype)
    if x.shape:
        return form(x, dim)
    row = op.Unsqueeze(x, op.Constant(value_ints=[0]))
    row.dtype = x.dtype
    return op.Squeeze(form(row, 0))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.softmax.int: softmax,
    aten.log_softmax.int: log_softmax,
    aten._log_softmax.default: log_softmax_of_half,
    aten.log2.default: _log_of_base(2),
    aten.log10.default: _log_of_base(10),
    aten.log1p.default: log1p,
    aten.expm1.default: expm1,
    aten.elu.default: elu,
    aten.selu.default: selu,
    aten.celu.default: celu,
    aten.erfc.default: erfc,
    aten.special_erfcx.default: erfcx,
    aten.logit.default: logit,
    aten.sinc.default: sinc,
    aten.hypot.default: hypotenuse,
    torch.ops.prims.hypot.default: hypotenuse,
    aten.log_sigmoid.default: log_sigmoid,
    aten.logaddexp.default: log_add_exp,
    aten.logaddexp2.default: log_add_exp2,
    aten.logcumsumexp.default: log_cum_sum_exp,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
