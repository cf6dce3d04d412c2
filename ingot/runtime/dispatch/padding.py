"""Requests of different sizes in one call: which may wait together, and which of a batch are padded to one size.

Padding costs computation and saves calls. The fixed cost of a call is measured when a model is loaded; see
:func:`measure`. It defines size classes: requests that cost less than a call's fixed part form one class, and above it
each doubling forms another, so that padding never doubles the work of the larger requests. Within a class, requests of
a batch are padded to one size if that costs less than another call.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ingot.errors import IngotError
from ingot.runtime.engines.engine import Engine
from ingot.runtime.profiling.profile import repeat
from ingot.runtime.scheduling.entry import Entry
from ingot.tensors import Array, Signature
from ingot.tensors.padding import Padder, Padding

# Growth factor between the sizes that are timed, and number of timed calls for each.
_LARGER = 8
_CALLS = 4
# Number of elements beyond which a sample is not enlarged further.
_LARGEST = 1 << 16


class PaddingPolicy:
    """The padding decisions for one model.

    Args:
        padder: pads the model's inputs.
        worth: the fixed cost of a call, in elements of padded inputs; None if unknown.
        example: valid inputs, for the sizes that are not padded.
        rounded: round sizes up, for an engine that compiles code for each shape.
    """

    def __init__(self, padder: Padder, worth: float | None, example: Mapping[str, Array], *, rounded: bool = False):
        self.padder = padder
        self.worth = worth
        self._rounded = rounded
        self._masked = any(padding.masks for padding in padder.paddings.values())
        self._axes = padder.signature.batch_axes(padder.signature.inputs)
        first = repeat(padder.signature, example, 1) if padder.signature.batch is not None else example
        sizes = padder.sizes(first)
        unit = [
            padder.elements(first, [1 if at == place else size for at, size in enumerate(sizes)])
            for place in range(len(sizes))
        ]
        self._bases = [max(1.0, (worth or 0.0) / max(elements, 1)) for elements in unit]

    def group(self, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
        """Return the key that two requests must share to wait for the same batch.

        It contains every size that cannot be padded and the classes of those that can. An input without a batch axis
        applies to the whole batch, so its content must be equal.
        """
        classes = tuple(self._class(place, size) for place, size in enumerate(self.padder.sizes(inputs)))
        ones = [1] * len(classes)
        return (
            classes,
            *(
                self._own(self.padder.shape(name, array.shape, ones), self._axes[name])
                if name in self._axes
                else (array.shape, array.tobytes() if array.dtype != object else tuple(array.reshape(-1)))
                for name, array in sorted(inputs.items())
            ),
        )

    def _own(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        return (*shape[:axis], *shape[axis + 1 :])

    def _class(self, place: int, size: int) -> int:
        buckets = self.padder.paddings[self.padder.dims[place]].buckets
        if buckets and size <= buckets[-1]:
            return next(-index for index, bucket in enumerate(buckets, 1) if size <= bucket)
        base = self._bases[place]
        if math.isinf(base) or size <= base:
            return 0
        return math.ceil(math.log2(size / base) - 1e-9)

    def target(self, entries: Iterable[Entry]) -> tuple[int, ...]:
        """Return the sizes to which entries are padded when they run together; one that must not be is alone."""
        entries = list(entries)
        if len(entries) == 1 and self.padder.hidden(entries[0].inputs):
            return self.padder.sizes(entries[0].inputs)
        return self.padder.target({self.padder.sizes(entry.inputs) for entry in entries}, rounded=self._rounded)

    def padded(self, inputs: Mapping[str, Array]) -> dict[str, int]:
        """Return the sizes of named dimensions to which a request is padded when it runs alone."""
        target = self.padder.target({self.padder.sizes(inputs)}, rounded=self._rounded)
        return dict(zip(self.padder.dims, target, strict=True))

    def parts(self, entries: Sequence[Entry]) -> list[list[Entry]]:
        """Return a batch split into the calls of least estimated cost; requests that must not be padded are alone."""
        hidden = [entry for entry in entries if self.padder.hidden(entry.inputs)] if self._masked else []
        if hidden:
            rest = [entry for entry in entries if entry not in hidden]
            return [*(self.parts(rest) if rest else []), *([entry] for entry in hidden)]
        sizes = {entry: self.padder.sizes(entry.inputs) for entry in entries}
        if self.worth is None or len(set(sizes.values())) < 2:
            return [list(entries)]
        ordered = sorted(entries, key=lambda entry: self.padder.elements(entry.inputs) / entry.samples)
        return self._cut(ordered)

    def _cut(self, entries: list[Entry]) -> list[list[Entry]]:
        """Split entries, in ascending order of size, where that saves most; then split both sides again."""
        targets = [self.target(entries[: count + 1]) for count in range(len(entries))]
        samples = 0
        best, saved = 0, self.worth or 0.0
        whole = self._row(entries[-1], targets[-1])
        for place, entry in enumerate(entries[:-1]):
            samples += entry.samples
            gain = samples * (whole - self._row(entry, targets[place]))
            if gain > saved:
                best, saved = place + 1, gain
        return [*self._cut(entries[:best]), *self._cut(entries[best:])] if best else [entries]

    def _row(self, entry: Entry, target: Sequence[int]) -> float:
        return self.padder.elements(entry.inputs, target) / entry.samples


def of(
    engine: Engine, signature: Signature, paddings: Mapping[str, Padding], example: Mapping[str, Array], budget: float
) -> PaddingPolicy:
    """Return the policy of a model; see :func:`measure` for ``example`` and ``budget``."""
    padder = Padder(signature, paddings)
    rounded = engine.capabilities.compiles_shapes
    return PaddingPolicy(padder, measure(engine, padder, example, budget), example, rounded=rounded)


def measure(engine: Engine, padder: Padder, example: Mapping[str, Array], budget: float) -> float | None:
    """Return the fixed cost of a call in elements of padded inputs, or None if it cannot be determined.

    One sample is timed as it is, and padded until it takes twice as long or cannot be larger.

    Args:
        engine: the loaded model.
        padder: pads its inputs.
        example: valid inputs.
        budget: seconds; 0 measures nothing.
    """
    signature: Signature = padder.signature
    sample = repeat(signature, example, 1) if signature.batch is not None else dict(example)
    sizes, small = padder.sizes(sample), padder.elements(sample)
    end = time.perf_counter() + budget
    worth, factor = None, _LARGER
    while budget:
        larger = [signature.range(dim).nearest(factor * size) for dim, size in zip(padder.dims, sizes, strict=True)]
        case = padder.pad(sample, larger)
        large = padder.elements(case)
        if large < 2 * small:
            break
        try:
            fast, slow = _times(engine, (sample, case), end)
        except IngotError:
            break  # the model rejects the generated inputs
        each = (slow - fast) / (large - small)
        worth = max(0.0, fast - each * small) / each if each > 0 else math.inf
        following = [
            signature.range(dim).nearest(_LARGER * factor * size) for dim, size in zip(padder.dims, sizes, strict=True)
        ]
        if slow >= 2 * fast or following == larger or large > _LARGEST or time.perf_counter() > end:
            break
        factor *= _LARGER
    return worth


def _times(engine: Engine, cases: Sequence[Mapping[str, Array]], end: float) -> list[float]:
    """Return the least seconds of a call for each case, measured in turn."""
    times: list[list[float]] = [[] for _ in cases]
    for call in range(_CALLS):
        for case, taken in zip(cases, times, strict=True):
            start = time.perf_counter()
            engine.run(case)
            if call:  # the first may compile or allocate
                taken.append(time.perf_counter() - start)
        if call and time.perf_counter() > end:
            break
    return [min(taken) for taken in times]
