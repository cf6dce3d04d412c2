"""ONNX forms of operators that PyTorch's exporter lacks, chosen by how often users report them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnxscript
import torch
from onnx.defs import OpSchema
from onnxscript import ir, opset18
from onnxscript.function_libs.torch_lib.ops import core

from ingot.export.lower.forms.exact_math import ints
from ingot.export.lower.forms.integers import converted, running_products

aten = torch.ops.aten
op: Any = opset18


def _int(value: int) -> Any:
    return op.Constant(value_int=value)


def _size(x: Any, dim: int) -> Any:
    """Return the size of a dimension as a tensor [1]."""
    dim %= len(x.shape)
    return op.Shape(x, start=dim, end=dim + 1)


def _range(size: Any) -> Any:
    return op.Range(_int(0), op.Squeeze(size), _int(1))


def _prefixes(x: Any, dim: int, fill: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Return, for each position along ``dim``, its prefix on a new last dimension, padded with ``fill``.

    Also return a mask of the values in the prefix, and a function that restores the order of the dimensions after the
    last one is reduced. Memory grows with the square of the length of ``dim``.
    """
    rank = len(x.shape)
    order = [axis for axis in range(rank) if axis != dim % rank] + [dim % rank]
    place = _range(_size(x, dim))
    seen = op.GreaterOrEqual(op.Unsqueeze(place, [1]), op.Unsqueeze(place, [0]))
    filler = op.Constant(value=ir.tensor(np.array(fill, x.dtype.numpy())))
    values = op.Where(seen, op.Unsqueeze(op.Transpose(x, perm=order), [-2]), filler)
    return values, seen, lambda y: op.Transpose(y, perm=[order.index(axis) for axis in range(rank)])


# https://github.com/pytorch/pytorch/issues/102948
def cum_prod(x: Any, dim: int, dtype: int | None = None) -> Any:
    """Express ``aten.cumprod``, whose decomposition has no ONNX form either."""
    x = converted(x, dtype)
    if not x.shape:
        return op.Identity(x)
    if (whole := running_products(x, dim % len(x.shape))) is not None:
        return whole
    values, _, ordered = _prefixes(x, dim, 1)
    return ordered(op.ReduceProd(values, ints(-1), keepdims=0))


# https://github.com/pytorch/pytorch/pull/84496 lists both as unsupported
def _cum_extreme(x: Any, dim: int, fill: float, reduce: Any) -> tuple[Any, Any]:
    if not x.shape:
        return op.Identity(x), _int(0)
    kind = x.dtype
    if kind is ir.DataType.BOOL:
        x = converted(x, ir.DataType.INT32)
    if x.dtype.is_integer():
        fill = np.iinfo(x.dtype.numpy()).max if fill > 0 else np.iinfo(x.dtype.numpy()).min
    values, seen, ordered = _prefixes(x, dim, fill)
    place = _range(_size(x, dim))

    def last(found: Any) -> Any:  # a value may equal ``fill``, so the position decides
        return op.ReduceMax(op.Where(op.And(seen, found), place, _int(-1)), ints(-1), keepdims=0)

    index = last(op.Equal(values, reduce(values, ints(-1), keepdims=1)))  # PyTorch returns the last of equal values
    if not x.dtype.is_integer():
        unknown = last(op.IsNaN(values))
        index = op.Where(op.Less(unknown, _int(0)), index, unknown)
    index = ordered(index)
    found = op.GatherElements(x, index, axis=dim)
    return found if kind is x.dtype else op.Cast(found, to=kind), index


def cum_max(x: Any, dim: int) -> tuple[Any, Any]:
    """Express ``aten.cummax``."""
    return _cum_extreme(x, dim, -math.inf, op.ReduceMax)


def cum_min(x: Any, dim: int) -> tuple[Any, Any]:
    """Express ``aten.cummin``."""
    return _cum_extreme(x, dim, math.inf, op.ReduceMin)


