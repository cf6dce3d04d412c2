"""ONNX forms of the largest and the smallest value, of medians, and of their places.

ONNX Runtime passes over a NaN that is not the first value; in PyTorch, NaN is both the largest and the smallest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import linalg

from ingot.export.lower.forms.exact_math import ints, like

aten = torch.ops.aten
op: Any = opset18


def _is_nan(x: Any) -> Any:
    """Return where a floating-point tensor is NaN. ONNX Runtime's kernel lacks bfloat16."""
    return op.IsNaN(op.Cast(x, to=ir.DataType.FLOAT) if x.dtype is ir.DataType.BFLOAT16 else x)


def _flags(x: Any) -> Any:
    return op.Cast(_is_nan(x), to=ir.DataType.UINT8)  # kernels of reductions lack truth values


def _reduced(form: str, x: Any, axes: Sequence[int], keepdim: bool) -> Any:
    """Reduce by ``ReduceMax`` or ``ReduceMin``; the result is NaN if a value is."""
    if not x.shape:
        return op.Identity(x)
    named = ints(*(axes or range(len(x.shape))))
    if x.dtype is ir.DataType.BOOL:
        found = getattr(op, form)(op.Cast(x, to=ir.DataType.UINT8), named, keepdims=int(keepdim))
        return op.Cast(found, to=ir.DataType.BOOL)
    found = getattr(op, form)(x, named, keepdims=int(keepdim))
    if not x.dtype.is_floating_point():
        return found
    undefined = op.Cast(op.ReduceMax(_flags(x), named, keepdims=int(keepdim)), to=ir.DataType.BOOL)
    return op.Where(undefined, op.Constant(value=ir.tensor(math.nan, x.dtype)), found)


def _place(form: str, x: Any, axis: int, keepdim: bool) -> Any:
    """Return the place of the first NaN along an axis, or by ``ArgMax`` or ``ArgMin`` if there is none."""
    if x.dtype is ir.DataType.BOOL:
        return getattr(op, form)(op.Cast(x, to=ir.DataType.UINT8), axis=axis, keepdims=int(keepdim))
    found = getattr(op, form)(x, axis=axis, keepdims=int(keepdim))
    if not x.dtype.is_floating_point():
        return found
    flags = _flags(x)
    undefined = op.Cast(op.ReduceMax(flags, ints(axis), keepdims=int(keepdim)), to=ir.DataType.BOOL)
    return op.Where(undefined, op.ArgMax(flags, axis=axis, keepdims=int(keepdim)), found)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name  # the exporter's registry reads it
    return function


