"""Requests of different sizes in one call: which may wait together, and to which size those of a batch are padded.

Padding costs computation and saves calls. The scheduler chooses the requests of a call by the time of both, see
:mod:`ingot.runtime.scheduling.division`; what calls of several sizes take is first measured when a model is loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ingot.errors import IngotError
from ingot.runtime.engines.engine import Engine
from ingot.runtime.profiling.profile import repeat
from ingot.runtime.scheduling.division import Sizes, Work
from ingot.runtime.scheduling.entry import Entry
from ingot.tensors import Array, Signature
from ingot.tensors.padding import Padder

# Growth factor between the sizes that are timed, and number of timed calls for each.
_LARGER = 8
_CALLS = 4
# Number of elements beyond which a sample is not enlarged further.
_LARGEST = 1 << 16


class PaddingPolicy:
    """The padding of one model.

    Args:
        padder: pads the model's inputs.
        example: sizes of the dimensions that may be padded, of valid inputs.
        rounded: round sizes up, for an engine that compiles code for each shape.

    Attributes:
        work: of samples by these sizes; see :class:`~ingot.runtime.scheduling.division.Work`.
    """

    def __init__(self, padder: Padder, example: Sizes, *, rounded: bool = False):
        self.padder = padder
        self.example = example
        self.work = Work(lambda sizes: padder.target([sizes], rounded=rounded))
        self._rounded = rounded
        self._masked = any(padding.masks for padding in padder.paddings.values())
        self._axes = padder.signature.batch_axes(padder.signature.inputs)

    def group(self, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
        """Return the key that two requests must share to wait for the same batch.

        It contains every size that cannot be padded. An input without a batch axis applies to the whole batch, so its
        content must be equal.
        """
        ones = [1] * len(self.padder.dims)
        return tuple(
            self._own(self.padder.shape(name, array.shape, ones), self._axes[name])
            if name in self._axes
            else (array.shape, array.tobytes() if array.dtype != object else tuple(array.reshape(-1)))
            for name, array in sorted(inputs.items())
        )

    def _own(self, shape: Sequence[int], axis: int) -> tuple[int, ...]:
        return (*shape[:axis], *shape[axis + 1 :])

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
        """Return a batch split into calls: requests that must not be padded are alone."""
        hidden = [entry for entry in entries if self.padder.hidden(entry.inputs)] if self._masked else []
        rest = [entry for entry in entries if entry not in hidden] if hidden else [*entries]
        return [*([rest] if rest else []), *([entry] for entry in hidden)]


def measure(
    engine: Engine, padder: Padder, work: Work, example: Mapping[str, Array], budget: float
) -> dict[int, float]:
    """Return the seconds of calls of one sample by their work.

    The sample is timed as it is, and padded until it takes twice as long or cannot be larger.

    Args:
        engine: the loaded model.
        padder: pads its inputs.
        work: of a sample.
        example: valid inputs.
        budget: seconds; 0 measures nothing.
    """
    signature: Signature = padder.signature
    sample = repeat(signature, example, 1) if signature.batch is not None else dict(example)
    sizes, found, factor = padder.sizes(sample), dict[int, float](), _LARGER
    end = time.perf_counter() + budget
    while budget and not (found and time.perf_counter() > end):
        larger = tuple(_larger(signature, padder, sizes, factor))
        case = padder.pad(sample, larger)
        if work(larger) < 2 * work(sizes):
            break
        try:
            fast, slow = _times(engine, (sample, case), end)
        except IngotError:
            break  # the model rejects the generated inputs
        found |= {work(sizes): min(fast, found.get(work(sizes), fast)), work(larger): slow}
        following = tuple(_larger(signature, padder, sizes, _LARGER * factor))
        if slow >= 2 * fast or following == larger or padder.elements(case) > _LARGEST:
            break
        factor *= _LARGER
    return found


def _larger(signature: Signature, padder: Padder, sizes: Sizes, factor: int) -> Iterator[int]:
    for dim, size in zip(padder.dims, sizes, strict=True):
        yield signature.range(dim).nearest(factor * size)


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
