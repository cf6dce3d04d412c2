"""The guard of batching: requests of some batches run again, each alone, and the answers are compared."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.errors import IngotError
from ingot.faults import rate_limited_logger
from ingot.runtime.gpu.array import TargetedInputs
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Entry, Outcome, size_of
from ingot.tensors import Array, arrays

log = rate_limited_logger(__name__)

# Requests that wait to run again, and the bytes of the inputs and outputs that are copied for one batch.
_MOST_WAITING = 32
_MOST_BYTES = 4 << 20


class Recheck(Entry):
    """A request that ran in a batch and runs again alone; ``answer`` is the one that its client got.

    ``together`` is the number of requests of that batch.
    """

    __slots__ = ("answer", "together")

    answer: Mapping[str, Array]
    together: int


class BatchCheck:
    """Chooses the batches whose requests run again, keeps these until an engine is idle, and compares.

    Args:
        share: of the batches of several requests, from 0 to 1.
        tolerance: the largest error of outputs that rounding explains, as a share of the largest value.
        metrics: where comparisons are counted.
        name: the model's name.
        version: the model's version.
    """

    def __init__(self, share: float, tolerance: float, metrics: Metrics, name: str, version: str):
        self._share, self._tolerance, self._name = share, tolerance, name
        counts = metrics.batch_checks
        self._agreed, self._differed, self._dropped = (
            counts.labels(name, version, result) for result in ("agreed", "differed", "dropped")
        )
        self._due = 0.0
        self._waiting: deque[Recheck] = deque()

    def offer(self, entries: Sequence[Entry], outcomes: Sequence[Outcome]) -> None:
        """Choose whether the requests of a batch run again, before their clients get the answers."""
        if len(entries) < 2:
            return
        self._due += self._share
        if self._due < 1:
            return
        self._due -= 1
        room = _MOST_BYTES
        for entry, outcome in zip(entries, outcomes, strict=True):
            if isinstance(outcome, IngotError) or isinstance(entry.inputs, TargetedInputs):
                continue
            room -= entry.nbytes + sum(map(size_of, outcome.values()))
            if room < 0 or len(self._waiting) == _MOST_WAITING:
                self._dropped.inc()
                continue
            # Inputs may be in memory that the client writes to once it has the answer.
            again = Recheck(_copied(entry.inputs), entry.samples, _ignore, entry.arrived, nbytes=entry.nbytes)
            again.answer, again.together = _copied(outcome), len(entries)
            self._waiting.append(again)

    @property
    def waiting(self) -> bool:
        """Whether requests wait to run again."""
        return bool(self._waiting)

    def take(self) -> Recheck | None:
        """Return a request to run again, or None."""
        return self._waiting.popleft() if self._waiting else None

    def compare(self, again: Recheck, outcome: Outcome) -> None:
        """Compare the answer of a request alone with the one in its batch."""
        if isinstance(outcome, IngotError):
            self._dropped.inc()
            return
        output, error = arrays.worst_error(again.answer, outcome)
        if error <= self._tolerance:
            self._agreed.inc()
            return
        self._differed.inc()
        log.error(
            "model %s: a request alone has another '%s' than in a batch of %d requests, error %.1e, tolerance %.0e: "
            "requests may influence each other; serve it with --max-batch 1, and export it again",
            self._name,
            output,
            again.together,
            error,
            self._tolerance,
        )


def _ignore(_: Outcome) -> None:
    """Reply to no client."""


def _copied(values: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in values.items()}
