"""The parts of a request that runs in several calls: in its order, or by the size of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ingot.runtime.dispatch.batch_run import samples_of
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.dispatch.signature_check import CheckedInputs
from ingot.runtime.scheduling.division import Sizes
from ingot.runtime.scheduling.entry import Entry, Request
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.tensors import Array, Signature


@dataclass(frozen=True)
class Part:
    """One part of a request.

    ``places`` are the positions of its samples in the request; the others are those of an
    :class:`~ingot.runtime.scheduling.entry.Entry`.
    """

    places: Sequence[int]
    sizes: Sizes
    work: int
    filled: float = 0.0


class PartEntry(Entry):
    """A part that waits for the engine."""

    __slots__ = ("filled",)


def in_order(checked: CheckedInputs) -> list[Part]:
    """Return the parts of a request that is too large for one call."""
    each = max(1, checked.work // checked.samples)
    ranges = [
        range(start, min(start + checked.most, checked.samples)) for start in range(0, checked.samples, checked.most)
    ]
    return [Part(places, checked.sizes, each * len(places)) for places in ranges]


def by_length(
    request: Request, checked: CheckedInputs, padding: PaddingPolicy | None, scheduler: Scheduler
) -> list[Part]:
    """Return the parts of a request whose samples have different lengths; none if it has one, or they are unknown."""
    lengths = request.lengths
    if lengths is None or padding is None or len(checked.sizes) != 1 or checked.samples < 2 or not scheduler.batching:
        return []
    sizes = [(max(1, length),) for length in lengths.tolist()]
    parts = []
    for call in scheduler.divide(sizes, checked.group, checked.most):
        longest = max(sizes[place] for place in call)
        filled = 1 - sum(sizes[place][0] for place in call) / (longest[0] * len(call))
        parts.append(Part(call, longest, padding.work(longest, len(call)), filled))
    return parts


def inputs_of(
    part: Part, inputs: Mapping[str, Array], signature: Signature, padding: PaddingPolicy | None
) -> dict[str, Array]:
    """Return the samples of a part, without the padding that it does not need."""
    if padding is None or isinstance(part.places, range):
        return samples_of(signature, inputs, part.places[0], part.places[-1] + 1)
    axes = signature.batch_axes(signature.inputs)
    return {
        name: array.take(part.places, axes[name]) if name in axes else array
        for name, array in padding.padder.trim(inputs, part.sizes).items()
    }
