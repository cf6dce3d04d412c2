"""ONNX forms of sums and products of 64-bit integers, which ONNX Runtime's reductions round to 53 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import core

aten = torch.ops.aten
op: Any = opset18

_INT64 = ir.DataType.INT64
_HALF = 1 << 32
# Products of more factors stay one node, which rounds.
MOST_FACTORS = 64


def axes_of(x: Any, dim: Sequence[int] | int | None) -> list[int]:
    """Return the reduced dimensions; all of them if none are named."""
    rank = len(x.shape)
    named = [dim] if isinstance(dim, int) else list(dim or ())
    return [axis % rank for axis in named] if rank and named else list(range(rank))


def converted(x: Any, dtype: int | None) -> Any:
    """Return a tensor in the type in which PyTorch reduces it: 64 bits for integers and truth values."""
    is_whole = x.dtype is ir.DataType.BOOL or x.dtype.is_integer()
    kind = ir.DataType(dtype) if dtype not in (None, -1) else _INT64 if is_whole else x.dtype
    if kind is x.dtype:
        return x
    made = op.Cast(x, to=kind)
    made.dtype, made.shape = kind, x.shape
    return made


def _is_small(x: Any) -> bool:
    """Return whether a tensor was made of integers of at most 32 bits, or of truth values."""
    node = x.producer()
    if node is None or node.op_type != "Cast":
        return False
    source = node.inputs[0].dtype
    return source is ir.DataType.BOOL or (source is not None and source.is_integer() and source.itemsize < 8)


def total(x: Any, dim: Sequence[int] | int | None = None, keepdim: bool = False, dtype: int | None = None) -> Any:
    """Express ``aten.sum``. The upper and the lower halves of 64-bit integers are added separately.

    Each half is exact for up to 2^21 numbers. The exporter's form converts the type after the sum.
    """
    x = converted(x, dtype)
    axes = axes_of(x, dim)
    if not axes:
        return op.Identity(x)
    return _wrapped(lambda whole: _total(whole, axes, keepdim), x)


def _wrapped(reduction: Callable[[Any], Any], x: Any) -> Any:
    """Reduce integers of 32 bits and fewer as those of 64, since the kernels do not wrap around."""
    if not x.dtype.is_integer() or x.dtype is _INT64:
        return reduction(x)
    return op.Cast(reduction(converted(x, _INT64)), to=x.dtype)


def _total(x: Any, axes: Sequence[int], keepdim: bool) -> Any:
    def add(values: Any) -> Any:
        return op.ReduceSum(values, op.Constant(value_ints=axes), keepdims=int(keepdim))

    if x.dtype is not _INT64 or _is_small(x):
        return add(x)
    half = op.Constant(value_int=_HALF)
    low = op.Mod(x, half)  # not negative
    return op.Add(op.Mul(add(op.Div(op.Sub(x, low), half)), half), add(low))


def total_of_all(x: Any, dtype: int | None = None) -> Any:
    """Express ``aten.sum`` of all values."""
    return total(x, None, False, dtype)


def total_of_dimensions(x: Any, dims: Sequence[int], output_dtype: int | None = None) -> Any:
    """Express ``prims.sum``, as in the decomposition of ``trace``."""
    return total(x, dims, False, output_dtype)


def factors(x: Any, axis: int) -> list[Any] | None:
    """Return the slices of 64-bit integers along a dimension; None for other types, and for many or dynamic sizes."""
    size = x.shape[axis] if x.shape else None
    if x.dtype is not _INT64 or not isinstance(size, int) or not 1 < size <= MOST_FACTORS:
        return None
    return list(op.Split(x, axis=axis, num_outputs=size))


def product(x: Any, dim: int, keepdim: bool = False, dtype: int | None = None) -> Any:
    """Express ``aten.prod`` along a dimension."""
    x = converted(x, dtype)
    if not x.shape:
        return op.Identity(x)
    return _wrapped(lambda whole: _product(whole, dim % len(whole.shape), keepdim), x)


def _product(x: Any, axis: int, keepdim: bool) -> Any:
    parts = factors(x, axis)
    if parts is None:
        return op.ReduceProd(x, op.Constant(value_ints=[axis]), keepdims=int(keepdim))
    found = reduce(op.Mul, parts)
    return found if keepdim else op.Squeeze(found, op.Constant(value_ints=[axis]))


def product_of_all(x: Any, dtype: int | None = None) -> Any:
    """Express ``aten.prod`` of all values."""
    x = converted(x, dtype)
    sizes = list(x.shape)
    if x.dtype is not _INT64 or not all(isinstance(size, int) for size in sizes):
        return op.ReduceProd(x, keepdims=0)
    flat = op.Reshape(x, op.Constant(value_ints=[-1]))
    flat.dtype, flat.shape = _INT64, ir.Shape([math.prod(sizes)])
    return product(flat, 0)


def running_products(x: Any, axis: int) -> Any | None:
    """Return the products of the first numbers along a dimension, where :func:`factors` has these."""
    parts = factors(x, axis)
    return None if parts is None else op.Concat(*accumulate(parts, op.Mul), axis=axis)


def rounded(x: Any) -> Any:
    """Express ``aten.round``, which leaves integers as they are."""
    return op.Identity(x) if x.dtype.is_integer() else op.Round(x)


def is_close(x: Any, y: Any, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    """Express ``aten.isclose``. The exporter's form rounds the tolerances of integers to 0."""
    if x.dtype.is_floating_point():
        return core.aten_isclose(x, y, rtol, atol, equal_nan)
    equal = op.Equal(x, y)
    if rtol == atol == 0:
        return equal
    left, right = (op.Cast(value, to=ir.DataType.FLOAT) for value in (x, y))  # as PyTorch does
    relative, absolute = (op.Constant(value_float=number) for number in (rtol, atol))
    allowed = op.Add(absolute, op.Abs(op.Mul(right, relative)))
    return op.Or(equal, op.LessOrEqual(op.Abs(op.Sub(left, right)), allowed))


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.round.default: rounded,
    aten.isclose.default: is_close,
    aten.sum.default: total_of_all,
    aten.sum.dim_IntList: total,
    torch.ops.prims.sum.default: total_of_dimensions,
    aten.prod.default: product_of_all,
    aten.prod.dim_int: product,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