# https://github.com/pytorch/pytorch/issues/151648
def search_sorted(
    sequence: Any, x: Any, out_int32: bool = False, right: bool = False, side: str | None = None, sorter: Any = None
) -> Any:
    """Express ``aten.searchsorted``: the number of values of the sequence that come before each."""
    given, kind = sequence, sequence.dtype
    if isinstance(x, int | float):
        if isinstance(x, float) and sequence.dtype.is_integer():
            sequence = converted(sequence, ir.DataType.DOUBLE)
        x = op.Constant(value=ir.tensor(np.array(x, sequence.dtype.numpy())))
    if sorter is not None:
        sequence = op.GatherElements(sequence, sorter, axis=-1)
    values = op.Unsqueeze(x, ints(-1))
    if len(given.shape) > 1:
        sequence = op.Unsqueeze(sequence, ints(-2))
    before = op.Not((op.Greater if right or side == "right" else op.GreaterOrEqual)(sequence, values))
    if kind.is_integer():
        count = _count(before)
    else:
        unknown = op.IsNaN(sequence)
        count = _found(_count(op.And(before, op.Not(unknown))), _count(unknown), given)
    count = op.Squeeze(count, ints(-1))
    return op.Cast(count, to=ir.DataType.INT32) if out_int32 else count


def _count(flags: Any) -> Any:
    return op.ReduceSum(op.Cast(flags, to=ir.DataType.INT64), ints(-1), keepdims=1)


def _found(before: Any, unknown: Any, sequence: Any) -> Any:
    """Return where PyTorch's binary search ends: at ``before``, or at the end if the search reads a NaN.

    It continues after a NaN, as after a smaller number. As long as it finds only smaller numbers, it reads the values
    at floor((size + 1) / 2), floor((size + 1) / 4), ... from the end. The first of these that is not smaller decides:
    all values that the search reads afterwards precede that one, and the ``unknown`` NaN are last.
    """
    size = sequence.shape[-1]
    if isinstance(size, int):
        read = ints(*((size + 1) >> step for step in range(1, max((size + 1).bit_length(), 2))))
    else:
        read = op.Div(op.Add(_size(sequence, -1), _int(1)), ints(*(1 << step for step in range(1, 32))))
    size = _size(sequence, -1)
    ends = op.And(op.Greater(read, unknown), op.LessOrEqual(read, op.Sub(size, before)))
    return op.Where(op.Greater(_count(ends), _int(0)), before, size)


def bucketize(x: Any, boundaries: Any, out_int32: bool = False, right: bool = False) -> Any:
    """Express ``aten.bucketize``, whose decomposition fails for a number and for a tensor without dimensions."""
    return search_sorted(boundaries, x, out_int32, right)


# https://github.com/pytorch/pytorch/issues/69201
def pairwise_distances(x: Any, y: Any, p: float = 2.0, compute_mode: int | None = None) -> Any:
    """Express ``aten._cdist_forward`` by differences: products would cancel for distances near zero."""
    gap = op.Abs(op.Sub(op.Unsqueeze(x, ints(-2)), op.Unsqueeze(y, ints(-3))))
    if p == 2:
        return op.ReduceL2(gap, ints(-1), keepdims=0)
    if p == math.inf:
        return op.ReduceMax(gap, ints(-1), keepdims=0)
    if p == 0:
        each = op.Where(op.IsNaN(gap), gap, op.CastLike(op.Cast(gap, to=ir.DataType.BOOL), x))
        return op.ReduceSum(each, ints(-1), keepdims=0)
    if p == 1:
        return op.ReduceSum(gap, ints(-1), keepdims=0)
    power, root = (op.CastLike(op.Constant(value_float=number), x) for number in (p, 1 / p))
    return op.Pow(op.ReduceSum(op.Pow(gap, power), ints(-1), keepdims=0), root)


# https://github.com/pytorch/pytorch/issues/26034
def masked_select(x: Any, mask: Any) -> Any:
    """Express ``aten.masked_select``."""
    values, chosen = (op.Reshape(op.Expand(a, op.Shape(b)), ints(-1)) for a, b in ((x, mask), (mask, x)))
    return op.Compress(values, chosen)


