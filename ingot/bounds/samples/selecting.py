"""Operators that select elements by position: from the same sample, or from data that all samples share."""

from __future__ import annotations

from dataclasses import replace

from ingot.bounds.flow import Flow, MixingError
from ingot.bounds.samples.step import Step

_OTHERS = "each sample selects from all samples"
_PLACE = "it selects samples by their positions"


def gather(step: Step) -> Flow:
    data, index = step.flow(0), step.flow(1)
    rank, places = step.rank(0), step.rank(1)
    axis = step.op.axis(rank)
    if not data.sampled:
        step.share(0)
        return index.at(axis + index.axis, rank - 1 + places)
    data = data.plain
    if not index.sampled:
        step.share(1)
        if axis == data.axis:
            raise MixingError(_PLACE)
        return data.at(data.axis + (places - 1 if axis < data.axis else 0), rank - 1 + places)
    if axis == data.axis and index.positions and data.size == step.batch == index.size:
        return replace(index, positions=False).at(axis + index.axis, rank - 1 + places)
    raise MixingError(_OTHERS)


def uncounted(step: Step) -> bool:
    """Return whether a node selects sizes of a list that do not depend on the number of samples."""
    if step.op.node.operator != "Gather" or not step.flow(0).columns or step.flow(1).counted:
        return False
    index, sizes = step.op[1].listed(), step.op[0].dims
    count = None if sizes is None or len(sizes) != 1 else sizes[0].constant
    if index is None or count is None or any(place.constant is None for place in index):
        return False
    return step.flow(0).columns.isdisjoint(int(place.constant or 0) % int(count) for place in index)


def gather_elements(step: Step) -> Flow:
    data, index = step.flow(0), step.flow(1)
    axis = step.op.axis(step.rank(0))
    if not data.sampled and index.sampled and axis == index.axis:
        step.share(0)
        return index.plain
    return _together(step, (0, 1), axis)


def scatter_elements(step: Step) -> Flow:
    return _together(step, (0, 1, 2), step.op.axis(step.rank(0)))


def _together(step: Step, indices: tuple[int, ...], axis: int) -> Flow:
    """Return the flow of inputs that all have the samples in one dimension, which is not ``axis``."""
    flows = [step.flow(index).plain for index in indices]
    if not all(flow.sampled for flow in flows):
        raise MixingError("it combines samples with values of certain positions in the batch")
    found = flows[0]
    for flow in flows[1:]:
        found = found.joined(flow)
    if not found.sampled or found.axis == axis:
        raise MixingError(_OTHERS)
    return found


def gather_nd(step: Step) -> Flow:
    data, index = step.flow(0), step.flow(1)
    skipped, depth, places = step.op.integer("batch_dims"), _depth(step), step.rank(1)
    rank = places - 1 + step.rank(0) - skipped - depth
    if not data.sampled:
        step.share(0)
        if index.axis < skipped or index.axis == places - 1:
            raise MixingError("it selects values of certain positions in the batch")
        return index.at(index.axis, rank)
    data = data.plain
    if data.axis < skipped:
        if not index.sampled or (index.axis, index.size, index.inner) != (data.axis, data.size, data.inner):
            raise MixingError(_OTHERS)
        return index.at(index.axis, rank)
    if data.axis >= skipped + depth:
        step.share(1)
        return data.at(places - 1 + data.axis - skipped - depth, rank)
    _check_own(step, data, index, data.axis - skipped)
    return replace(index, columns=frozenset(), positions=False).at(index.axis, rank)


def scatter_nd(step: Step) -> Flow:
    data, index, updates = (step.flow(place) for place in range(3))
    if not data.sampled or not updates.sampled:
        raise MixingError("it combines samples with values of certain positions in the batch")
    depth, places = _depth(step), step.rank(1)
    if data.axis >= depth:
        step.share(1)
        wanted = places - 1 + data.axis - depth
    else:
        _check_own(step, data, index, data.axis)
        wanted = index.axis
    found = data.joined(replace(updates, axis=data.axis, rank=data.rank))
    if updates.axis != wanted or not found.sampled:
        raise MixingError(_OTHERS)
    return found.plain


def _depth(step: Step) -> int:
    """Return the number of dimensions that each index selects from."""
    size = step.size(1, step.rank(1) - 1)
    if size is None or size.constant is None:
        raise MixingError("the number of dimensions that it selects from comes from values")
    return int(size.constant)


def _check_own(step: Step, data: Flow, index: Flow, column: int) -> None:
    """Check that each sample selects from itself: the index into the batch is the sample's own position."""
    own = (index.positions and _depth(step) == 1) or index.columns == {column}
    if not index.sampled or not own or not data.size == step.batch == index.size:
        raise MixingError(_OTHERS)


def compress(step: Step) -> Flow:
    step.share(1)
    flow = step.source
    if not step.op.has("axis") or step.op.axis(flow.rank) == flow.axis:
        raise MixingError(_PLACE)
    return flow.plain
