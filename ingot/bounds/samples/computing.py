"""Operators that compute: the dimensions that an operator combines, which must not hold the samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ingot.bounds.flow import Flow, Kind, MixingError
from ingot.bounds.interval import Interval
from ingot.bounds.poly import ONE, product
from ingot.bounds.samples.step import Step, broadcast
from ingot.tensors import DType

Rule = Callable[[Step], "Flow | list[Flow]"]
Axes = Callable[[Step, int], Iterable[int]]

_CONTRACTS = "it sums over the samples"
_WIDE = frozenset(dtype.onnx for dtype in (DType.INT32, DType.INT64, DType.UINT32, DType.UINT64, DType.FP64))
"""Element types that hold the positions of any batch."""


def elementwise(step: Step) -> Flow:
    return broadcast(step, range(len(step.flows)))


def cast(step: Step) -> Flow:
    """Cast and the like; of a second input only the type counts, which may be too narrow for positions."""
    flow, output = step.flow(0), step.outputs[0]
    exact = output is not None and output.kind in _WIDE
    return flow if exact or not flow.sampled else flow.plain


def apart(axes: Axes, does: str = "it combines the samples") -> Rule:
    """Return a rule for operators that combine the elements along ``axes`` of their first input.

    Further inputs are parameters, which all samples share.
    """

    return lambda step: _apart(step, axes(step, step.source.rank), does)


def _apart(step: Step, axes: Iterable[int], does: str = "it combines the samples") -> Flow:
    flow = step.source
    step.share(*range(1, len(step.flows)))
    if flow.axis in {axis % flow.rank for axis in axes}:
        raise MixingError(does)
    return flow.plain


def one(default: int, name: str = "axis") -> Axes:
    """Return the axis of an attribute."""
    return lambda step, rank: [step.op.axis(rank, default, name)]


def last(count: int) -> Axes:
    return lambda step, rank: range(max(rank - count, 0), rank)


def but_first(step: Step, rank: int) -> Iterable[int]:
    return range(1, rank)


def from_axis(default: int) -> Axes:
    return lambda step, rank: range(step.op.axis(rank, default), rank)


def softmax_axes(step: Step, rank: int) -> Iterable[int]:
    """Before version 13 of ONNX, all dimensions from the axis on are one."""
    if step.op.opset < 13:
        return range(step.op.axis(rank, 1), rank)
    return [step.op.axis(rank, -1)]


def axis_input(step: Step, rank: int) -> Iterable[int]:
    axis = step.op[1].scalar.constant
    if axis is None:
        raise MixingError("its axis comes from values")
    return [int(axis)]


def dft_axes(step: Step, rank: int) -> Iterable[int]:
    if step.op.get(2) is not None:
        axis = step.op[2].scalar.constant
        if axis is None:
            raise MixingError("its axis comes from values")
        return [int(axis), rank - 1]
    return [step.op.integer("axis", -2 if step.op.opset >= 20 else 1), rank - 1]


def quantized_axes(step: Step, rank: int) -> Iterable[int]:
    scale = step.op.get(1)
    return [] if scale is not None and scale.length == 1 else [step.op.axis(rank, 1)]


def chosen_axes(default: Sequence[int]) -> Axes:
    return lambda step, rank: step.op.integers("axes", default)


def reduced(step: Step) -> Flow:
    """Reduce operators, ArgMax and ArgMin."""
    flow = step.source
    step.share(1)
    if step.op.node.operator.startswith("Arg"):
        chosen = {step.op.axis(flow.rank)}
    else:
        axes = step.op.values(1, "axes")
        if step.op.given_at(1, "axes") and (axes is None or any(axis.constant is None for axis in axes)):
            raise MixingError("its axes come from values")
        whole = range(0 if step.op.integer("noop_with_empty_axes") else flow.rank)
        chosen = {_constant(axis) % flow.rank for axis in axes} if axes else set(whole)
    if flow.axis in chosen:
        raise MixingError("it reduces over the samples")
    if step.op.integer("keepdims", 1):
        return flow.plain
    return flow.at(flow.axis - sum(axis < flow.axis for axis in chosen), flow.rank - len(chosen))


def _constant(value: Interval) -> int:
    return int(value.constant or 0)


def at_axis(results: int | None = 0, source: int = 0, *, others: Sequence[int] = ()) -> Callable[[Step], list[Flow]]:
    """Return a rule for operators that treat dimension ``source`` of their first input as the batch.

    Args:
        results: the batch's dimension in all outputs.
        source: that in the first input.
        others: inputs that may have samples too, in their first dimension.
    """

    def rule(step: Step) -> list[Flow]:
        found = step.source.plain
        if found.axis != source:
            raise MixingError("it combines the dimension that holds the samples")
        for index in range(1, len(step.flows)):
            flow = step.flow(index)
            if index not in others:
                step.share(index)
            elif flow.sampled and (flow.axis or not found.joined(flow.at(source, found.rank)).sampled):
                raise MixingError("it combines samples in different orders")
            elif not flow.sampled and step.has(index):
                step.share(index)
                if step.rank(index) and step.size(index, 0) != ONE:
                    raise MixingError("it combines samples with values of certain positions in the batch")
        return [found.at(results or 0, _rank(step, index, found.rank)) for index in range(step.op.outputs)]

    return rule


def _rank(step: Step, index: int, default: int) -> int:
    tensor = step.outputs[index]
    return default if tensor is None or tensor.dims is None else len(tensor.dims)


def convolution(step: Step) -> list[Flow]:
    return at_axis()(step)


def pool(step: Step) -> list[Flow]:
    flow = _apart(step, range(2, step.source.rank))
    sizes = [step.size(0, axis) for axis in range(2, flow.rank)]
    known = [size for size in sizes if size is not None and not step.counts(size)]
    indices = Flow(Kind.MIXED, reason=f"{step.op.node}: its indices count from the first sample")
    if len(known) == len(sizes):
        indices = replace(flow, plane=product(known))
    return [flow, indices][: step.op.outputs]


def remainder(step: Step) -> Flow:
    """Mod: of indices that count from the first sample, those within an image."""
    plane = step.flow(0).plane
    # An index of nothing but NaN may be negative, whose remainder has the divisor's sign without fmod only.
    if plane is None or step.op.integer("fmod") or step.flow(1).sampled or step.op[1].scalar.exact != plane:
        return elementwise(step)
    return replace(step.flow(0), plane=None)


def batch_norm(step: Step) -> Flow:
    if step.op.integer("training_mode") or step.op.outputs > 1:
        raise MixingError("it normalizes by statistics of the batch, as in training")
    return _apart(step, [1])


def dropout(step: Step) -> Flow:
    if step.has(2) and (step.op.get(2) is None or step.op[2].scalar.constant != 0):
        raise MixingError("it is random")
    step.share(1)
    return step.source.plain


def refused(why: str) -> Rule:
    """Return a rule for operators that always combine the samples."""

    def rule(step: Step) -> Flow:
        raise MixingError(why)

    return rule


def skip_norm(step: Step) -> Flow:
    flow = broadcast(step, (0, 1))
    step.share(*range(2, len(step.flows)))
    if flow.axis == flow.rank - 1:
        raise MixingError("it normalizes over the samples")
    return flow


def quantized_pair(step: Step) -> Flow:
    step.share(1, 2, 4, 5, 6, 7)
    return broadcast(step, (0, 3))


def reverse_sequence(step: Step) -> Flow:
    flow, lengths = step.source.plain, step.flow(1)
    batch, time = step.op.integer("batch_axis", 1), step.op.integer("time_axis", 0)
    if flow.axis == time % flow.rank:
        raise MixingError("it reverses the samples")
    if flow.axis != batch % flow.rank:
        step.share(1)
    elif not lengths.sampled or not flow.at(0, 1).joined(lengths.plain).sampled:
        raise MixingError("it reverses each sample by a length of a certain position in the batch")
    return flow


def recurrent(step: Step) -> list[Flow]:
    """RNN, GRU and LSTM: [steps, batch, width], or [batch, steps, width] if the attribute ``layout`` is 1."""
    second = not step.op.integer("layout")
    flow = step.source.plain
    if flow.axis != int(second):
        raise MixingError("its steps go from sample to sample")
    step.share(1, 2, 3, 7)
    for index, axis in ((4, 0), (5, int(second)), (6, int(second))):
        found = step.flow(index)
        if not step.has(index):
            continue
        if not found.sampled or not flow.at(axis, found.rank).joined(found.plain).sampled:
            raise MixingError(f"its input {index} has values of certain positions in the batch")
    if not second:
        return [flow.at(0, 4 - (index > 0)) for index in range(step.op.outputs)]
    return [flow.at(2 - (index > 0), 4 - (index > 0)) for index in range(step.op.outputs)]


def matmul(left: int = 0, right: int = 1) -> Rule:
    """Return a rule for products of matrices; inputs other than these two are parameters."""

    def rule(step: Step) -> Flow:
        step.share(*(index for index in range(len(step.flows)) if index not in (left, right)))
        if step.op.integer("transBatchA") or step.op.integer("transBatchB"):
            raise MixingError("this form of the operator is not analysed")
        ranks = [step.rank(left), step.rank(right)]
        whole = max(ranks)
        rank = whole - sum(each == 1 for each in ranks)
        found: Flow | None = None
        for index, own, other, name in ((left, ranks[0], right, "transA"), (right, ranks[1], left, "transB")):
            flow = step.flow(index)
            if not flow.sampled:
                step.share(index)
                continue
            place = flow.axis - own
            if place >= -2 and own > 1 and step.op.integer(name):
                place = -3 - place
            moved = flow.at(_product_axis(step, place, own, whole, rank, first=index == left), rank)
            if place < -2 and not step.flow(other).sampled:
                _check_repeated(step, other, place)
            if found is not None and (place >= -2 or found.axis != moved.axis or not found.joined(moved).sampled):
                raise MixingError("it combines each sample with all others")
            if found is None and place >= -2 and step.flow(other).sampled:
                raise MixingError("it combines each sample with all others")
            found = moved if found is None else found.joined(moved)
        if found is None:
            raise MixingError("no input has samples")
        return found

    return rule


def _product_axis(step: Step, place: int, own: int, whole: int, rank: int, *, first: bool) -> int:
    """Return where the samples are in a product; ``place`` counts from the end of the input."""
    if own == 1 or place == (-1 if first else -2):
        raise MixingError(_CONTRACTS)
    if place < -2:
        return whole + place
    return whole - 2 if first else rank - 1


def _check_repeated(step: Step, index: int, place: int) -> None:
    """Check that an input without samples has one value for all along a dimension, counted from the end."""
    rank = step.rank(index)
    if rank + place >= 0 and step.size(index, rank + place) != ONE:
        raise MixingError("it combines samples with values of certain positions in the batch")


def gemm(step: Step) -> Flow:
    left, right, bias = (step.flow(index) for index in range(3))
    if left.sampled and right.sampled:
        raise MixingError("it combines each sample with all others")
    if left.sampled:
        step.share(1)
        if left.axis != step.op.integer("transA"):
            raise MixingError(_CONTRACTS)
        found = left.at(0, 2)
    elif right.sampled:
        step.share(0)
        if right.axis == step.op.integer("transB"):
            raise MixingError(_CONTRACTS)
        found = right.at(1, 2)
    else:
        raise MixingError("its bias has samples, and its matrices have none")
    if bias.sampled:
        moved = bias.at(bias.axis + 2 - bias.rank, 2)
        if not found.joined(moved).sampled:
            raise MixingError("it combines each sample with all others")
    elif step.has(2):
        step.share(2)
        _check_repeated(step, 2, found.axis - 2)
    return found


def einsum(step: Step) -> Flow:
    left, arrow, right = step.op.text("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow or "." in left or len(terms) != len(step.flows):
        raise MixingError("its equation has an ellipsis or no output")
    letters = set[str]()
    found: Flow | None = None
    for index, term in enumerate(terms):
        flow = step.flow(index)
        if not flow.sampled:
            step.share(index)
            continue
        letters.add(term[flow.axis])
        moved = flow.at(0, 1)
        found = moved if found is None else found.joined(moved)
    if found is None or not found.sampled:
        raise MixingError("it combines samples in different orders")
    letter = letters.pop()
    if letters or any(term.count(letter) > 1 for term in terms):
        raise MixingError("it combines each sample with all others")
    if letter not in right:
        raise MixingError(_CONTRACTS)
    if any(letter in term and not step.flow(index).sampled for index, term in enumerate(terms)):
        raise MixingError("it combines samples with values of certain positions in the batch")
    return found.at(right.index(letter), len(right))


def attention(step: Step) -> list[Flow]:
    """Attention of ONNX: a mask of fewer dimensions than 4 has no batch."""
    mask = step.flow(3)
    if mask.sampled and step.rank(3) < 4:
        raise MixingError("its mask has the samples in another dimension than the first of four")
    others = [1, 2, 4, 5, 6]
    if step.has(3) and step.rank(3) == 4:
        others.append(3)
    return at_axis(others=others)(step)


def crop_axes(step: Step, rank: int) -> Iterable[int]:
    return step.op.integers("axes", range(rank))


def rotary(step: Step) -> list[Flow]:
    """RotaryEmbedding of ONNX: with positions, all samples share the tables of sines and cosines."""
    return at_axis(others=[3] if step.has(3) else [1, 2])(step)


def affine_grid(step: Step) -> Flow:
    flow = step.source.plain
    step.size_only(1)
    sizes = step.op[1].listed() or (Interval(),)
    if step.flow(1).counted and any(step.counts(size.exact) for size in sizes[1:]):
        raise MixingError("its size depends on the number of samples")
    if flow.axis:
        raise MixingError("it combines the dimension that holds the samples")
    return flow.at(0, step.result_rank())
