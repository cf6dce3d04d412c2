"""ONNX forms of reductions and of pooling whose kernels are wrong for no values at all, or for infinite ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import nn, prims

from ingot.export.lower.forms.exact_math import in_single, ints, like
from ingot.export.lower.forms.integers import axes_of, converted
from ingot.export.lower.forms.size_arithmetic import to_double

aten = torch.ops.aten
op: Any = opset18

# Operators whose results are finite or +inf for all inputs but NaN, and those that pass on this property.
_BOUNDED = {
    "Relu",
    "Sigmoid",
    "HardSigmoid",
    "Softmax",
    "Exp",
    "Abs",
    "Softplus",
    "Tanh",
    "Erf",
    "Gelu",
    "HardSwish",
    "Sqrt",
}
_PASSING = {"Identity", "Reshape", "Squeeze", "Unsqueeze", "Transpose", "Slice", "MaxPool", "Dropout"}
_INT64 = ir.DataType.INT64
# A number below all of float32, in double precision.
_LOWEST = -1e300


def _flags(reduce: Any, x: Any, dim: Sequence[int] | int | None, keepdim: bool) -> Any:
    """Reduce truth values as bytes: the extreme of none is that of the type, 0 or 255, which is the right result."""
    truth = x if x.dtype is ir.DataType.BOOL else op.Cast(x, to=ir.DataType.BOOL)
    axes = axes_of(x, dim)
    if not axes:
        return op.Identity(truth)
    found = reduce(op.Cast(truth, to=ir.DataType.UINT8), op.Constant(value_ints=axes), keepdims=int(keepdim))
    return op.Cast(found, to=ir.DataType.BOOL)


def any_of(x: Any, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Any:
    """Express ``aten.any``; in the exporter's form, the largest of no 64-bit integers is true."""
    return _flags(op.ReduceMax, x, dim, keepdim)


def all_of(x: Any, dim: Sequence[int] | int | None = None, keepdim: bool = False) -> Any:
    """Express ``aten.all``."""
    return _flags(op.ReduceMin, x, dim, keepdim)


def mean(x: Any, dim: Sequence[int] | int | None = None, keepdim: bool = False, dtype: int | None = None) -> Any:
    """Express ``aten.mean``: a sum and a division where the number of values may be 0, because their mean is NaN."""
    x = converted(x, dtype)
    return _mean(x, axes_of(x, dim), keepdim)


@in_single
def _mean(x: Any, axes: list[int], keepdim: bool) -> Any:
    if not axes:
        return op.Identity(x)
    names = op.Constant(value_ints=axes)
    if _has_values(x, axes):
        return op.ReduceMean(x, names, keepdims=int(keepdim))
    return op.Div(op.ReduceSum(x, names, keepdims=int(keepdim)), _count(x, names))


def _has_values(x: Any, axes: list[int]) -> bool:
    """Return whether there is a value to reduce, whatever the dynamic sizes are."""
    return all(isinstance(x.shape[axis], int) and x.shape[axis] > 0 for axis in axes)


def _count(x: Any, axes: Any) -> Any:
    return op.CastLike(op.ReduceProd(op.Gather(op.Shape(x), axes), keepdims=0), x)


@in_single
def variance(x: Any, dims: Sequence[int] | None, correction: float = 1.0, output_dtype: int | None = None) -> Any:
    """Express ``prims.var``; that of no values is NaN."""
    axes = axes_of(x, dims)
    if not axes or _has_values(x, axes):
        return prims.prims_var(x, dims, correction, output_dtype)
    names = op.Constant(value_ints=axes)
    distance = op.Sub(x, _mean(x, axes, True))
    total = op.ReduceSum(op.Mul(distance, distance), names, keepdims=0)
    return op.Div(total, op.Max(op.Sub(_count(x, names), like(float(correction), x)), like(0.0, x)))


def mean_of_all(x: Any, dtype: int | None = None) -> Any:
    """Express ``aten.mean`` of all values."""
    return mean(x, None, False, dtype)


