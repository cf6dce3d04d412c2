"""Operators that rearrange elements: where the samples are afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ingot.bounds.abstract import Dims, Tensor
from ingot.bounds.flow import COUNTED, SHARED, Flow, Kind, MixingError, mentions
from ingot.bounds.interval import Interval
from ingot.bounds.operators.shaping import axes_of
from ingot.bounds.poly import ONE, ZERO, Poly, product
from ingot.bounds.samples.step import Step

_REGROUPS = "it divides the samples into parts of several, or by their number"
_JOINS = "it joins the positions of samples with other values"


def identity(step: Step) -> Flow:
    return step.source


def shape(step: Step) -> Flow:
    """Shape and Size: of samples, the sizes of each are those of all, so only their number may differ."""
    tensor, output = step.op.get(0), step.outputs[0]
    if output is not None and output.items and not any(step.counts(item.exact) for item in output.items):
        return SHARED
    flow = step.flow(0)
    if flow.sampled and step.op.node.operator == "Shape":
        places = range(flow.rank)[step.op.integer("start", 0) : step.op.integer("end", flow.rank)]
        sizes = _dims(tensor)
        numbers = [at for at in places if at == flow.axis or mentions(sizes[at].exact or ONE, step.dim)]
        return replace(COUNTED, columns=frozenset(map(places.index, numbers))) if numbers else SHARED
    known = tensor is not None and tensor.dims is not None and all(dim.exact is not None for dim in tensor.dims)
    if known or flow.sampled:
        return COUNTED
    step.share(0)
    return SHARED


def _exact(dims: Sequence[Interval]) -> Poly | None:
    """Return the product of sizes; None if one is not known exactly."""
    found = [dim.exact for dim in dims]
    return None if None in found else product(size for size in found if size is not None)


def _dims(tensor: Tensor | None) -> Dims:
    if tensor is None or tensor.dims is None:
        raise MixingError("the shape of its input or output is unknown")
    return tensor.dims


def _sampled_axis(dims: Dims, dim: str) -> int:
    """Return the only dimension whose size is known to depend on the number of samples."""
    found = [axis for axis, size in enumerate(dims) if size.exact is not None and mentions(size.exact, dim)]
    if len(found) != 1:
        raise MixingError(_REGROUPS)
    return found[0]


def reshape(step: Step) -> Flow:
    """Reshape, Flatten, Squeeze, Unsqueeze: the elements stay in order."""
    flow = step.flow(0)
    step.size_only(1)
    target = _dims(step.outputs[0])
    if not flow.sampled:
        return _free(step, target)
    source = _dims(step.op.get(0))
    axis = _sampled_axis(target, step.dim)
    if step.flow(1).counted:
        wanted = step.op.values(1, "shape") or (Interval(),)
        if any(step.counts(size.exact) for place, size in enumerate(wanted) if place != axis):
            raise MixingError(_REGROUPS)
    return _relaid(flow, step.batch, source, target, axis)


def _free(step: Step, dims: Dims) -> Flow:
    """Return the flow of a result without samples."""
    if any(step.counts(dim.exact) for dim in dims) and any(flow is not None and flow.counted for flow in step.flows):
        raise MixingError("the size of its output depends on the number of samples")
    return COUNTED if step.flow(0).counted else SHARED


def _relaid(flow: Flow, batch: Poly, source: Dims, target: Dims, axis: int) -> Flow:
    size = target[axis].exact
    inner = flow.inner if flow.inner is not None else flow.size.over(batch)
    found: Poly | None = None
    if size is not None and inner is not None:
        behind, after = _exact(source[flow.axis + 1 :]), _exact(target[axis + 1 :])
        before, ahead = _exact(source[: flow.axis]), _exact(target[:axis])
        if behind is not None and after is not None:
            found = (inner * behind).over(after)
        elif before is not None and before == ahead and flow.size == batch * inner:
            found = size.over(batch)
    if size is None or found is None or not _counts(found) or not _counts(size.over(batch * found)):
        raise MixingError(_REGROUPS)
    return replace(flow.moved(axis, len(target)), size=size, inner=found)


def _counts(poly: Poly | None) -> bool:
    """Return whether a quotient is a whole number."""
    return poly is not None and poly.integral and bool(poly.terms)


def unsqueezed(step: Step) -> Flow:
    """Unsqueeze and Squeeze, whose axes are known even where sizes are not."""
    flow = step.source
    step.share(1)
    axes = step.op.values(1, "axes")
    if axes is None:
        return reshape(step)
    if step.op.node.operator == "Unsqueeze":
        rank = flow.rank + len(axes)
        left = [axis for axis in range(rank) if axis not in axes_of(axes, rank)]
    else:
        rank = flow.rank - len(axes)
        left = [axis for axis in range(flow.rank) if axis not in axes_of(axes, flow.rank)]
        if flow.axis not in left:
            raise MixingError("it drops the dimension of samples")
        return flow.moved(left.index(flow.axis), rank)
    return flow.moved(left[flow.axis], rank)


def transpose(step: Step) -> Flow:
    flow = step.source
    order = step.op.integers("perm", range(flow.rank)[::-1])
    return flow.moved(order.index(flow.axis), flow.rank)


def _uniform(step: Step, dims: Dims, tensor: Tensor | None, source: int) -> Flow:
    """Return the flow of a constant that is repeated for each sample; input ``source`` is the shape."""
    axis = _sampled_axis(dims, step.dim)
    others = [dim for place, dim in enumerate(dims) if place != axis]
    size = dims[axis].exact
    if size is None or not _counts(size.over(step.batch)) or any(_may_count(dim, step, source) for dim in others):
        raise MixingError("the size of its output depends on the number of samples in another way than a batch")
    behind = 0 if tensor is None else len(_dims(tensor)) - len(dims) + axis
    if tensor is not None and behind >= 0 and _dims(tensor)[behind].constant != 1:
        raise MixingError("it gives samples values of certain positions in the batch")
    return Flow(Kind.SAMPLES, axis, len(dims), size, None)


def _may_count(value: Interval, step: Step, *sources: int) -> bool:
    """Return whether a size may depend on the number of samples, given the inputs that it comes from."""
    return any(step.flow(source).counted for source in sources) and step.counts(value.exact)


def expand(step: Step) -> Flow:
    """Expand: a shape of sizes; the input has either samples or one value for all."""
    step.size_only(1)
    flow, output = step.flow(0), step.outputs[0]
    if not flow.sampled:
        if flow.counted or not any(_may_count(dim, step, 1) for dim in _dims(output)):
            return _free(step, _dims(output))
        return _uniform(step, _dims(output), step.op.get(0), 1)
    rank = step.result_rank()
    moved = replace(flow, axis=flow.axis + rank - flow.rank, rank=rank)
    _keep_batch(step, moved)
    return moved.moved(moved.axis, rank) if step.size(0, flow.rank - 1) != _dims(output)[-1].exact else moved


def _keep_batch(step: Step, flow: Flow) -> None:
    """Check that only the dimension of samples depends on their number."""
    dims = _dims(step.outputs[0])
    if dims[flow.axis].exact != flow.size:
        raise MixingError("it repeats samples")
    if any(_may_count(dim, step, 1) for axis, dim in enumerate(dims) if axis != flow.axis):
        raise MixingError("it repeats each sample by their number")


def filled(step: Step) -> Flow:
    """ConstantOfShape."""
    step.size_only(0)
    dims = _dims(step.outputs[0])
    return _uniform(step, dims, None, 0) if any(_may_count(dim, step, 0) for dim in dims) else SHARED


def counted(step: Step) -> Flow:
    """Range: from 0 to the number of samples, each value is the position of a sample."""
    dims = _dims(step.outputs[0])
    step.size_only(0, 1, 2)
    start, by = (step.op[index].scalar.constant for index in (0, 2))
    if start == 0 and by == 1 and dims[0].exact == step.batch:
        return Flow(Kind.SAMPLES, 0, 1, step.batch, ONE, positions=True)
    if any(_may_count(dim, step, 0, 1, 2) for dim in dims):
        raise MixingError("its length depends on the number of samples")
    return COUNTED if any(step.flow(index).counted for index in range(3)) else SHARED


def tile(step: Step) -> Flow:
    """Tile: the batch may be repeated as a whole, and a constant once for each sample."""
    step.size_only(1)
    flow, repeats = step.flow(0), step.op.values(1, "repeats")
    dims = _dims(step.outputs[0])
    if repeats is None:
        raise MixingError("its number of repeats comes from values")
    if flow.sampled:
        if any(_may_count(by, step, 1) for by in repeats) or dims[flow.axis].exact is None:
            raise MixingError("it repeats samples by their number")
        return replace(flow.plain, size=dims[flow.axis].exact or ONE)
    if flow.counted or not any(_may_count(by, step, 1) for by in repeats):
        return _free(step, dims)
    axis = _sampled_axis(dims, step.dim)
    if repeats[axis].exact is None or any(_may_count(dim, step, 1) for at, dim in enumerate(dims) if at != axis):
        raise MixingError(_REGROUPS)
    size, times = dims[axis].exact or ONE, repeats[axis].exact or ONE
    each = size.over(step.batch)
    if not _counts(times.over(step.batch)) or not _counts(each):
        raise MixingError(_REGROUPS)
    return Flow(Kind.SAMPLES, axis, len(dims), size, each)


def concat(step: Step) -> Flow:
    flows = [step.flow(index) for index in range(len(step.flows))]
    rank = next(flow.rank for flow in flows if flow.sampled)
    axis = step.op.axis(rank)
    sampled = [flow for flow in flows if flow.sampled]
    if len(sampled) < len(flows):
        raise MixingError("it joins samples with values of certain positions in the batch")
    if any(flow.plane is not None for flow in sampled):
        raise MixingError(_JOINS)
    first = replace(sampled[0], positions=False, columns=frozenset())
    for flow in sampled[1:]:
        first = first.joined(replace(flow, positions=False, columns=frozenset()))
        if not first.sampled:
            raise MixingError("it joins samples of different dimensions")
    if axis != first.axis:
        return replace(first, columns=_columns(step, flows, axis))
    # Whole batches one after another: samples stay apart, and can be split again.
    if first.inner is None or any(flow.located for flow in flows):
        raise MixingError("it appends samples to others")
    return replace(first, size=product([Poly.of(len(flows)), first.size]))


def _columns(step: Step, flows: Sequence[Flow], axis: int) -> frozenset[int]:
    """Return the places in the last dimension whose values are the positions of samples."""
    found, place = set[int](), 0
    if not any(flow.located for flow in flows):
        return frozenset()
    for index, flow in enumerate(flows):
        width = step.size(index, axis)
        if axis != flow.rank - 1 or width is None or width.constant is None:
            raise MixingError(_JOINS)
        if flow.positions:
            found.update(range(place, place + int(width.constant)))
        found.update(place + column for column in flow.columns)
        place += int(width.constant)
    return frozenset(found)


def split(step: Step) -> list[Flow]:
    flow = step.source
    if step.op.axis(flow.rank) != flow.axis:
        step.share(1)
        return [flow.plain] * step.op.outputs
    found, start = [], Interval.exactly(0)
    for tensor in step.outputs:
        size = _dims(tensor)[flow.axis]
        found.append(_cut(step, flow, start, start + size))
        start = start + size
    return found


def slice_(step: Step) -> Flow:
    """Slice; along samples only if it keeps all, or whole batches of several."""
    flow = step.source
    step.size_only(*range(1, len(step.flows)))
    starts, ends = step.op.values(1, "starts"), step.op.values(2, "ends")
    hidden = any(
        step.has(index) and (tensor := step.op.get(index)) is not None and tensor.listed() is None for index in (3, 4)
    )
    if starts is None or ends is None or hidden:
        raise MixingError("it cuts dimensions that come from values")
    axes = step.op.values(3, "axes") or tuple(map(Interval.exactly, range(len(starts))))
    steps = step.op.values(4, "steps") or (Interval.exactly(1),) * len(starts)
    kept = flow
    for start, end, axis, by in zip(starts, ends, axes_of(axes, flow.rank), steps, strict=False):
        if axis != flow.axis:
            if any(_may_count(value, step, 1, 2, 3, 4) for value in (start, end, by)):
                raise MixingError("it cuts each sample by their number")
            continue
        if by.constant != 1:
            raise MixingError("it changes the order of samples, or leaves some out")
        kept = _cut(step, flow, *(_from_start(place, flow.size) for place in (start, end)))
    return kept if kept is flow and flow.positions else kept.plain


def _from_start(place: Interval, size: Poly) -> Interval:
    if place.high is not None and place.high.constant is not None and place.high.constant < 0:
        return place + Interval.exactly(size)
    return place


def _cut(step: Step, flow: Flow, start: Interval, end: Interval) -> Flow:
    """Return the samples from a position to another."""
    first, last = start.exact, end.exact
    if end.constant is not None and flow.size.at_most(int(end.constant)):
        last = flow.size
    if first is None or last is None:
        raise MixingError("it selects samples by their positions")
    if not first.terms and last == flow.size:
        return flow
    whole = step.batch if flow.inner is None else step.batch * flow.inner
    length = last - first
    inside = first.covers(ZERO) and flow.size.covers(last) and length.covers(ONE)
    if not inside or any(part.terms and not _counts(part.over(whole)) for part in (first, length)):
        raise MixingError("it selects samples by their positions")
    return replace(flow.plain, size=length)


def pad(step: Step) -> Flow:
    flow = step.source
    step.share(*range(1, len(step.flows)))
    dims, source = _dims(step.outputs[0]), _dims(step.op.get(0))
    amounts, axes = step.op.values(1, "pads"), step.op.values(3, "axes")
    chosen = list(range(len(source))) if axes is None else axes_of(axes, len(source))
    if amounts is None or len(amounts) != 2 * len(chosen) or len(dims) != len(source):
        raise MixingError("its amount of padding comes from values")
    if flow.axis in chosen:
        place = chosen.index(flow.axis)
        if amounts[place].constant != 0 or amounts[place + len(chosen)].constant != 0:
            raise MixingError("it adds positions to the batch")
    return flow.plain


def resize(step: Step) -> Flow:
    """Resize: samples stay if the size of their dimension is the same."""
    flow = step.source
    step.size_only(*range(1, len(step.flows)))
    for axis, dim in enumerate(_dims(step.outputs[0])):
        if (axis == flow.axis) and dim.exact != flow.size:
            raise MixingError("it resizes the dimension of samples")
        if axis != flow.axis and _may_count(dim, step, 1, 2, 3):
            raise MixingError("it resizes samples by their number")
    return flow.plain


def one_hot(step: Step) -> Flow:
    flow = step.source
    step.share(1, 2)
    axis = step.op.axis(flow.rank + 1, -1)
    return flow.at(flow.axis + (axis <= flow.axis), flow.rank + 1)


def sequence(step: Step) -> Flow:
    """SplitToSequence; the parts of a sequence have one flow, as the samples are whole in each."""
    flow = step.source
    step.share(1)
    if step.op.axis(flow.rank) == flow.axis or not step.op.integer("keepdims", 1):
        raise MixingError("it divides the samples")
    return flow.plain


def part(step: Step) -> Flow:
    """SequenceAt."""
    step.share(1)
    return step.source.plain