def _extreme(form: str) -> Callable[..., Any]:
    """Return the form of ``aten.amax`` or ``aten.amin``; no dimensions are all of them."""

    def apply(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        return _reduced(form, x, dim, keepdim)

    return _named(f"extreme_{form}", apply)


def least_and_largest(x: Any, dim: int | None = None, keepdim: bool = False) -> tuple[Any, Any]:
    """Express ``aten.aminmax``."""
    axes = () if dim is None else (dim,)
    return _reduced("ReduceMin", x, axes, keepdim), _reduced("ReduceMax", x, axes, keepdim)


def _extreme_along(form: str, place: str) -> Callable[..., Any]:
    """Return the form of ``aten.max`` or ``aten.min`` along a dimension: the values and their places."""

    def apply(x: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
        if not x.shape:
            return op.Identity(x), op.Constant(value_int=0)
        return _reduced(form, x, (dim,), keepdim), _place(place, x, dim, keepdim)

    return _named(f"extreme_along_{form}", apply)


def _place_of_extreme(form: str) -> Callable[..., Any]:
    """Return the form of ``aten.argmax`` or ``aten.argmin``; without a dimension, the place among all values."""

    def apply(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        rank = len(x.shape)
        if not rank:
            return op.Constant(value_int=0)
        if dim is not None:
            return _place(form, x, dim, keepdim)
        flat = op.Reshape(x, ints(-1))
        flat.dtype = x.dtype
        found = _place(form, flat, 0, keepdim=False)
        return op.Reshape(found, ints(*(1 for _ in range(rank)))) if keepdim else found

    return _named(f"place_of_{form}", apply)


def vector_norm(
    x: Any,
    ord: float = 2.0,  # noqa: A002 - the operator's name for it
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: int | None = None,
) -> Any:
    """Express ``aten.linalg_vector_norm``: infinite orders by extremes; without dimensions, all of them may be kept."""
    if dtype not in (None, -1):
        shape, x = x.shape, op.Cast(x, to=dtype)
        x.dtype, x.shape = ir.DataType(dtype), shape
    if not x.shape:
        return op.Abs(x) if ord else op.CastLike(op.Cast(x, to=ir.DataType.BOOL), x)
    axes = list(dim or range(len(x.shape)))
    if ord in (0, 1, 2):
        return linalg.aten_linalg_vector_norm(x, float(ord), axes, keepdim)
    size = op.Abs(x)
    size.dtype, size.shape = x.dtype, x.shape
    if not math.isinf(ord):
        total = op.ReduceSum(op.Pow(size, like(float(ord), x)), op.Constant(value_ints=axes), keepdims=int(keepdim))
        return op.Pow(total, like(1 / ord, x))
    return _reduced("ReduceMax" if ord > 0 else "ReduceMin", size, axes, keepdim)


def _ascending(x: Any, dim: int) -> tuple[Any, Any]:
    """Return the values along a dimension in order, with infinity in the place of NaN, and their places."""
    keys = op.Where(_is_nan(x), like(math.inf, x), x) if x.dtype.is_floating_point() else x
    values, places = op.TopK(keys, op.Shape(x, start=dim, end=dim + 1), axis=dim, largest=0)
    return values, places


def _numbers(x: Any, dim: int) -> Any:
    """Return how many values along a dimension, which is kept, are not NaN."""
    ones = op.CastLike(op.Not(_is_nan(x)), ints(0)) if x.dtype.is_floating_point() else op.Expand(ints(1), op.Shape(x))
    return op.ReduceSum(ones, ints(dim))


# https://github.com/onnx/onnx/issues/3586
def kth_value(x: Any, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """Express ``aten.kthvalue``, for which NaN is the largest value."""
    if not x.shape:
        return op.Identity(x), op.Constant(value_int=0)
    dim %= len(x.shape)
    values, places = _ascending(x, dim)
    k = ints(k) if isinstance(k, int) else op.Reshape(k, ints(-1))
    value, place = (op.Gather(found, op.Sub(k, ints(1)), axis=dim) for found in (values, places))
    if x.dtype.is_floating_point():
        value = op.Where(op.Greater(k, _numbers(x, dim)), like(math.nan, x), value)
    return (value, place) if keepdim else (op.Squeeze(value, ints(dim)), op.Squeeze(place, ints(dim)))


def _median_along(*, of_numbers: bool) -> Callable[..., Any]:
    """Return the form of ``aten.median``, or of ``aten.nanmedian``, along a dimension.

    It is the lower middle value of an even number. A NaN is the median, or passed over.
    """

    def apply(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
        if not x.shape:
            return op.Identity(x), op.Constant(value_int=0)
        dim %= len(x.shape)
        values, places = _ascending(x, dim)
        known, size = _numbers(x, dim), op.Shape(x, start=dim, end=dim + 1)
        middle = op.Div(op.Sub(op.Max(known, ints(1)), ints(1)), ints(2))
        value, place = (op.GatherElements(found, middle, axis=dim) for found in (values, places))
        if x.dtype.is_floating_point():
            undefined = op.Less(known, ints(1) if of_numbers else size)
            value = op.Where(undefined, like(math.nan, x), value)
            place = op.Where(undefined, op.ArgMax(_flags(x), axis=dim), place)
        return (value, place) if keepdim else (op.Squeeze(value, ints(dim)), op.Squeeze(place, ints(dim)))

    return _named("median_of_numbers_along" if of_numbers else "median_along", apply)


def _median(*, of_numbers: bool) -> Callable[..., Any]:
    """Return the form of ``aten.median``, or of ``aten.nanmedian``, of all values."""
    along = _median_along(of_numbers=of_numbers)

    def apply(x: Any) -> Any:
        flat = op.Reshape(x, ints(-1))
        flat.shape, flat.dtype = ir.Shape([None]), x.dtype
        return along(flat)[0]

    return _named("median_of_numbers" if of_numbers else "median", apply)


def fmax(x: Any, y: Any) -> Any:
    """Express ``aten.fmax``, which ignores NaN."""
    return _of_numbers(x, y, op.Max(x, y)) if x.dtype.is_floating_point() else op.Where(op.Less(x, y), y, x)


def fmin(x: Any, y: Any) -> Any:
    """Express ``aten.fmin``."""
    return _of_numbers(x, y, op.Min(x, y)) if x.dtype.is_floating_point() else op.Where(op.Less(x, y), x, y)


def _of_numbers(x: Any, y: Any, both: Any) -> Any:
    return op.Where(_is_nan(x), y, op.Where(_is_nan(y), x, both))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.amax.default: _extreme("ReduceMax"),
    aten.amin.default: _extreme("ReduceMin"),
    aten.aminmax.default: least_and_largest,
    aten.max.default: _extreme("ReduceMax"),
    aten.min.default: _extreme("ReduceMin"),
    aten.max.dim: _extreme_along("ReduceMax", "ArgMax"),
    aten.min.dim: _extreme_along("ReduceMin", "ArgMin"),
    aten.argmax.default: _place_of_extreme("ArgMax"),
    aten.argmin.default: _place_of_extreme("ArgMin"),
    aten.linalg_vector_norm.default: vector_norm,
    aten.kthvalue.default: kth_value,
    aten.median.dim: _median_along(of_numbers=False),
    aten.median.default: _median(of_numbers=False),
    aten.nanmedian.dim: _median_along(of_numbers=True),
    aten.nanmedian.default: _median(of_numbers=True),
    aten.fmax.default: fmax,
    aten.fmin.default: fmin,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