def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Express ``aten.diagonal`` by its places; the exporter multiplies by a matrix of ones and zeros, and adds."""
    rank = len(x.shape)
    ends = [dim1 % rank, dim2 % rank]
    others = [axis for axis in range(rank) if axis not in ends]
    rows, columns = (
        op.Sub(op.Shape(x, start=axis, end=axis + 1), op.Constant(value_ints=[skipped]))
        for axis, skipped in zip(ends, (max(-offset, 0), max(offset, 0)), strict=True)
    )
    zero = op.Constant(value_int=0)
    count = op.Max(op.Squeeze(op.Min(rows, columns), op.Constant(value_ints=[0])), zero)
    first = op.Unsqueeze(op.Range(zero, count, op.Constant(value_int=1)), op.Constant(value_ints=[1]))
    places = op.Add(first, op.Constant(value_ints=[max(-offset, 0), max(offset, 0)]))
    found = op.GatherND(op.Transpose(x, perm=[*ends, *others]), places)
    return op.Transpose(found, perm=[*range(1, rank - 1), 0]) if others else found


def histogram(x: Any, bins: int = 100, min: float = 0.0, max: float = 0.0) -> Any:  # noqa: A002 - their names
    """Express ``aten.histc`` of a stated range, with the place in it computed and rounded as PyTorch does."""
    low, high = float(min), float(max)
    if low == high:
        raise NotImplementedError("a histogram whose range comes from the values; state min and max")
    flat = op.Reshape(x, op.Constant(value_ints=[-1]))
    flat.dtype = x.dtype
    span = op.Sub(like(high, x), like(low, x))
    place = op.Cast(op.Div(op.Mul(op.Sub(flat, like(low, x)), like(float(bins), x)), span), to=_INT64)
    place = op.Min(place, op.Constant(value_int=bins - 1))
    inside = op.And(op.GreaterOrEqual(flat, like(low, x)), op.LessOrEqual(flat, like(high, x)))
    place = op.Where(inside, place, op.Constant(value_int=-1))
    numbers = op.Constant(value=ir.tensor(list(range(bins)), _INT64))
    found = op.Equal(
        op.Unsqueeze(place, op.Constant(value_ints=[0])), op.Unsqueeze(numbers, op.Constant(value_ints=[1]))
    )
    return op.ReduceSum(op.Cast(found, to=x.dtype), op.Constant(value_ints=[1]), keepdims=0)


@in_single
def log_sum_exp(x: Any, dim: Sequence[int] | int, keepdim: bool = False) -> Any:
    """Express ``aten.logsumexp``; ONNX Runtime's kernel returns -inf or NaN if the first value is -inf."""
    axes = axes_of(x, dim)
    if not axes:
        return op.Identity(x)
    names = op.Constant(value_ints=axes)
    most = op.ReduceMax(x, names, keepdims=1)
    # Infinities minus themselves are NaN.
    shift = op.Where(op.Equal(op.Abs(most), like(math.inf, x)), like(0.0, x), most)
    total = op.Log(op.ReduceSum(op.Exp(op.Sub(x, shift)), names, keepdims=int(keepdim)))
    return op.Add(total, shift if keepdim else op.Squeeze(shift, names))


def _has_lower_bound(value: Any) -> bool:
    """Return whether a value is known not to be -inf."""
    node = value.producer() if isinstance(value, ir.Value) else None
    if node is None or node.domain != "":
        return False
    if node.op_type in _BOUNDED:
        return True
    if node.op_type == "Clip":
        bound = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
        return bound is not None and bool((bound.numpy() > -math.inf).all())
    if node.op_type == "Mul":  # x * sigmoid(x), which is NaN for -inf
        left, right = node.inputs
        return _is_gate(left, right) or _is_gate(right, left)
    if node.op_type == "Concat":
        return all(map(_has_lower_bound, node.inputs))
    return node.op_type in _PASSING and _has_lower_bound(node.inputs[0])


def _is_gate(value: Any, x: Any) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Sigmoid" and node.inputs[0] is x


