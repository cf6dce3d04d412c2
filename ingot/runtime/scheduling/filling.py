"""Choose the entries of a batch: those of one size in their order, or those that are padded to one size."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from ingot.runtime.scheduling.division import Work, divide, joint
from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.limits import LONGEST, PATIENCE, Limits
from ingot.runtime.scheduling.memory_cap import MemoryCap
from ingot.runtime.scheduling.queue import GroupQueue, Queue

# Waiting entries of different sizes among which a batch is chosen.
_WINDOW: Final = 128

Late = Callable[[Entry, GroupQueue, float], bool]
"""Returns whether an entry of a group would be late if it ran at a time."""


class Filled(NamedTuple):
    """A batch that was removed from the queue.

    ``late`` has the entries that were removed since they would be late. ``work`` is that of the batch, with padding.
    ``reason`` says why the batch is not larger; it is empty if no more entries waited.
    """

    batch: list[Entry]
    late: list[Entry]
    work: int
    reason: str


class Filler:
    """Forms batches of the first entries of a queue.

    Args:
        queue: the queue of all groups.
        limits: the limits of batches.
        memory: the most samples for which there is memory.
        work: the work of samples whose sizes may be padded; None if all entries of a group have one size.
    """

    def __init__(self, queue: Queue, limits: Limits, memory: MemoryCap, work: Work | None):
        self._queue = queue
        self._limits = limits
        self._memory = memory
        self._padded = work is not None
        self._work = work or Work()

    def fill(self, group: GroupQueue, first: Entry, now: float, late: Late) -> Filled:
        """Remove ``first`` and entries of its group that are due after it from the queue, as one batch.

        Args:
            group: the group of ``first``.
            first: an entry of the queue.
            now: the time in seconds, on the clock of the entries' deadlines.
            late: decides which entries are removed without being in the batch.
        """
        clients = self._queue.clients
        cap = self._cap_beside(group, first, now) if clients.backlog else group.cap
        fill = self._fill_padded if self._padded else self._fill
        found = fill(group, first, now, cap, late)
        self._remove(group, found)
        return found

    def full(self, group: GroupQueue) -> str:
        """Return the reason of a batch as large as its group allows."""
        most = min(group.most, self._memory.samples)
        return "memory" if group.cap >= most < self._limits.max_batch else "full"

    def _fill(self, group: GroupQueue, first: Entry, now: float, cap: int, late: Late) -> Filled:
        """Choose entries of one size, in the order in which they are due."""
        batch: list[Entry] = []
        dropped: list[Entry] = []
        samples, room, deadline, more = 0, cap, math.inf, False
        for entry in self._in_order(group, first):
            if entry.deadline < deadline:
                fits = min(room, group.latency.within((entry.deadline - now) / group.latency.margin))
                if batch and fits < samples + entry.samples:
                    if not late(entry, group, now):
                        room, more = fits, True
                        break
                    dropped.append(entry)
                    continue
                deadline, room = entry.deadline, fits
            if batch and samples + entry.samples > room:
                more = True
                break
            batch.append(entry)
            samples += entry.samples
        return Filled(batch, dropped, samples, self._reason(group, room < cap) if more or samples >= room else "")

    def _fill_padded(self, group: GroupQueue, first: Entry, now: float, cap: int, late: Late) -> Filled:
        """Choose entries whose sizes may differ."""
        batch: list[Entry] = []
        dropped: list[Entry] = []
        latency, samples, sizes, work = group.latency, 0, first.sizes, 0
        room, most, more = cap, min(self._limits.max_batch, self._memory.samples), False
        for entry in self._choose(group, first, now, cap):
            if entry is not first and late(entry, group, now):
                dropped.append(entry)
                continue
            fits = min(room, latency.within((entry.deadline - now) / latency.margin))
            count, grown = samples + entry.samples, joint(sizes, entry.sizes) if batch else entry.sizes
            load = self._work(grown, count)
            if batch and (load > fits or count > min(most, entry.most)):
                more = True
                continue
            batch.append(entry)
            samples, sizes, work, room, most = count, grown, load, fits, min(most, entry.most)
        group.passed = 0 if first in batch else first.number
        filled = more or work >= room or samples >= most
        return Filled(batch, dropped, work, self._reason(group, room < cap) if filled else "")

    def _reason(self, group: GroupQueue, limited_by_deadline: bool) -> str:
        return "deadline" if limited_by_deadline else self.full(group)

    def _choose(self, group: GroupQueue, first: Entry, now: float, cap: int) -> list[Entry]:
        """Return the entries of the call that runs next, in the order in which they are due.

        The call with the least time per entry runs before that of ``first`` if ``first`` then still meets its deadline,
        but passes it over only once.
        """
        waiting = list(itertools.islice(self._in_order(group, first), _WINDOW))
        latency, work = group.latency, self._work
        most = int(min(self._limits.max_batch, self._memory.samples))
        calls = divide([(entry.sizes, entry.samples) for entry in waiting], work, latency, most, cap)

        def seconds(call: list[int]) -> float:
            sizes = functools.reduce(joint, [waiting[place].sizes for place in call])
            return latency(work(sizes, sum(waiting[place].samples for place in call)))

        chosen = own = next(call for call in calls if call[0] == 0)
        if first is group.entries[0] and group.passed != first.number and not self._queue.clients.uneven:
            short = min(calls, key=lambda call: seconds(call) / len(call))
            equal = all(waiting[place].priority == first.priority for place in short)
            if equal and now + (seconds(short) + seconds(own)) * latency.margin < first.deadline:
                chosen = short
        return [waiting[place] for place in chosen]

    def _cap_beside(self, group: GroupQueue, first: Entry, now: float) -> int:
        """Return the most work of a batch while a client has a backlog.

        The batch ends early enough for requests of other clients to meet their deadlines, unless it would then have
        less than half of the best throughput.
        """
        allowed = self._queue.clients.tightest(first, now - PATIENCE)
        if allowed == math.inf:
            return group.cap
        latency, cap = group.latency, group.cap
        room = max(1, min(cap, latency.within(LONGEST * allowed / latency.margin)))
        while room < cap and room / latency(room) < cap / latency(cap) / 2:
            room = min(cap, 2 * room)
        return room

    def _in_order(self, group: GroupQueue, first: Entry) -> Iterable[Entry]:
        """Return ``first`` and the other entries of its group, in the order in which they are due."""
        others: Iterable[Entry] = group.entries
        if self._queue.clients.uneven:
            others = self._queue.clients.fair(group.key, group.latency(group.cap) / group.cap)
        elif group.entries[0] is first:
            return others
        return itertools.chain([first], filter(lambda entry: entry is not first, others))

    def _remove(self, group: GroupQueue, filled: Filled) -> None:
        """Remove a batch and the late entries from the queue, and charge the time of the batch to its clients."""
        batch, late = filled.batch, filled.late
        clients = self._queue.clients
        if clients.uneven:
            seconds = group.latency(filled.work) / max(sum(entry.work for entry in batch), 1)
            for entry in batch:
                clients.charge(entry, seconds * entry.work)
        elif not self._padded:
            taken = len(batch) + len(late)
            # Usually the entries are the first of their group, and are removed together.
            if group.entries[taken - 1] in (batch[-1], late[-1] if late else None):
                self._queue.remove_first(group, taken)
                return
        for entry in (*batch, *late):
            self._queue.remove(entry)
