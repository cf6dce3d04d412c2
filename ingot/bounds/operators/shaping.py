"""Operators that rearrange and join elements, and those that read or set shapes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from ingot.bounds.abstract import INT64, INTEGERS, ITEMS, ROUNDED, Dims, Tensor, UnboundedError, broadcast
from ingot.bounds.interval import Interval
from ingot.bounds.operators.op import Op, never_empty, sizes
from ingot.bounds.poly import ONE, ZERO, product

ANY_SHAPE = "its output's shape comes from values"


def identity(op: Op) -> list[Tensor]:
    return [op[0]]


def shape(op: Op) -> list[Tensor]:
    dims = op[0].shape()[slice(op.integer("start"), op.integer("end", len(op[0].shape())))]
    return [Tensor.of(INT64, [Interval.exactly(len(dims))], items=dims)]


def size(op: Op) -> list[Tensor]:
    dims = op[0].dims
    known = dims is not None and all(dim.exact is not None for dim in dims)
    exact = product(dim.exact or ZERO for dim in dims or ())
    return [Tensor.of(INT64, [], items=[Interval.exactly(exact) if known else Interval.up_to(op[0].count)])]


def reshape(op: Op) -> list[Tensor]:
    source = op[0]
    wanted = op.values(1, "shape")
    if wanted is None:
        return [Tensor(source.kind, None, source.count, source.items, source.each)]
    dims: list[Interval] = []
    free = None
    for axis, item in enumerate(wanted):
        if item.constant == 0 and not op.integer("allowzero"):
            item = source.shape()[axis] if axis < len(source.shape()) else Interval()
        elif item.constant == -1:
            free = axis
        elif item.high is None and not _never_empty(source):
            raise UnboundedError("its input may be empty, and then get any shape from values")
        elif not item.non_negative or item.high is None:
            item = Interval.up_to(source.count if item.high is None else source.count.upper(item.high))
        elif not item.positive and not op.integer("allowzero"):  # a value of 0 stands for the input's size
            known = source.dims or ()
            same = (known[axis].high if axis < len(known) else None) or source.count
            item = Interval.up_to(item.high.upper(same))
        dims.append(item)
    if free is not None:
        dims[free] = _rest(source, [dim for axis, dim in enumerate(dims) if axis != free])
    return [Tensor.of(source.kind, dims, count=source.count, items=source.items, each=source.each)]


def _rest(source: Tensor, others: Sequence[Interval]) -> Interval:
    """Return the size that is left for one dimension."""
    lows = [dim.low or ZERO for dim in others]
    by = product(ONE if low.constant == 0 else low for low in lows)
    exact = source.dims is not None and all(dim.exact is not None for dim in (*source.dims, *others))
    if exact and source.dims is not None:
        total = product(dim.exact or ZERO for dim in source.dims)
        quotient = total.over(by)
        if quotient is not None:
            return Interval.exactly(quotient)
    return Interval.up_to(source.count.over(by) or source.count.share(by) or source.count)


def flatten(op: Op) -> list[Tensor]:
    dims = op[0].shape()
    axis = op.integer("axis", 1) if len(dims) else 0
    axis += len(dims) if axis < 0 else 0
    halves = (_joint(dims[:axis]), _joint(dims[axis:]))
    return [Tensor.of(op[0].kind, halves, count=op[0].count, items=op[0].items, each=op[0].each)]


def _joint(dims: Dims) -> Interval:
    if all(dim.exact is not None for dim in dims):
        return Interval.exactly(product(dim.exact or ZERO for dim in dims))
    return Interval.up_to(product(sizes(dims)))


def squeeze(op: Op) -> list[Tensor]:
    dims = op[0].shape()
    axes = op.values(1, "axes")
    if axes is None and op.given_at(1, "axes"):
        raise UnboundedError("its axes come from values")
    chosen = axes_of(axes, len(dims)) if axes else [axis for axis, dim in enumerate(dims) if dim.constant == 1]
    if not axes and any(dim.constant is None for dim in dims):
        raise UnboundedError("it drops all dimensions of size 1, so the rank of its output comes from sizes")
    left = [dim for axis, dim in enumerate(dims) if axis not in chosen]
    return [Tensor.of(op[0].kind, left, count=op[0].count, items=op[0].items, each=op[0].each)]


def unsqueeze(op: Op) -> list[Tensor]:
    axes = op.values(1, "axes")
    if axes is None:
        raise UnboundedError("its axes come from values")
    dims = list(op[0].shape())
    for axis in sorted(axes_of(axes, len(dims) + len(axes))):
        dims.insert(axis, Interval.exactly(1))
    return [Tensor.of(op[0].kind, dims, count=op[0].count, items=op[0].items, each=op[0].each)]


def axes_of(axes: Sequence[Interval], rank: int) -> list[int]:
    """Return fixed axes, counted from the first.

    Raises:
        UnboundedError: they come from values, or do not exist.
    """
    found = [axis.constant for axis in axes]
    if any(axis is None or not -rank <= axis < rank for axis in found):
        raise UnboundedError("its axes come from values, or do not exist")
    return [int(axis or 0) % rank for axis in found]


def transpose(op: Op) -> list[Tensor]:
    dims = op[0].shape()
    order = op.integers("perm", range(len(dims))[::-1])
    if sorted(order) != list(range(len(dims))):
        raise UnboundedError("its permutation does not fit its input")
    grid = op[0].grid()
    items = None if grid is None else grid.transpose(order).reshape(-1).tolist()
    return [Tensor.of(op[0].kind, [dims[axis] for axis in order], count=op[0].count, items=items, each=op[0].each)]


def concat(op: Op) -> list[Tensor]:
    tensors = op.given
    axis = op.axis(len(tensors[0].shape()))
    dims = list(tensors[0].shape())
    # ONNX Runtime joins [2, 3] and an empty [255, 0] to [257, 3].
    full = all(_never_empty(tensor) for tensor in tensors)
    for tensor in tensors[1:]:
        other = tensor.shape()
        if len(other) != len(dims):
            raise UnboundedError("its inputs have different ranks")
        for place, dim in enumerate(other):
            if place == axis:
                dims[place] = dims[place] + dim
            elif dims[place] != dim and not full:
                dims[place] = dims[place].joined(dim)
            elif dim.exact is not None:
                dims[place] = dim  # all are equal, or it fails
    items = _concatenated(tensors, axis)
    each = tensors[0].bounds
    for tensor in tensors[1:]:
        each = each.joined(tensor.bounds)
    count = sum((tensor.count for tensor in tensors), ZERO) if full else None
    return [Tensor.of(tensors[0].kind, dims, count=count, items=items, each=each)]


def _never_empty(tensor: Tensor) -> bool:
    return tensor.dims is not None and never_empty(tensor.dims)


def _concatenated(tensors: Sequence[Tensor], axis: int) -> list[Interval] | None:
    if len(tensors[0].shape()) == 1:
        lists = [tensor.listed() for tensor in tensors]
        return None if None in lists else [item for found in lists for item in found or ()]
    grids = [grid for tensor in tensors if (grid := tensor.grid()) is not None]
    found: list[Interval] = np.concatenate(grids, axis).reshape(-1).tolist() if len(grids) == len(tensors) else []
    return found or None


def split(op: Op) -> list[Tensor]:
    dims = op[0].shape()
    axis = op.axis(len(dims))
    parts = op.values(1, "split")
    whole = dims[axis]
    if parts is None and op.given_at(1, "split"):
        lengths = [Interval.up_to(whole.high or ZERO)] * op.outputs
    elif parts is None:
        number = op.outputs
        even = whole.exact is not None and whole.constant is not None and whole.constant % number == 0
        lengths = [
            Interval.exactly(whole.constant / number)
            if even and whole.constant is not None
            else Interval.up_to((whole.high or ZERO).scaled(Fraction(1, number)) + ONE)
        ] * number
    else:
        lengths = [
            part if part.non_negative and part.high is not None else Interval.up_to(whole.high or ZERO)
            for part in parts
        ]
    values, start, outputs = op[0].items if len(dims) == 1 else None, 0, []
    for length in lengths:
        items = None
        if values is not None and length.constant is not None:
            items = values[start : start + int(length.constant)]
            start += int(length.constant)
        else:
            values = None
        shape = (*dims[:axis], length, *dims[axis + 1 :])
        outputs.append(Tensor.of(op[0].kind, shape, items=items, each=op[0].bounds))
    return outputs


def expand(op: Op) -> list[Tensor]:
    wanted = op.values(1, "shape")
    if wanted is None:
        raise UnboundedError(ANY_SHAPE)
    dims = [_size(item) for item in wanted]
    full, count = broadcast([op[0], Tensor.of(op[0].kind, dims)])
    if full is None:
        return [Tensor(op[0].kind, None, count, each=op[0].bounds)]
    length = wanted[0].constant if len(wanted) == 1 else None
    small = length is not None and op[0].length == 1 and 0 < length <= ITEMS
    items = op[0].items * int(length or 0) if small and op[0].items else None
    return [Tensor.of(op[0].kind, full, items=items, each=op[0].bounds)]


def _size(item: Interval) -> Interval:
    """Return a size that is given as a value.

    Raises:
        UnboundedError: it has no bound.
    """
    if item.high is None:
        raise UnboundedError(ANY_SHAPE)
    return item if item.non_negative else Interval.up_to(item.high)


def tile(op: Op) -> list[Tensor]:
    repeats = op.values(1, "repeats")
    if repeats is None or len(repeats) != len(op[0].shape()):
        raise UnboundedError("its number of repeats comes from values")
    dims = [dim * _size(by) for dim, by in zip(op[0].shape(), repeats, strict=True)]
    return [Tensor.of(op[0].kind, dims, each=op[0].bounds)]


def pad(op: Op) -> list[Tensor]:
    amounts = op.values(1, "pads")
    dims = list(op[0].shape())
    axes = op.values(3, "axes")
    if axes is None and op.get(3) is not None:
        raise UnboundedError("its axes come from values")
    chosen = range(len(dims)) if axes is None else axes_of(axes, len(dims))
    if amounts is None or len(amounts) != 2 * len(chosen):
        raise UnboundedError("its amount of padding comes from values")
    for place, axis in enumerate(chosen):
        dims[axis] = _size(dims[axis] + amounts[place] + amounts[place + len(chosen)])
    each = op[0].bounds if op.get(2) is None else op[0].bounds.joined(op[2].bounds)
    return [Tensor.of(op[0].kind, dims, each=each.joined(Interval.exactly(0)))]


def resize(op: Op) -> list[Tensor]:
    dims = list(op[0].shape())
    last = len(op.inputs) - 1
    if op.opset < 11 or op.node.operator == "Upsample":
        wanted, factors = None, op.values(1, "scales") or _scales(op)
    else:
        wanted = op[3].listed() if last >= 3 and op.get(3) is not None else None
        factors = op[2].listed() if last >= 2 and op.get(2) is not None else None
        policy = op.text("keep_aspect_ratio_policy", "stretch")
        if policy == "not_larger" and wanted is not None:
            wanted = tuple(Interval.up_to(size.high) if size.high else size for size in wanted)
        elif policy != "stretch":
            wanted = None
    axes = [axis % len(dims) for axis in op.integers("axes", range(len(dims)))]
    found = wanted or factors
    if not found or len(found) != len(axes):
        raise UnboundedError("its sizes or scales come from values")
    for axis, value in zip(axes, found, strict=True):
        dims[axis] = _size(value) if wanted else _scaled(dims[axis], value)
    return [Tensor.of(op[0].kind, dims)]


def _scaled(dim: Interval, scale: Interval) -> Interval:
    """Return a size times a scale in 32-bit floats, rounded down."""
    if scale.constant == 1:
        return dim
    if scale.high is None:
        raise UnboundedError(ANY_SHAPE)
    high = (dim * scale).high
    exact, factor = dim.constant, scale.constant
    if exact is not None and factor is not None:
        return Interval.exactly(int(np.float32(factor) * np.float32(exact)))
    return Interval.up_to((high or ZERO).scaled(ROUNDED))


def _scales(op: Op) -> tuple[Interval, ...] | None:
    if not op.has("scales"):
        return None
    return tuple(Interval.exactly(Fraction(value)) for value in op.node.attributes["scales"].numbers)


def depth_to_space(op: Op) -> list[Tensor]:
    n, c, h, w = op[0].shape()
    by = Interval.exactly(Fraction(op.integer("blocksize", 1)))
    square = Interval.exactly(Fraction(1, op.integer("blocksize", 1) ** 2))
    return [Tensor.of(op[0].kind, (n, c * square, h * by, w * by), count=op[0].count)]


def space_to_depth(op: Op) -> list[Tensor]:
    n, c, h, w = op[0].shape()
    by = Interval.exactly(Fraction(1, op.integer("blocksize", 1)))
    square = Interval.exactly(op.integer("blocksize", 1) ** 2)
    return [Tensor.of(op[0].kind, (n, c * square, h * by, w * by), count=op[0].count)]


def one_hot(op: Op) -> list[Tensor]:
    depth = op[1].scalar
    if depth.high is None:
        raise UnboundedError("its depth comes from values")
    dims = list(op[0].shape())
    axis = op.axis(len(dims) + 1, -1)
    dims.insert(axis, _size(depth))
    return [Tensor.of(op[2].kind, dims, each=op[2].bounds)]


def range_(op: Op) -> list[Tensor]:
    start, limit, step = (op[index].scalar for index in range(3))
    backwards = step.constant is not None and step.constant < 0
    length = start - limit if backwards else limit - start
    by = step.constant
    if length.high is None or (by is None and (step.low is None or not step.low.covers(ONE))) or by == 0:
        raise UnboundedError("its length comes from values")
    dim = Interval.up_to(length.high)
    if by is not None and (abs(by) != 1 or op[0].kind not in INTEGERS):  # rounded up
        dim = Interval.up_to(length.high.scaled(1 / abs(by)) + ONE)
    elif by is not None and length.exact is not None and length.non_negative:
        dim = length
    first, last = (limit, start) if backwards else (start, limit)
    return [Tensor.of(op[0].kind, [dim], each=Interval(first.low, last.high))]


def constant_of_shape(op: Op) -> list[Tensor]:
    wanted = op[0].listed()
    if wanted is None:
        raise UnboundedError(ANY_SHAPE)
    value = op.node.attributes["value"].tensor if op.has("value") else None
    filled = Tensor.of(1, []) if value is None else Tensor.constant(value)
    dims = [_size(item) for item in wanted]
    length = dims[0].constant if len(dims) == 1 else None
    items = (filled.scalar,) * int(length) if length is not None and 0 < length <= ITEMS else None
    return [Tensor.of(filled.kind, dims, items=items, each=filled.bounds)]
