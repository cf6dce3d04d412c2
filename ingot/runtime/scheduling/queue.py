"""The queue: one sub-queue per group of entries that may share a batch, most urgent entry first."""

from __future__ import annotations

import itertools
import math
import sys
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import Any

from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.latency_model import Latency

# Number of empty groups whose recent load is remembered.
_REMEMBERED = 64

Ticket = tuple[int, float, int, Entry]
"""An entry with its sort key: priority, then the time at which it must start, then arrival."""


class GroupQueue:
    """The waiting entries of one group, most urgent first, and the group's state. Counts are in samples."""

    __slots__ = ("cap", "key", "latency", "most", "recent", "running", "samples", "started", "tickets")

    def __init__(self, key: tuple[Any, ...], latency: Latency, cap: int, most: int = sys.maxsize):
        self.key = key
        self.latency = latency
        self.cap = cap
        self.most = most  # samples of a batch, by the memory that its entries need
        self.tickets: list[Ticket] = []
        self.samples = 0
        self.running = 0
        self.started = -math.inf  # when the last batch began
        self.recent = 0.0  # decaying maximum of samples queued and running at once

    def before(self, entry: Entry) -> int:
        """Return how many of these entries precede ``entry``, which may belong to another group."""
        return bisect_left(self.tickets, entry.ticket)

    def batches(self, entries: int) -> float:
        """Return how many full batches ``entries`` of these entries make."""
        return entries / max(1, self.cap * len(self.tickets) // self.samples) if entries else 0


class Queue:
    """All groups. Insertion, removal and finding the most urgent entry cost about the same for any number of groups."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[Any, ...], GroupQueue] = {}
        self.count = 0
        self.nbytes = 0
        self._quiet: dict[tuple[Any, ...], GroupQueue] = {}
        self._heads: list[tuple[int, float, int, GroupQueue]] = []  # may contain stale entries
        self._order = itertools.count()

    def find(self, key: tuple[Any, ...]) -> GroupQueue | None:
        """Return the group of a key, or None if it is not remembered."""
        return self.waiting.get(key) or self._quiet.get(key)

    def number(self, entry: Entry, due: float) -> None:
        """Assign an entry its place: after entries of its priority that are due before ``due``."""
        entry.ticket = (-entry.priority, due, next(self._order))

    def put(self, group: GroupQueue, entry: Entry) -> None:
        """Insert a numbered entry into its group."""
        tickets = group.tickets
        ticket = (*entry.ticket, entry)
        if not tickets:
            self._quiet.pop(group.key, None)
            self.waiting[group.key] = group
        if not tickets or ticket > tickets[-1]:
            tickets.append(ticket)
        else:
            insort(tickets, ticket)
        entry.waiting = True
        group.samples += entry.samples
        self.count += 1
        self.nbytes += entry.nbytes
        if tickets[0] is ticket:
            self._put_head(group)

    def first(self) -> GroupQueue | None:
        """Return the group that holds the most urgent entry, or None if the queue is empty."""
        heads = self._heads
        while heads:
            _, _, number, group = heads[0]
            if group.tickets and group.tickets[0][2] == number:
                return group
            heappop(heads)
        return None

    def remove(self, entry: Entry) -> None:
        """Remove one entry from any position."""
        group = self.waiting[entry.group]
        place = group.before(entry)
        self._remove(group, place, place + 1)
        if not place:
            self._changed(group)

    def remove_first(self, group: GroupQueue, count: int) -> None:
        """Remove the first ``count`` entries of a group."""
        self._remove(group, 0, count)
        self._changed(group)

    def _remove(self, group: GroupQueue, start: int, stop: int) -> None:
        samples = nbytes = 0
        for _, _, _, entry in group.tickets[start:stop]:
            entry.waiting = False
            samples += entry.samples
            nbytes += entry.nbytes
        del group.tickets[start:stop]
        group.samples -= samples
        self.count -= stop - start
        self.nbytes -= nbytes

    def _changed(self, group: GroupQueue) -> None:
        """Update the queue after the first entry of a group changed or the group became empty."""
        if group.tickets:
            self._put_head(group)
            return
        del self.waiting[group.key]
        if len(self._quiet) >= _REMEMBERED:
            del self._quiet[next(iter(self._quiet))]
        self._quiet[group.key] = group

    def _put_head(self, group: GroupQueue) -> None:
        if len(self._heads) <= 2 * len(self.waiting) + _REMEMBERED:
            heappush(self._heads, (*group.tickets[0][:3], group))
            return
        self._heads = [(*group.tickets[0][:3], group) for group in self.waiting.values()]
        heapify(self._heads)