def _pooling(form: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form of max pooling that keeps -inf.

    ONNX Runtime's kernels start from the least finite number. In double precision this number is below those of
    narrower types, also below the number that stands for -inf. Values that cannot be -inf need no conversion.
    """

    def apply(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] | int = 0,
        dilation: Sequence[int] | int = 1,
        ceil_mode: bool = False,
    ) -> Any:
        options = (kernel_size, stride, padding, dilation, ceil_mode)
        if not x.dtype.is_floating_point() or x.dtype is ir.DataType.DOUBLE or _has_lower_bound(x):
            return form(x, *options)
        wide = op.Max(to_double(x), to_double(_LOWEST))
        wide.dtype, wide.shape = ir.DataType.DOUBLE, x.shape
        found = form(wide, *options)
        return (op.CastLike(found[0], x), found[1]) if isinstance(found, tuple) else op.CastLike(found, x)

    apply.__name__ = form.__name__  # the exporter's registry reads it
    return apply


def _pooling_with_places(rank: int) -> Callable[..., Any]:
    """Return a form of max pooling that also returns the places of the values, within their image.

    ONNX counts places from the first image of the batch.
    """

    def apply(
        x: Any,
        kernel_size: Sequence[int] | int,
        stride: Sequence[int] | int = (),
        padding: Sequence[int] | int = 0,
        dilation: Sequence[int] | int = 1,
        ceil_mode: bool = False,
    ) -> tuple[Any, Any]:
        kernel, pads, dilations = (_for_each(rank, option) for option in (kernel_size, padding, dilation))
        axes = range(len(x.shape) - rank, len(x.shape))
        alone = len(x.shape) == rank + 1
        values, places = op.MaxPool(
            op.Unsqueeze(x, ints(0)) if alone else x,
            kernel_shape=kernel,
            strides=_for_each(rank, stride) or kernel,
            pads=pads * 2,
            dilations=dilations,
            ceil_mode=int(ceil_mode),
        )
        places = op.Mod(places, reduce(op.Mul, [op.Shape(x, start=axis, end=axis + 1) for axis in axes]))
        return (op.Squeeze(values, ints(0)), op.Squeeze(places, ints(0))) if alone else (values, places)

    apply.__name__ = f"max_pool{rank}d_with_places"
    return apply


def _for_each(rank: int, option: Sequence[int] | int) -> list[int]:
    """Return an option of each dimension."""
    given = [option] if isinstance(option, int) else list(option)
    return given * rank if len(given) == 1 else given


def _averaging(rank: int, form: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form of ``aten.avg_pool2d`` or ``aten.avg_pool3d``; the exporter ignores ``divisor_override``."""

    def apply(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        kernel, steps, around = (
            list(sizes) * (rank if len(sizes) == 1 else 1) for sizes in (kernel_size, stride or kernel_size, padding)
        )
        if divisor_override is None:
            return form(x, kernel, steps, around, ceil_mode, count_include_pad)
        # Zeros make all windows whole, so that each average is the sum divided by the kernel's size. With ceil_mode, a
        # window may reach beyond the padding at the end, but may not start in this padding.
        ends = around
        if ceil_mode:
            ends = [min(pad + step - 1, size - 1) for pad, step, size in zip(around, steps, kernel, strict=True)]
        others = [0] * (len(x.shape) - rank)
        whole = op.Pad(x, op.Constant(value_ints=[*others, *around, *others, *ends]), like(0.0, x))
        whole.dtype, whole.shape = x.dtype, ir.Shape([None] * len(x.shape))
        found = form(whole, kernel, steps, [0] * rank, False, True)
        return op.Mul(found, like(math.prod(kernel) / divisor_override, x))

    apply.__name__ = form.__name__  # the exporter's registry reads it
    return apply


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.diagonal.default: diagonal,
    aten.diagonal_copy.default: diagonal,
    aten.histc.default: histogram,
    aten.any.default: any_of,
    aten.any.dim: any_of,
    aten.any.dims: any_of,
    aten.all.default: all_of,
    aten.all.dim: all_of,
    aten.all.dims: all_of,
    torch.ops.prims.var.default: variance,
    aten.mean.default: mean_of_all,
    aten.mean.dim: mean,
    aten.logsumexp.default: log_sum_exp,
    aten.avg_pool2d.default: _averaging(2, nn.aten_avg_pool2d),
    aten.avg_pool3d.default: _averaging(3, nn.aten_avg_pool3d),
    aten.max_pool1d.default: _pooling(nn.aten_max_pool1d),
    aten.max_pool2d.default: _pooling(nn.aten_max_pool2d),
    aten.max_pool3d.default: _pooling(nn.aten_max_pool3d),
    aten.max_pool1d_with_indices.default: _pooling(_pooling_with_places(1)),
    aten.max_pool2d_with_indices.default: _pooling(_pooling_with_places(2)),
    aten.max_pool3d_with_indices.default: _pooling(_pooling_with_places(3)),
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
