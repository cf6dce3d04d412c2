"""ONNX forms of the gamma function's logarithm and derivative, and of normal quantiles.

All are computed in double precision. Close to a zero of the function, the error is 1e-14 instead of a share of
the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import opset18

from ingot.export.lower.forms.size_arithmetic import to_double

aten = torch.ops.aten
prims = torch.ops.prims
op: Any = opset18

# From this number on, the asymptotic series below have 16 digits; smaller ones are moved by as many steps.
_LARGE = 10
# B(2k) / (2k (2k - 1)) and B(2k) / (2k) with Bernoulli's numbers B.
_GAMMA = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156)
_DIGAMMA = (1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12)

# Wichura, Algorithm AS241: numerators and denominators for the centre, the tails and the far tails.
_CENTRE = (
    (
        *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4),
        *(4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    ),
    (
        *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
        *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
    ),
)
_TAIL = (
    (
        *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0),
        *(1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    ),
    (
        *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1),
        *(1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
    ),
)
_FAR = (
    (
        *(6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1),
        *(2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    ),
    (
        *(1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2),
        *(7.86869131145613259100e-4, 1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
    ),
)


def _polynomial(coefficients: Sequence[float], x: Any) -> Any:
    """Return a polynomial with these coefficients, the constant one first."""
    total = to_double(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = op.Add(to_double(coefficient), op.Mul(x, total))
    return total


def _moved(x: Any) -> tuple[Any, Any, Any]:
    """Return whether a positive number is small, the number moved to where series are exact, and the small number."""
    small = op.Less(x, to_double(_LARGE))
    return small, op.Where(small, op.Add(x, to_double(_LARGE)), x), op.Where(small, x, to_double(1))


def _reflected(x: Any) -> tuple[Any, Any, Any]:
    """Return whether a number is below 1/2, the number or 1 minus it, and pi times its distance to an integer."""
    left = op.Less(x, to_double(0.5))
    angle = op.Mul(to_double(math.pi), op.Sub(x, op.Round(x)))
    return left, op.Where(left, op.Sub(to_double(1), x), x), angle


def log_gamma(x: Any) -> Any:
    """Express ``aten.lgamma``."""
    wide = to_double(x)
    left, right, angle = _reflected(wide)
    small, large, least = _moved(right)
    inverse = op.Reciprocal(large)
    series = op.Mul(inverse, _polynomial(_GAMMA, op.Mul(inverse, inverse)))
    head = op.Mul(op.Sub(large, to_double(0.5)), op.Sub(op.Log(large), to_double(1)))
    total = op.Add(head, op.Add(series, to_double(0.5 * math.log(2 * math.pi) - 0.5)))
    product = least
    for step in range(1, _LARGE):
        product = op.Mul(product, op.Add(least, to_double(step)))
    total = op.Where(small, op.Sub(total, op.Log(product)), total)
    zero = op.Or(op.Equal(right, to_double(1)), op.Equal(right, to_double(2)))
    total = op.Where(zero, to_double(0), total)
    mirrored = op.Sub(to_double(math.log(math.pi)), op.Add(op.Log(op.Abs(op.Sin(angle))), total))
    infinite = op.Equal(op.Abs(wide), to_double(math.inf))
    return op.CastLike(op.Where(infinite, to_double(math.inf), op.Where(left, mirrored, total)), x)


def digamma(x: Any) -> Any:
    """Express ``aten.digamma``: infinite at 0, with the opposite sign, and NaN at negative integers."""
    wide = to_double(x)
    left, right, angle = _reflected(wide)
    small, large, least = _moved(right)
    inverse = op.Reciprocal(large)
    square = op.Mul(inverse, inverse)
    series = op.Add(op.Mul(to_double(0.5), inverse), op.Mul(square, _polynomial(_DIGAMMA, square)))
    total = op.Sub(op.Log(large), series)
    steps = op.Reciprocal(least)
    for step in range(1, _LARGE):
        steps = op.Add(steps, op.Reciprocal(op.Add(least, to_double(step))))
    total = op.Where(small, op.Sub(total, steps), total)
    slope = op.Div(op.Sin(angle), op.Cos(angle))
    mirrored = op.Sub(total, op.Div(to_double(math.pi), slope))
    pole = op.And(op.Equal(wide, op.Floor(wide)), op.Less(wide, to_double(0)))
    found = op.Where(left, op.Where(pole, to_double(math.nan), mirrored), total)
    return op.CastLike(op.Where(op.Equal(wide, to_double(0)), op.Neg(op.Reciprocal(wide)), found), x)


def _quantile(x: Any, tail: Any) -> Any:
    """Return the normal quantile of the probability ``0.5 + x``, where ``tail`` is that of the nearer tail."""
    distance = op.Sqrt(op.Neg(op.Log(tail)))
    far = [_polynomial(half, op.Sub(distance, to_double(5))) for half in _FAR]
    near = [_polynomial(half, op.Sub(distance, to_double(1.6))) for half in _TAIL]
    away = op.Where(op.Greater(distance, to_double(5)), op.Div(*far), op.Div(*near))
    away = op.Where(op.Equal(tail, to_double(0)), to_double(math.inf), away)
    centre = [_polynomial(half, op.Sub(to_double(0.180625), op.Mul(x, x))) for half in _CENTRE]
    inner = op.Mul(x, op.Div(*centre))
    is_inner = op.LessOrEqual(op.Abs(x), to_double(0.425))
    return op.Where(is_inner, inner, op.Where(op.Less(x, to_double(0)), op.Neg(away), away))


def inverse_erf(x: Any) -> Any:
    """Express ``aten.erfinv``."""
    half = op.Mul(to_double(x), to_double(0.5))
    quantile = _quantile(half, op.Sub(to_double(0.5), op.Abs(half)))
    return op.CastLike(op.Mul(quantile, to_double(math.sqrt(0.5))), x)


def normal_quantile(x: Any) -> Any:
    """Express ``aten.special_ndtri``."""
    wide = to_double(x)
    centred = op.Sub(wide, to_double(0.5))
    return op.CastLike(_quantile(centred, op.Min(wide, op.Sub(to_double(1), wide))), x)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.lgamma.default: log_gamma,
    prims.lgamma.default: log_gamma,
    aten.digamma.default: digamma,
    prims.digamma.default: digamma,
    aten.erfinv.default: inverse_erf,
    prims.erf_inv.default: inverse_erf,
    aten.special_ndtri.default: normal_quantile,
    prims.ndtri.default: normal_quantile,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
