"""Operators that select elements."""

from __future__ import annotations

from fractions import Fraction

from ingot.bounds.abstract import INT64, Tensor, UnboundedError, limits
from ingot.bounds.derived import smaller
from ingot.bounds.interval import Interval
from ingot.bounds.operators.op import Op, refuse_empty, sizes
from ingot.bounds.operators.shaping import ANY_SHAPE, axes_of
from ingot.bounds.poly import ONE, ZERO


def slice_(op: Op) -> list[Tensor]:
    dims = list(op[0].shape())
    starts, ends = op.values(1, "starts"), op.values(2, "ends")
    hidden = any(op.get(index) is not None and op[index].listed() is None for index in (3, 4))
    if hidden or starts is None or ends is None or len(starts) != len(ends):
        return [Tensor.of(op[0].kind, [Interval.up_to(high) for high in sizes(op[0].shape())], each=op[0].bounds)]
    axes = op.values(3, "axes") or tuple(map(Interval.exactly, range(len(starts))))
    steps = op.values(4, "steps") or (Interval.exactly(1),) * len(starts)
    grid = op[0].grid()
    for start, end, axis, step in zip(starts, ends, axes_of(axes, len(dims)), steps, strict=False):
        dims[axis] = _sliced(dims[axis], start, end, step)
        fixed = [value.constant for value in (start, end, step)]
        if grid is None or None in fixed or not fixed[2]:
            grid = None
            continue
        first, stop, by = (int(value or 0) for value in fixed)
        if by < 0 and (first < -grid.shape[axis] or stop >= grid.shape[axis]):
            grid = None  # ONNX and its runtimes cut such places off in several ways
            continue
        # In Python, a stop before the first element would count from the end again.
        before = by < 0 and stop < -grid.shape[axis]
        grid = grid[(slice(None),) * axis + (slice(first, None if before else stop, by),)]
    if grid is None:
        return [Tensor.of(op[0].kind, dims, each=op[0].bounds)]
    dims = list(map(Interval.exactly, grid.shape))
    return [Tensor.of(op[0].kind, dims, items=grid.reshape(-1).tolist(), each=op[0].bounds)]


def _sliced(whole: Interval, start: Interval, end: Interval, step: Interval) -> Interval:
    high = whole.high or ZERO
    if step.constant != 1:
        fixed = [value.constant for value in (whole, start, end, step)]
        if None not in fixed and step.constant and step.constant > 0:
            size, first, last, each = (int(value or 0) for value in fixed)
            return Interval.exactly(len(range(size)[first:last:each]))
        by = abs(step.constant) if step.constant else 1
        return Interval.up_to(high.scaled(Fraction(1, 1) / by) + (ONE if by > 1 else ZERO))
    begin, stop = (_counted(place, whole) for place in (start, end))
    if stop.high is None:
        stop = Interval.up_to(high)
    elif stop.low is not None and stop.low.covers(high):
        stop = whole
    else:
        stop = stop.least(whole) if stop.non_negative else Interval(None, stop.high)
    if not begin.non_negative:
        return Interval.up_to(high)
    length = stop - begin
    if length.exact is not None and length.non_negative:
        return length
    return Interval.up_to(high if length.high is None else smaller(high, length.high) or high)


def _counted(place: Interval, whole: Interval) -> Interval:
    """Return a position counted from the start."""
    if place.constant is not None and place.constant < 0:
        return whole + place
    return place if place.non_negative else Interval()


def gather(op: Op) -> list[Tensor]:
    data, indices = op[0], op[1]
    axis = op.axis(len(data.shape()))
    dims = (*data.shape()[:axis], *indices.shape(), *data.shape()[axis + 1 :])
    items = None
    places = indices.listed()
    if data.items is not None and len(data.shape()) == 1 and places is not None:
        fixed = [place.constant for place in places]
        if all(place is not None and -len(data.items) <= place < len(data.items) for place in fixed):
            items = [data.items[int(place or 0)] for place in fixed]
    count = None if len(data.shape()) != 1 else indices.count
    return [Tensor.of(data.kind, dims, count=count, items=items, each=data.bounds)]


def gather_elements(op: Op) -> list[Tensor]:
    return [Tensor(op[0].kind, op[1].dims, op[1].count, None, op[0].bounds)]


def gather_nd(op: Op) -> list[Tensor]:
    *outer, last = op[1].shape()
    if last.constant is None:
        raise UnboundedError(ANY_SHAPE)
    skip = op.integer("batch_dims") + int(last.constant)
    return [Tensor.of(op[0].kind, (*outer, *op[0].shape()[skip:]), each=op[0].bounds)]


def scattered(op: Op) -> list[Tensor]:
    """The shape is the first input's; values come from the first and the last input."""
    adds = op.text("reduction", "none") != "none"
    each = limits(op[0].kind) if adds else op[0].bounds.joined(op[2].bounds)
    return [Tensor(op[0].kind, op[0].dims, op[0].count, None, each)]


def compress(op: Op) -> list[Tensor]:
    if not op.has("axis"):
        return [Tensor.of(op[0].kind, [Interval.up_to(op[0].count)], each=op[0].bounds)]
    dims = list(op[0].shape())
    axis = op.axis(len(dims))
    dims[axis] = Interval.up_to(dims[axis].high or ZERO)
    return [Tensor.of(op[0].kind, dims, each=op[0].bounds)]


def nonzero(op: Op) -> list[Tensor]:
    rank = max(1, len(op[0].shape()))
    dims = (Interval.exactly(rank), Interval.up_to(op[0].count))
    return [Tensor.of(INT64, dims, each=Interval.up_to(op[0].count))]


def unique(op: Op) -> list[Tensor]:
    places = Interval.up_to(op[0].count)
    whole = op[0]
    dims: tuple[Interval, ...] = (places,)
    if op.has("axis"):
        refuse_empty(whole.shape())
        dims = tuple(Interval.up_to(high) for high in sizes(whole.shape()))
    found = [Tensor.of(whole.kind, dims, count=whole.count, each=whole.bounds)]
    return (found + [Tensor.of(INT64, [places], each=places)] * 3)[: op.outputs]


def top_k(op: Op) -> list[Tensor]:
    dims = list(op[0].shape())
    axis = op.axis(len(dims), -1)
    number = op[1].scalar if op.get(1) is not None else Interval.exactly(op.integer("k"))
    # K is at most the size of the dimension, or it fails.
    exact = number.exact is not None and number.non_negative
    dims[axis] = number if exact else Interval.up_to(dims[axis].high or ZERO)
    places = Interval.up_to(op[0].count)
    return [Tensor.of(op[0].kind, dims, each=op[0].bounds), Tensor.of(INT64, dims, each=places)]
