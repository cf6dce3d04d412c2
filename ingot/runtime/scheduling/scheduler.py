"""Decide which requests run together, wait or are refused: pure policy without threads, clocks or engines.

Times are in seconds of a clock that the caller chooses; the scheduler never reads one.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Final

from ingot.errors import DeadlineExceeded, IngotError, Unavailable
from ingot.report import units
from ingot.runtime.scheduling.division import Sizes, Work, divide
from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.filling import Filler
from ingot.runtime.scheduling.latency_model import Latencies, Latency
from ingot.runtime.scheduling.limits import LONGEST, PATIENCE, Limits
from ingot.runtime.scheduling.memory_cap import MemoryCap
from ingot.runtime.scheduling.queue import GroupQueue, Queue, no_room, queued

# Longest time that an idle engine waits for more samples, as a share of the expected duration of the fuller batch.
LINGER: Final = 0.1
# Seconds after which an unconfirmed latency estimate no longer causes refusals.
_STALE: Final = 1.0
# Decay of the remembered load per batch.
_DECAY: Final = 0.9
# Number of requests over which the allowed time is averaged.
_USUAL: Final = 64
# The longest batch that is tried, as a share of that time: it may turn out faster than expected.
_LONGEST_TRIED: Final = 5 / 8
# One of so many batches begins with an entry of a low priority that has waited for so many seconds, if there is one.
_AGED_EVERY, _AGED = 8, 10.0
# Clients are served by their shares once one of them has more than 1/_FEW of a batch waiting.
_FEW: Final = 4
# Seconds of the server for each part of a request, which padding may cost instead.
_PART_SECONDS: Final = 1e-4
# Number of groups that are inspected to estimate what runs before a request; the rest are extrapolated.
_SAMPLE: Final = 16


REASONS = ("full", "memory", "deadline", "linger", "idle")
"""Why a batch leaves the queue; see :attr:`Scheduler.reason`."""


class Scheduler:
    """The queue of one model, from which idle engines pull batches.

    **Order.** Entries are sorted by priority, then by deadline, then by arrival. An entry without a deadline, or with a
    distant one, is sorted as if its deadline were ``PATIENCE`` seconds away, so that it is not overtaken forever. An
    entry of a low priority that has waited for ten seconds is in one of eight batches.

    **Clients.** If several clients have entries waiting, and one of them more than a quarter of a batch, then the
    client that has received the least engine time is next, with its own entries in their order; see
    :class:`~ingot.runtime.scheduling.queue.Clients`. No client can fill the queue alone.

    **Batches.** A batch is the most urgent entry plus entries of the same group that follow it, up to the batch size
    with the highest throughput according to ``latency``. It is smaller if more samples would make one of them late, or
    would occupy the engine for more than half of the time that requests usually have. Occasionally it is slightly
    larger, to measure whether that still holds. :class:`~ingot.runtime.scheduling.filling.Filler` chooses its entries.

    **Sizes.** Entries that may be padded to one size, such as texts of different lengths, are one group. Their calls
    are measured by their work, which is samples times padded size, and not by samples. The first entries of the queue
    are divided into the calls that take the least time together (see :mod:`ingot.runtime.scheduling.division`), and of
    these the one with the most urgent entry runs. One with less time per entry may run before it, if all have the same
    priority, no client has a backlog while others wait, and the most urgent entry was not passed over before: it is in
    this batch or in the next.

    **Waiting.** A request that finds an idle engine runs at once, unless recent load suggests that more will follow
    immediately and a joint batch pays off. The engine then waits for a small share of the time that the batch takes.
    Of the lanes of a device, one computes and one is next; a further one starts with full batches only, since requests
    would wait there anyway, and in the queue others can join them.

    **Refusal.** A request that cannot meet its deadline behind the current queue is refused on arrival, or when its
    turn comes. So is a request whose remaining time would force a poor batch on everything queued behind it.

    Args:
        limits: of batches and the queue.
        batching: whether requests may share a batch.
        latency: expected duration of a call; :meth:`finish` updates it.
        engines: number of engines that pull batches, lanes counted.
        lanes: how many of them share one device's time; see **Waiting**.
        sample_bytes: size of the samples for which ``latency`` was measured, by unit of work; 0 if unknown.
        work: of samples whose sizes may be padded; None for a model without such dimensions.

    Attributes:
        wake: when to call :meth:`take` again if it returned nothing while entries wait and nothing else happens.
        memory: the most samples for which there is memory.
        latencies: latency models by sample size, ``latency`` among them.
        reason: why the last batch left the queue, one of :data:`REASONS`: it was full; its memory allows no more
            samples (memory); more entries would have been late (deadline); or no more waited, after the engine had
            waited for some (linger), or not (idle).
        late: entries that :meth:`take` removed because their time was up; the caller answers them and clears the list.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        batching: bool,
        latency: Latency | None = None,
        engines: int = 1,
        lanes: int = 1,
        sample_bytes: float = 0,
        work: Work | None = None,
    ):
        self.limits = limits
        self.latency = latency or Latency()
        self.batching = batching
        self.wake: float | None = None
        self.reason = "idle"
        self.late: list[Entry] = []
        self.memory = MemoryCap()
        self._lingered: GroupQueue | None = None  # the one that an idle engine waits for
        self.latencies = Latencies(self.latency, sample_bytes)
        self._engines = engines
        self._lanes = lanes
        self._padded = work is not None
        self._work = work or Work()
        self._queue = Queue(max(1, limits.max_batch // _FEW))
        self._filler = Filler(self._queue, limits, self.memory, work)
        self._started = 1  # batches, counted for those that begin with an entry that has waited long
        self._running: dict[int, tuple[float, GroupQueue, int]] = {}  # expected end, group and work, by id of the batch
        self._allowed = PATIENCE  # average time that requests allow, in seconds
        self._confirmed: float | None = None  # when a batch last ended

    def __len__(self) -> int:
        return self._queue.count

    @property
    def nbytes(self) -> int:
        """The bytes of the inputs that are queued."""
        return self._queue.nbytes

    @property
    def cap(self) -> int:
        """The work of a batch when enough samples wait: its samples, unless they differ in size."""
        return self._cap_of(self.latency, self.memory.samples)

    def offer(self, entry: Entry, now: float, after: int = 0) -> IngotError | None:
        """Add an entry to the queue, or refuse it; ``after`` other parts of its request will follow.

        A refusal is returned, as there may be many of them: to raise one through the callers costs as much as an
        answer.

        Returns:
            Why the entry is refused: Unavailable if the queue is full or the answer would come too late,
            DeadlineExceeded if the model alone takes longer than the request allows. None if it is accepted.
        """
        if (refusal := self._check_room(entry.nbytes, entry.client)) is not None:
            return refusal
        queue = self._queue
        group = queue.find(entry.group) or self._new_group(entry)
        if entry.most < group.most and not entry.sizes:
            group.most = entry.most
        left = entry.deadline - now
        allowed = left if left < PATIENCE else PATIENCE
        queue.number(entry, now + allowed)
        if left < math.inf and (refusal := self._check_time(entry, group, now, after)) is not None:
            return refusal
        self._allowed += (allowed - self._allowed) / _USUAL  # of accepted requests only, since no other is in a batch
        if left < PATIENCE and entry.client is not None:
            queue.clients.expect(entry.client, left, now)
        queue.put(group, entry)
        return None

    def divide(self, sizes: Sequence[Sizes], group: tuple[Any, ...], most: int) -> list[list[int]]:
        """Return the samples of a request, by their positions, in parts that are not padded much.

        The scheduler joins parts to batches, with those of other requests, so a part costs no call, but some of the
        server's time.

        Args:
            sizes: of each sample.
            group: of the request.
            most: samples of a call.
        """
        found = self._queue.find(group)
        latency = self.latency if found is None else found.latency
        most = int(min(self.limits.max_batch, most, self.memory.samples))
        fixed = latency(1) - _PART_SECONDS
        samples = [(each, 1) for each in sizes]
        return divide(samples, self._work, lambda work: latency(work) - fixed, most, self._cap_of(latency, most))

    def offer_large(self, first: Entry, rest: Sequence[int], nbytes: int, now: float) -> IngotError | None:
        """Add the first part of a request, or refuse it; ``rest`` is the work of its other parts.

        All ``nbytes`` bytes count as waiting; :meth:`offer_next` adds the other parts.

        Returns:
            Why it is refused, as for one entry; DeadlineExceeded also if the model takes too long for all parts
            together.
        """
        if (full := self._check_room(nbytes, first.client)) is not None:
            return full
        group = self._queue.find(first.group) or self._new_group(first)
        if first.deadline < math.inf:
            latency, works = group.latency, [first.work, *rest]
            calls = sorted(_joined(works, group.cap) if self._padded else works, reverse=True)
            taken = sum(map(latency, calls[:: self._engines])) * latency.margin
            if taken > first.deadline - now and self._sure(group, now):
                return _too_slow(first.deadline - now, taken)
        refusal = self.offer(first, now, len(rest))
        if refusal is None:
            self._reserve(first.client, nbytes - first.nbytes)
        return refusal

    def offer_next(self, entry: Entry, now: float, counted: int) -> None:
        """Add another part of an accepted request; ``counted`` of its bytes already count as waiting."""
        queue = self._queue
        queue.number(entry, now + min(entry.deadline - now, PATIENCE))
        queue.put(queue.find(entry.group) or self._new_group(entry), entry)
        self._reserve(entry.client, -counted)

    def release(self, nbytes: int, client: Hashable = None) -> None:
        """Release bytes of parts that :meth:`offer_next` will not add."""
        self._reserve(client, -nbytes)

    def _reserve(self, client: Hashable, nbytes: int) -> None:
        self._queue.nbytes += nbytes
        self._queue.clients.reserve(client, nbytes)

    def _check_room(self, nbytes: int, client: Hashable) -> IngotError | None:
        queue = self._queue
        return no_room(self.limits, queue.count, queue.nbytes, nbytes, client, queue.clients.held)

    def keep_engines(self, count: int) -> None:
        """Count only so many engines from now on, since the others cannot run any more."""
        self._engines = max(1, count)

    def discard(self, entry: Entry) -> None:
        """Remove an entry whose client left. If it is running already, its result is dropped."""
        entry.done = True
        if entry.waiting:
            self._queue.remove(entry)
            entry.inputs = {}

    def waiting(self) -> list[Entry]:
        """Return the entries that are queued."""
        return [entry for group in self._queue.waiting.values() for entry in group.entries]

    def wait(self, now: float) -> float:
        """Return in how many seconds an engine is expected to be free for a request that arrives last."""
        batches, seconds = 0, 0.0
        for group in self._queue.waiting.values():
            full = math.ceil(group.batches(len(group.entries)))
            batches += full
            seconds += full * group.latency(group.cap)
        return self._wait(batches, seconds / max(batches, 1), now)

    def take(self, now: float) -> list[Entry]:
        """Return the next batch for an idle engine, or an empty list if none is due.

        Sets :attr:`wake`, and adds to :attr:`late`.
        """
        self.wake = None
        aged = self._started % _AGED_EVERY == 0
        while (found := (aged and self._queue.aged(now - _AGED)) or self._queue.next()) is not None:
            group, first = found
            most = group.most if group.most <= self.memory.samples else min(group.most, self.memory.allowed(now))
            group.cap = self._cap_of(group.latency, most)
            if self._is_late(first, group, now) or self._holds_up(first, group, now):
                self._queue.remove(first)
                self.late.append(first)
                continue
            if group.work < group.cap and self._lanes_are_busy(group):
                return []
            if (due := self._due(group, now)) > now:
                self.wake = due
                self._lingered = group
                return []
            return self._start(group, first, now)
        return []

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None:
        """Record that a batch returned by :meth:`take` has run; ``seconds`` is None if it failed."""
        _, group, work = self._running.pop(id(batch))
        group.recent = max(group.samples + group.running, _DECAY * group.recent)
        group.running -= _samples(batch) if self._padded else work
        self._confirmed = now
        if seconds is not None:
            group.latency.learn(work, seconds)

    def expected(self, batch: list[Entry]) -> float:
        """Return the expected duration of a running batch, in seconds."""
        _, group, work = self._running[id(batch)]
        return group.latency(work)

    def _cap_of(self, latency: Latency, most: float) -> int:
        if not self.batching:
            return 1
        best = latency.best(int(min(self.limits.max_batch, most)) if not self._padded else sys.maxsize)
        allowed = (_LONGEST_TRIED if latency.trying else LONGEST) * self._allowed / latency.margin
        return best if latency(best) <= allowed else max(1, min(best, latency.within(allowed)))

    def _new_group(self, entry: Entry) -> GroupQueue:
        latency = self.latencies.of(entry.nbytes / max(entry.samples * math.prod(entry.sizes), 1))
        most = sys.maxsize if entry.sizes else entry.most
        return GroupQueue(entry.group, latency, self._cap_of(latency, most), most)

    def _check_time(self, entry: Entry, group: GroupQueue, now: float, after: int) -> IngotError | None:
        """Refuse an entry that cannot meet its deadline; ``after`` parts of its request follow it."""
        if self._would_be_late(entry, group, now):
            return _too_slow(entry.deadline - now, group.latency(entry.work))
        if (self._queue.count or len(self._running) >= self._engines) and not group.latency.guessed:
            return self._check_queue(entry, group, now, after)
        return None

    def _check_queue(self, entry: Entry, group: GroupQueue, now: float, after: int) -> Unavailable | None:
        """Refuse an entry that would be late because of the entries queued before it."""
        latency, left = group.latency, entry.deadline - now
        cap = max(group.cap, entry.work)
        full = latency(cap)
        before = self._before(entry, group)
        work = before * group.work // (len(group.entries) or 1) + entry.work
        ahead = self._batches_before(entry, group) if self._queue.count > len(group.entries) else 0
        batches = ahead + int(group.batches(before)) + after
        wait = self._wait(batches, full, now)
        # Behind others a batch is likely to be full, and must be so that the engine keeps up.
        taken = wait + latency(cap if batches else min(cap, work))
        if before and batches == ahead and work > (room := self._room(group, now + wait)):
            taken = max(taken, self._wait(ahead + 1, latency(min(room, work - entry.work)), now) + full)
        return _too_late(self._queue.count, left) if full and taken * latency.margin > left else None

    def _before(self, entry: Entry, group: GroupQueue) -> int:
        """Return how many entries of its group run before a new entry."""
        before = group.before(entry)
        if not before or (ahead := self._queue.clients.ahead(entry)) is None:
            return before
        return min(before, ahead * len(group.entries) // group.samples)

    def _room(self, group: GroupQueue, start: float) -> int:
        """Return the most work that the next batch of a group can hold if it starts at ``start``.

        That is what its first entry has time for. It is the full cap if the last batch left that entry behind, since it
        is then dropped if it delays the others, or if the entry never had time for a full batch.
        """
        first, latency = group.entries[0], group.latency
        if first.arrived < group.started or not self._had_time(first, latency(group.cap)):
            return group.cap
        return max(first.work, min(group.cap, latency.within((first.deadline - start) / latency.margin)))

    def _batches_before(self, entry: Entry, own: GroupQueue) -> int:
        """Return how many batches of other groups run before an entry."""
        queue = self._queue.waiting
        others = [group for group in itertools.islice(queue.values(), _SAMPLE) if group is not own]
        found = sum(math.ceil(group.batches(self._before(entry, group))) for group in others)
        return found * (len(queue) - bool(own.entries)) // len(others) if others else 0

    def _wait(self, batches: int, seconds: float, now: float) -> float:
        """Return in how many seconds an engine is free after ``batches`` batches of ``seconds`` seconds each."""
        rounds, place = divmod(batches, self._engines)
        place -= self._engines - len(self._running)
        if place < 0:
            return rounds * seconds
        # A batch that is overdue is assumed to need as long again as it is late.
        left = sorted(abs(end - now) for end, _, _ in self._running.values())
        return left[place] + rounds * seconds

    def _sure(self, group: GroupQueue, now: float) -> bool:
        """Return whether the latency model was confirmed recently. If not, one entry may run to check it."""
        if group.latency.guessed:
            return False
        if self._confirmed is None:
            self._confirmed = now
        return bool(self._running) or now < self._confirmed + _STALE

    def _is_late(self, entry: Entry, group: GroupQueue, now: float) -> bool:
        return entry.deadline <= now or self._would_be_late(entry, group, now)

    def _would_be_late(self, entry: Entry, group: GroupQueue, now: float) -> bool:
        """Return whether an entry would be late even if it ran at once.

        An engine with nothing else to do accepts entries that may just make it. Otherwise a temporarily slow model
        would be considered slow for long, as no call could show that it has recovered.
        """
        left, taken = entry.deadline - now, group.latency(entry.work)
        if taken <= left or not self._sure(group, now):
            return False
        others = self._queue.count - entry.waiting
        idle = len(self._running) < self._engines and not others
        return not idle or taken > left * group.latency.margin

    def _holds_up(self, entry: Entry, group: GroupQueue, now: float) -> bool:
        """Return whether an entry that arrived in time would now shrink a batch that is full without it.

        Otherwise each small batch would make those behind it late in turn, until no batch is full: one entry is dropped
        instead of many. Half a batch is enough if the last batch left the entry behind, since few requests are accepted
        while it waits.
        """
        latency, left = group.latency, entry.deadline - now
        without = min(group.cap, group.work - entry.work)
        if without < group.cap and (entry.arrived >= group.started or without < group.cap / 2):
            return False
        full = latency(without)
        if left >= full or group.entries[-1].priority != entry.priority or not self._had_time(entry, full):
            return False
        work = max(entry.work, latency.within(left / latency.margin))
        return work / latency(work) < (1 - LINGER) * without / full

    def _had_time(self, entry: Entry, seconds: float) -> bool:
        """Return whether an entry had time, on arrival, to wait for one batch of ``seconds`` and to run in another.

        Trial batches may be longer than that, see ``LONGEST``.
        """
        return entry.deadline - entry.arrived >= 2 * min(seconds, LONGEST * self._allowed)

    def _lanes_are_busy(self, group: GroupQueue) -> bool:
        """Return whether each device has a batch that follows the one it computes, and nothing else waits here."""
        enough = 2 * self._engines // self._lanes
        return self._lanes > 2 and len(self._running) >= enough and self._queue.count == len(group.entries)

    def _due(self, group: GroupQueue, now: float) -> float:
        """Return until when waiting for more entries of this group pays off."""
        expected = min(int(group.recent) - group.running, self.limits.max_batch if self._padded else group.cap)
        if group.samples >= expected or self._queue.count > len(group.entries) or group.work >= group.cap:
            return now
        latency = group.latency
        more = expected * group.work // group.samples  # as those that wait are
        together = latency(more)
        linger = min(LINGER * together, latency(group.work) + latency(more - group.work) - together)
        if self.limits.max_delay is not None:
            linger = min(linger, self.limits.max_delay)
        first = group.entries[0]
        latest = first.deadline - together * (1 + LINGER)
        return min(max(self._confirmed or first.arrived, first.arrived) + linger, latest)

    def _start(self, group: GroupQueue, first: Entry, now: float) -> list[Entry]:
        """Remove entries of a group, ``first`` and those that are due after it, as a batch that now runs."""
        if len(group.entries) == 1:  # as in most batches of a server that is not busy
            batch, work = [first], first.work
            reason = self._filler.full(group) if work >= group.cap else ""
            if self._queue.clients.uneven:
                self._queue.clients.charge(first, group.latency(work))
            self._queue.remove_first(group, 1)
        else:
            batch, late, work, reason = self._filler.fill(group, first, now, self._is_late)
            self.late += late
        self.reason = reason or ("linger" if self._lingered is group else "idle")
        self._lingered = None
        group.running += _samples(batch) if self._padded else work
        group.started = now
        self._started += 1
        self._running[id(batch)] = (now + group.latency(work), group, work)
        return batch


def _samples(batch: Iterable[Entry]) -> int:
    return sum(entry.samples for entry in batch)


def _joined(works: Iterable[int], cap: int) -> list[int]:
    """Return the work of calls of several parts, up to ``cap`` for each."""
    joined = [0]
    for work in works:
        if joined[-1] and joined[-1] + work > cap:
            joined.append(0)
        joined[-1] += work
    return joined


def _too_late(waiting: int, left: float) -> Unavailable:
    why = queued(waiting) if waiting else "another request runs"
    return Unavailable(
        f"{why}, so the answer would take longer than the {_written(left)} that the request allows; "
        "send fewer requests at once, try later or allow more time"
    )


def _too_slow(left: float, taken: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"the request allows {_written(left)}, and the model takes {_written(taken)}; allow more time"
    )


def _written(seconds: float) -> str:
    return _written_once(int(max(0.0, seconds) * 1e6 + 0.5))  # round() costs half of a message


@functools.lru_cache(256)  # many refusals have the same times
def _written_once(microseconds: int) -> str:
    return units.written(float(f"{microseconds / 1e6:.3g}"))
