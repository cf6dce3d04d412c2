"""Which requests run together, and which waits: pure policy, without threads, clocks or engines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ingot.errors import IngotError, Unavailable
from ingot.tensors import Array, Signature

Outcome = Mapping[str, Array] | IngotError


@dataclass(eq=False)
class Entry:
    """One request that waits for the engine. It carries its own way back."""

    inputs: Mapping[str, Array]
    rows: int
    reply: Callable[[Outcome], None]
    arrived: float
    group: tuple[Any, ...] = ()
    cancelled: bool = False
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(size_of(array) for array in self.inputs.values())


@dataclass(frozen=True)
class Limits:
    """How much one batch and the queue may hold.

    ``max_batch`` is in rows; a single request of more rows runs alone. The queue is bounded in requests and in bytes.
    """

    max_batch: int = 64
    max_queue: int = 4096
    max_queue_bytes: int = 256 << 20


class Scheduler:
    """A first-in, first-out queue from which an idle engine pulls all that fits into one batch.

    There is no timer: a request that finds the engine idle runs at once, and those that arrive while it is busy form
    the next batch. Only requests of one group share a batch, so nothing is ever padded.
    """

    def __init__(self, limits: Limits, *, batching: bool):
        self.limits = limits
        self._batching = batching
        self._queue: deque[Entry] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._queue)

    def offer(self, entry: Entry) -> None:
        """Take an entry in.

        Raises:
            Unavailable: the queue is full.
        """
        if len(self._queue) >= self.limits.max_queue or (
            self._queue and self._bytes + entry.nbytes > self.limits.max_queue_bytes
        ):
            raise Unavailable(f"the queue is full ({len(self._queue)} requests wait); send fewer at once, or try later")
        self._queue.append(entry)
        self._bytes += entry.nbytes

    def discard(self, entry: Entry) -> None:
        """Forget an entry whose client has left; one that runs already just loses its reader."""
        entry.cancelled = True
        try:
            self._queue.remove(entry)
        except ValueError:
            return
        self._bytes -= entry.nbytes

    def take(self) -> list[Entry]:
        """Return the next batch: the oldest entry and those of its group that fit, in order; empty if nothing waits."""
        batch: list[Entry] = []
        passed: list[Entry] = []
        rows = 0
        while self._queue:
            entry = self._queue.popleft()
            if batch and (entry.group != batch[0].group or rows + entry.rows > self.limits.max_batch):
                passed.append(entry)
                continue
            self._bytes -= entry.nbytes
            batch.append(entry)
            rows += entry.rows
            if rows >= self.limits.max_batch or not self._batching:
                break
        self._queue.extendleft(reversed(passed))
        return batch


def size_of(array: Array) -> int:
    """Return the bytes that an array holds; an object array's own count leaves its text out."""
    return array.nbytes + (sum(len(item) for item in array.reshape(-1)) if array.dtype == object else 0)


def group_of(signature: Signature, inputs: Mapping[str, Array]) -> tuple[Any, ...]:
    """Return what must be equal for two requests to share a batch: every size except the batch's.

    An input without a batch axis belongs to the whole batch, so there its very content must be equal.
    """
    axes = signature.batch_axes(signature.inputs)
    return tuple(
        array.shape[: axes[name]] + array.shape[axes[name] + 1 :]
        if name in axes
        else (array.shape, array.tobytes() if array.dtype != object else tuple(array.reshape(-1)))
        for name, array in sorted(inputs.items())
    )
