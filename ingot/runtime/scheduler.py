"""Which requests run together, which waits and which is refused: pure policy, without threads, clocks or engines.

Times are seconds of one clock that the caller chooses; the scheduler never reads one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import Any

from ingot.errors import DeadlineExceeded, IngotError, Unavailable
from ingot.runtime.latency import Latency
from ingot.tensors import Array, Signature

Outcome = Mapping[str, Array] | IngotError

# The longest that an idle engine waits for more rows, as a share of what the fuller batch is expected to take.
LINGER = 0.1


@dataclass(eq=False, slots=True)
class Entry:
    """One request that waits for the engine. It carries its own way back.

    ``deadline`` is when its answer is of no more use. A higher ``priority`` goes first.
    """

    inputs: Mapping[str, Array]
    rows: int
    reply: Callable[[Outcome], None]
    arrived: float
    group: tuple[Any, ...] = ()
    deadline: float = math.inf
    priority: int = 0
    nbytes: int = -1
    cancelled: bool = False
    waiting: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            self.nbytes = sum(size_of(array) for array in self.inputs.values())


@dataclass(frozen=True)
class Limits:
    """How much one batch and the queue may hold.

    ``max_batch`` is in rows; a single entry of more rows runs alone. The queue is bounded in requests and in bytes.
    ``max_delay`` is the longest, in seconds, that an idle engine waits for more rows; None leaves it to the profile.
    """

    max_batch: int = 64
    max_queue: int = 4096
    max_queue_bytes: int = 256 << 20
    max_delay: float | None = None


# Most urgent first: by priority, then by deadline, then by arrival.
_Ticket = tuple[int, float, int, Entry]


class Scheduler:
    """The queue of one model, from which idle engines pull.

    A batch is the most urgent entry and those of its group that follow it, up to the size at which the engine is
    fastest by its ``latency``, or less where more would make one of them late. A request that finds an engine idle runs
    at once, unless about as many as ran before are likely to follow at once: then the engine lingers for a small share
    of the time that the batch will take. What cannot be answered in time is refused when it comes, or when its turn
    would have come.

    Args:
        limits: of batches and the queue.
        batching: whether requests may share a batch.
        latency: what a call is expected to take; :meth:`finish` goes on to teach it.
        engines: how many pull.
    """

    def __init__(self, limits: Limits, *, batching: bool, latency: Latency | None = None, engines: int = 1):
        self.limits = limits
        self.latency = latency or Latency()
        self.batching = batching
        self._engines = engines
        self._lanes: dict[tuple[Any, ...], list[_Ticket]] = {}
        self._heads: list[tuple[int, float, int, tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._count = 0
        self._rows = 0
        self._bytes = 0
        self._running: dict[int, tuple[float, int]] = {}  # expected ends and counts of entries, by the batch's id
        self._recent = 0.0  # how many entries were lately in the system at once
        self._idle_since = -math.inf
        self.wake: float | None = None

    def __len__(self) -> int:
        return self._count

    @property
    def cap(self) -> int:
        """The rows that a batch has when enough wait."""
        return self.latency.best(self.limits.max_batch) if self.batching else 1

    def offer(self, entry: Entry, now: float) -> None:
        """Take an entry in.

        Raises:
            Unavailable: the queue is full, or the answer would come too late.
            DeadlineExceeded: the model itself takes longer than the request has.
        """
        if self._count >= self.limits.max_queue or (
            self._count and self._bytes + entry.nbytes > self.limits.max_queue_bytes
        ):
            raise Unavailable(f"the queue is full ({self._count} requests wait); send fewer at once, or try later")
        if entry.deadline < math.inf:
            self._check_time(entry, now)
        number = next(self._order)
        ticket = (-entry.priority, entry.deadline, number, entry)
        lane = self._lanes.get(entry.group)
        if lane is None:
            lane = self._lanes[entry.group] = []
        heappush(lane, ticket)
        if lane[0] is ticket:
            heappush(self._heads, (*ticket[:3], entry.group))
        entry.waiting = True
        self._count += 1
        self._rows += entry.rows
        self._bytes += entry.nbytes

    def _check_time(self, entry: Entry, now: float) -> None:
        left = entry.deadline - now
        alone = self.latency(entry.rows)
        if alone > left:
            raise DeadlineExceeded(f"the request has {left:.3g} s, and the model takes {alone:.3g} s; allow more time")
        if self.delay(now) + alone > left:
            raise Unavailable(
                f"{self._count} requests wait, so the answer would come later than in the {left:.3g} s that it has; "
                "send fewer at once, try later or allow more time"
            )

    def delay(self, now: float) -> float:
        """Return how many seconds a request that comes now is expected to wait for an engine."""
        ends = [end for end, _ in self._running.values()]
        busy = max(0.0, min(ends) - now) if len(ends) >= self._engines else 0.0
        cap = self.cap
        return busy + self._rows / cap * self.latency(cap) / self._engines

    def discard(self, entry: Entry) -> None:
        """Forget an entry whose client has left; one that runs already just loses its reader."""
        entry.cancelled = True
        if entry.waiting:
            self._leave(entry)  # its ticket is passed over when its turn comes

    def take(self, now: float) -> list[Entry]:
        """Return the next batch, for an engine that is idle; empty if none is due.

        If it is empty although entries wait, :attr:`wake` is when to ask again, if nothing happens before. Entries
        whose time is up are answered here.
        """
        self.wake = None
        while (lane := self._next_lane()) is not None:
            if not self._expire(lane, now):
                continue
            cap = self.cap
            if (due := self._due(lane, cap, now)) > now:
                self.wake = due
                return []
            batch = self._fill(lane, cap, now)
            self._recent = max(self._in_system(len(batch)), 0.9 * self._recent)
            rows = sum(entry.rows for entry in batch)
            self._running[id(batch)] = (now + self.latency(rows), len(batch))
            return batch
        return []

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None:
        """Note that a batch that :meth:`take` returned has run; ``seconds`` None means that it failed."""
        del self._running[id(batch)]
        self._idle_since = now
        if seconds is not None:
            self.latency.learn(sum(entry.rows for entry in batch), seconds)

    def _in_system(self, taken: int) -> int:
        return self._count + taken + sum(count for _, count in self._running.values())

    def _next_lane(self) -> list[_Ticket] | None:
        """Return the lane whose first entry is the most urgent of all; it is not empty."""
        while self._heads:
            *key, group = self._heads[0]
            lane = self._lanes.get(group)
            if lane is not None:
                while lane and not lane[0][3].waiting:
                    heappop(lane)
                if lane and [*lane[0][:3]] == key:
                    return lane
                if not lane:
                    del self._lanes[group]
                else:
                    heapreplace(self._heads, (*lane[0][:3], group))
                    continue
            heappop(self._heads)
        return None

    def _expire(self, lane: list[_Ticket], now: float) -> bool:
        """Answer those at the front whose time is up; return whether the first is still worth running."""
        entry = lane[0][3]
        if entry.deadline > now:
            return True
        self._leave(entry)
        entry.reply(DeadlineExceeded("the request's time was up before its turn came"))
        return False

    def _due(self, lane: list[_Ticket], cap: int, now: float) -> float:
        """Return until when it is worth waiting for more of this lane's group."""
        if not self.batching or self._rows >= cap or self._recent < 2:
            return now
        expected = min(int(self._recent) - (self._in_system(0) - self._count), cap)
        if self._count >= expected:
            return now
        linger = LINGER * self.latency(expected)
        if self.limits.max_delay is not None:
            linger = min(linger, self.limits.max_delay)
        first = lane[0][3]
        latest = first.deadline - self.latency(expected) * (1 + LINGER)
        return min(max(self._idle_since, first.arrived) + linger, latest)

    def _fill(self, lane: list[_Ticket], cap: int, now: float) -> list[Entry]:
        batch: list[Entry] = []
        rows = 0
        deadline = math.inf
        while lane:
            entry = lane[0][3]
            if not entry.waiting:
                heappop(lane)
                continue
            if batch and (
                rows + entry.rows > cap or now + self.latency(rows + entry.rows) > min(deadline, entry.deadline)
            ):
                break
            heappop(lane)
            if entry.deadline <= now:
                self._leave(entry)
                entry.reply(DeadlineExceeded("the request's time was up before its turn came"))
                continue
            self._leave(entry)
            batch.append(entry)
            rows += entry.rows
            deadline = min(deadline, entry.deadline)
            if rows >= cap:
                break
        return batch

    def _leave(self, entry: Entry) -> None:
        entry.waiting = False
        self._count -= 1
        self._rows -= entry.rows
        self._bytes -= entry.nbytes


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