def sort(x: Any, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Express ``aten.sort``; ONNX Runtime's kernel lacks truth values."""
    flags = x.dtype is ir.DataType.BOOL
    if flags:
        x = converted(x, ir.DataType.INT32)
    values, places = core.aten_sort(x, dim, descending)
    return op.Cast(values, to=ir.DataType.BOOL) if flags else values, places


# https://github.com/pytorch/pytorch/issues/95613
def stable_sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> tuple[Any, Any]:
    """Express ``aten.sort.stable``: ONNX's order of equal values is stable."""
    return sort(x, dim, descending)


def take(x: Any, index: Any) -> Any:
    """Express ``aten.take``, whose decomposition reads the value of an index without dimensions."""
    return op.Gather(op.Reshape(x, ints(-1)), index)


_INVERSE = onnxscript.values.Op(
    onnxscript.values.Opset("com.microsoft", 1),
    "Inverse",
    OpSchema(
        "Inverse",
        "com.microsoft",
        1,
        inputs=[OpSchema.FormalParameter("X", "T")],
        outputs=[OpSchema.FormalParameter("Y", "T")],
        type_constraints=[("T", ["tensor(float16)", "tensor(float)", "tensor(double)"], "")],
    ),
)


# https://github.com/pytorch/pytorch/issues/136622
def inverse(x: Any) -> Any:
    """Express ``aten.linalg_inv`` by ONNX Runtime's kernel: ONNX has no operator for it."""
    return _INVERSE(x)


def inverse_unchecked(x: Any, check_errors: bool = False) -> tuple[Any, Any]:
    """Express ``aten.linalg_inv_ex``."""
    return _INVERSE(x), op.ConstantOfShape(op.Shape(x, end=-2), value=ir.tensor(np.zeros(1, np.int32)))


# https://github.com/pytorch/pytorch/issues/133052
def solve(a: Any, b: Any, left: bool = True) -> Any:
    """Express ``aten.linalg_solve``."""
    vector = len(b.shape) == 1 or (len(b.shape) == len(a.shape) - 1 and tuple(b.shape) == tuple(a.shape)[:-1])
    columns = op.Unsqueeze(b, ints(-1)) if vector else b
    found = op.MatMul(_INVERSE(a), columns) if left else op.MatMul(columns, _INVERSE(a))
    return op.Squeeze(found, ints(-1)) if vector else found


def squeeze(x: Any, dim: int | Sequence[int]) -> Any:
    """Express ``aten.squeeze`` of dimensions, which leaves those of another size than 1; ONNX refuses them."""
    axes = [dim] if isinstance(dim, int) else dim
    if x.shape is None:  # of unknown rank: as the exporter does, which takes each for 1
        return op.Squeeze(x, ints(*axes))
    ones = [axis for axis in axes if x.shape and x.shape[axis] == 1]
    return op.Squeeze(x, ints(*ones)) if ones else op.Identity(x)


# https://github.com/onnx/onnx/issues/4845
def roll(x: Any, shifts: Any, dims: Sequence[int] | int = ()) -> Any:
    """Express ``aten.roll``, also by a shift that depends on a size, as in ``torch.fft.fftshift``."""
    steps = list(shifts) if isinstance(shifts, list | tuple) else [shifts]
    axes = [dims] if isinstance(dims, int) else list(dims)
    if all(isinstance(step, int) for step in steps) or not axes:
        return core.aten_roll(x, steps, axes)
    return _rolled(x, steps, [axis % len(x.shape) for axis in axes])


def roll_complex(x: Any, shifts: Any, dims: Sequence[int] | int = ()) -> Any:
    """Express ``aten.roll`` of complex numbers, which have a last dimension of parts in the graph."""
    steps = list(shifts) if isinstance(shifts, list | tuple) else [shifts]
    axes = [dims] if isinstance(dims, int) else list(dims)
    if not axes:
        return core.aten_roll_complex(x, steps, axes)
    return _rolled(x, steps, [axis % (len(x.shape) - 1) for axis in axes])


def _rolled(x: Any, steps: Sequence[Any], axes: Sequence[int]) -> Any:
    for step, axis in zip(steps, axes, strict=True):
        size = op.Shape(x, start=axis, end=axis + 1)
        places = ints(step) if isinstance(step, int) else op.Reshape(op.Cast(step, to=ir.DataType.INT64), ints(-1))
        cut = op.Sub(size, op.Mod(places, size))
        parts = op.Slice(x, cut, size, ints(axis)), op.Slice(x, ints(0), cut, ints(axis))
        x = op.Concat(*parts, axis=axis)
    return x


# ONNX shifts unsigned integers only, and leaves shifts by more bits than the type has undefined.
def _shift(x: Any, steps: Any, *, left: bool) -> Any:
    """Express a shift by products and quotients of int64; beyond the type's bits it is 0, or the sign."""
    kind = _shifted_type(x, steps)
    bits = 8 * kind.numpy().itemsize
    x, steps = (_int(a) if isinstance(a, int) else op.Cast(a, to=ir.DataType.INT64) for a in (x, steps))
    limit = bits if left or kind.numpy().kind == "u" else bits - 1
    inside = op.And(op.GreaterOrEqual(steps, _int(0)), op.Less(steps, _int(limit)))
    powers = op.Constant(value=ir.tensor(np.left_shift(np.int64(1), np.arange(64))))
    power = op.Gather(powers, op.Where(inside, steps, _int(0)))
    if left:
        return op.Cast(op.Where(inside, op.Mul(x, power), _int(0)), to=kind)
    signs = op.Sub(_int(0), op.Cast(op.Less(x, _int(0)), to=ir.DataType.INT64))
    # A remainder of two's complement has the divisor's sign, so that the quotient is rounded down.
    return op.Cast(op.Where(inside, op.Div(op.Sub(x, op.Mod(x, power)), power), signs), to=kind)


def _shifted_type(x: Any, steps: Any) -> ir.DataType:
    """Return PyTorch's type of a shift: that of the operand with dimensions, or the wider one of two such operands."""
    tensors = [a for a in (x, steps) if not isinstance(a, int)]
    leading = [a for a in tensors if a.shape is None or len(a.shape)] or tensors
    found = np.result_type(*(np.dtype(a.dtype.numpy()) for a in leading))
    return ir.DataType.from_numpy(found)


def shift_left(x: Any, steps: Any) -> Any:
    """Express ``aten.bitwise_left_shift``."""
    return _shift(x, steps, left=True)


def shift_right(x: Any, steps: Any) -> Any:
    """Express ``aten.bitwise_right_shift``, which keeps the sign."""
    return _shift(x, steps, left=False)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {
    aten.cumprod.default: cum_prod,
    aten.cummax.default: cum_max,
    aten.cummin.default: cum_min,
    aten.searchsorted.Tensor: search_sorted,
    aten.searchsorted.Scalar: search_sorted,
    aten.bucketize.Scalar: bucketize,
    aten.bucketize.Tensor: bucketize,
    aten._cdist_forward.default: pairwise_distances,
    aten.masked_select.default: masked_select,
    aten.sort.default: sort,
    aten.sort.stable: stable_sort,
    aten.take.default: take,
    aten.linalg_inv.default: inverse,
    aten.inverse.default: inverse,
    aten.linalg_inv_ex.default: inverse_unchecked,
    aten.linalg_solve.default: solve,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.roll.default: roll,
    aten.__lshift__.Scalar: shift_left,
    aten.__lshift__.Tensor: shift_left,
    aten.bitwise_left_shift.Scalar_Tensor: shift_left,
    aten.bitwise_left_shift.Tensor: shift_left,
    aten.bitwise_left_shift.Tensor_Scalar: shift_left,
    aten.__rshift__.Scalar: shift_right,
    aten.__rshift__.Tensor: shift_right,
    aten.bitwise_right_shift.Scalar_Tensor: shift_right,
    aten.bitwise_right_shift.Tensor: shift_right,
    aten.bitwise_right_shift.Tensor_Scalar: shift_right,
}
"""By operator, for :func:`ingot.export.lower.onnx.lower`."""
