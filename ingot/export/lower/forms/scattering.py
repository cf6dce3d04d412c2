"""ONNX forms of operators that write values to the places that an index names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import core

from ingot.export.lower.forms.exact_math import floor_divide, ints, like, typed

aten = torch.ops.aten
op: Any = opset18


# https://github.com/onnx/onnx/issues/4672
def _cut(index: Any, source: Any) -> Any:
    """Return the part of ``source`` with the shape of ``index``; PyTorch ignores the rest."""
    rank = len(index.shape)
    if rank == 0 or all(isinstance(a, int) and a == b for a, b in zip(index.shape, source.shape, strict=True)):
        return source
    part = op.Slice(source, ints(*[0] * rank), op.Shape(index), ints(*range(rank)))
    part.dtype, part.shape = source.dtype, index.shape
    return part


def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    """Express ``aten.scatter.src``."""
    return core.aten_scatter_src(x, dim, index, _cut(index, source))


def index_put(x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """Express ``aten.index_put`` of one value at the places of a mask, such as ``x[mask] = 0``.

    The exporter's own form lists the places in all samples, so that samples could not be served together.
    """
    mask = indices[0]
    single = all(size == 1 for size in values.shape)
    if len(indices) > 1 or mask is None or mask.dtype is not ir.DataType.BOOL or not single or accumulate:
        return core.aten_index_put(x, indices, values, accumulate)
    if more := range(len(mask.shape), len(x.shape)):
        mask = op.Unsqueeze(mask, ints(*more))
    return op.Where(mask, op.Reshape(values, op.Constant(value_ints=[])), x)


def scatter_add(x: Any, dim: int, index: Any, source: Any) -> Any:
    """Express ``aten.scatter_add``."""
    return scatter_reduce(x, dim, index, source, "sum")


def scatter_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    """Express ``aten.scatter_reduce.two``; the exporter ignores ``mean``: https://github.com/onnx/onnx/issues/5100.

    It passes over NaN for extremes, and starts them at the extreme finite numbers without ``include_self``. Means of
    integers are rounded down. ONNX Runtime's kernel lacks half precision.
    """
    if x.dtype is ir.DataType.FLOAT16:
        wide = (typed(value, ir.DataType.FLOAT) for value in (x, source))
        return op.CastLike(scatter_reduce(next(wide), dim, index, next(wide), reduce, include_self), x)
    if not x.shape:
        flat, places, values = (op.Reshape(value, ints(-1)) for value in (x, index, source))
        flat.dtype, flat.shape, places.shape, values.shape = x.dtype, ir.Shape([1]), ir.Shape([1]), ir.Shape([1])
        return op.Reshape(scatter_reduce(flat, 0, places, values, reduce, include_self), op.Shape(x))
    part = _cut(index, source)
    if x.dtype.is_integer() and reduce != "mean":
        return core.aten_scatter_reduce(x, dim, index, part, reduce, include_self)
    form, neutral = _REDUCTIONS[reduce]
    start = x if include_self else op.ScatterElements(x, index, _filled(neutral, index, x), axis=dim)
    found = op.ScatterElements(start, index, part, axis=dim, reduction=form)
    if reduce == "mean":
        count = op.ScatterElements(_filled(0, x, x), index, _filled(1, index, x), axis=dim, reduction="add")
        count = op.Add(count, like(1, x)) if include_self else op.Max(count, like(1, x))
        count.dtype = found.dtype = x.dtype
        return floor_divide(found, count) if x.dtype.is_integer() else op.Div(found, count)
    if reduce in ("amax", "amin"):
        unknown = (op.CastLike(op.IsNaN(value), x) for value in (start, part))
        count = op.ScatterElements(next(unknown), index, next(unknown), axis=dim, reduction="add")
        found = op.Where(op.Greater(count, like(0.0, x)), like(math.nan, x), found)
    return found


def scatter_with_reduction(x: Any, dim: int, index: Any, source: Any, reduce: str) -> Any:
    """Express ``aten.scatter.reduce`` and ``aten.scatter.value_reduce``, whose source is a number."""
    if not isinstance(source, ir.Value):
        source = _filled(source, index, x)
        source.dtype, source.shape = x.dtype, index.shape
    return scatter_reduce(x, dim, index, source, {"add": "sum", "multiply": "prod"}[reduce])


_REDUCTIONS = {
    "sum": ("add", 0.0),
    "mean": ("add", 0),
    "prod": ("mul", 1.0),
    "amax": ("max", -math.inf),
    "amin": ("min", math.inf),
}
"""By PyTorch's name: ONNX's name of a reduction, and the number that changes no result."""


def _filled(number: float, x: Any, kind: Any) -> Any:
    return op.Expand(like(number, kind), op.Shape(x))


def put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    """Express ``aten.put``, whose index counts in the flattened tensor."""
    flat, places, values = (op.Reshape(value, ints(-1)) for value in (x, index, source))
    found = op.ScatterElements(flat, places, values, axis=0, reduction="add" if accumulate else "none")
    return op.Reshape(found, op.Shape(x))


def index_reduce(x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True) -> Any:
    """Express ``aten.index_reduce``: each slice of ``source`` along ``dim`` has one place."""
    places = op.Reshape(index, ints(*(-1 if axis == dim % len(x.shape) else 1 for axis in range(len(x.shape)))))
    places = op.Expand(places, op.Shape(source))
    places.shape = source.shape
    return scatter_reduce(x, dim, places, source, reduce, include_self)


def diagonal_scatter(x: Any, source: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Express ``aten.diagonal_scatter``, which is what an assignment to ``x.diagonal()`` becomes."""
    rank = len(x.shape)
    last = [dim1 % rank, dim2 % rank]
    order = [axis for axis in range(rank) if axis not in last] + last
    matrices = op.Transpose(x, perm=order)
    zero, one = (op.Constant(value_int=number) for number in (0, 1))
    row, column = (
        op.Range(zero, op.Squeeze(op.Shape(matrices, start=axis, end=axis + 1)), one) for axis in (rank - 2, rank - 1)
    )
    row, column = op.Unsqueeze(row, ints(1)), op.Unsqueeze(column, ints(0))
    chosen = op.Equal(op.Sub(column, row), op.Constant(value_int=offset))
    # A further element, which no place is given, since a diagonal beyond the matrix has none.
    more = op.Expand(op.CastLike(zero, x), op.Concat(op.Shape(source, end=rank - 2), ints(1), axis=0))
    padded, length = op.Concat(source, more, axis=-1), op.Shape(source, start=rank - 2)
    place = op.Min(op.Squeeze(column if offset < 0 else row, ints(0 if offset < 0 else 1)), length)
    values = op.Unsqueeze(op.Gather(padded, place, axis=-1), ints(-2 if offset < 0 else -1))
    return op.Transpose(op.Where(chosen, values, matrices), perm=[order.index(axis) for axis in range(rank)])


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.scatter.src: scatter,
    aten.scatter.reduce: scatter_with_reduction,
    aten.scatter.value_reduce: scatter_with_reduction,
    aten.scatter_add.default: scatter_add,
    aten.index_put.default: index_put,
    aten.scatter_reduce.two: scatter_reduce,
    aten.index_reduce.default: index_reduce,
    aten.put.default: put,
    aten.diagonal_scatter.default: diagonal_scatter,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
