"""The queue itself: entries in lanes, one for each group of those that may share a batch, most urgent first."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush
from typing import Any

from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.latency_model import Latency

# Lanes of which nothing waits, whose recent number in the system is remembered.
_REMEMBERED = 64

Ticket = tuple[int, float, int, Entry]
"""An entry with its place: by priority, then by when it must go, then by arrival."""


class Lane:
    """The entries of one group, most urgent first, and what is known of the group. Counts are in rows."""

    __slots__ = ("cap", "group", "latency", "recent", "rows", "running", "started", "tickets")

    def __init__(self, group: tuple[Any, ...], latency: Latency, cap: int):
        self.group = group
        self.latency = latency
        self.cap = cap
        self.tickets: list[Ticket] = []
        self.rows = 0
        self.running = 0
        self.started = -math.inf  # when the last batch began
        self.recent = 0.0  # how many were lately in the system at once

    def before(self, entry: Entry) -> int:
        """Return how many of these entries go before one of any lane."""
        return bisect_left(self.tickets, entry.ticket)

    def batches(self, entries: int) -> float:
        """Return how many full batches so many of these entries are."""
        return entries / max(1, self.cap * len(self.tickets) // self.rows) if entries else 0


class Lanes:
    """Lanes by group. Taking in, taking out and finding the most urgent cost about as little however many there are."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[Any, ...], Lane] = {}
        self.count = 0
        self.nbytes = 0
        self._quiet: dict[tuple[Any, ...], Lane] = {}
        self._heads: list[tuple[int, float, int, Lane]] = []  # some are of entries that are first no more
        self._order = itertools.count()

    def find(self, group: tuple[Any, ...]) -> Lane | None:
        """Return a group's lane; None if it is not remembered."""
        return self.waiting.get(group) or self._quiet.get(group)

    def number(self, entry: Entry, due: float) -> None:
        """Give an entry its place: behind those of its priority that are to go before ``due``."""
        entry.ticket = (-entry.priority, due, next(self._order))

    def put(self, lane: Lane, entry: Entry) -> None:
        """Take an entry that has a number into its lane."""
        tickets = lane.tickets
        ticket = (*entry.ticket, entry)
        if not tickets:
            self._quiet.pop(lane.group, None)
            self.waiting[lane.group] = lane
        if not tickets or ticket > tickets[-1]:
            tickets.append(ticket)
        else:
            insort(tickets, ticket)
        entry.waiting = True
        lane.rows += entry.rows
        self.count += 1
        self.nbytes += entry.nbytes
        if tickets[0] is ticket:
            self._put_head(lane)

    def first(self) -> Lane | None:
        """Return the lane whose first entry is the most urgent of all."""
        heads = self._heads
        while heads:
            _, _, number, lane = heads[0]
            if lane.tickets and lane.tickets[0][2] == number:
                return lane
            heappop(heads)
        return None

    def remove(self, entry: Entry) -> None:
        """Take one entry out, wherever it stands."""
        lane = self.waiting[entry.group]
        place = lane.before(entry)
        self._remove(lane, place, place + 1)
        if not place:
            self._changed(lane)

    def remove_first(self, lane: Lane, count: int) -> None:
        """Take the first entries of a lane out."""
        self._remove(lane, 0, count)
        self._changed(lane)

    def _remove(self, lane: Lane, start: int, stop: int) -> None:
        rows = nbytes = 0
        for _, _, _, entry in lane.tickets[start:stop]:
            entry.waiting = False
            rows += entry.rows
            nbytes += entry.nbytes
        del lane.tickets[start:stop]
        lane.rows -= rows
        self.count -= stop - start
        self.nbytes -= nbytes

    def _changed(self, lane: Lane) -> None:
        """Note that a lane has another first entry, or none."""
        if lane.tickets:
            self._put_head(lane)
            return
        del self.waiting[lane.group]
        if len(self._quiet) >= _REMEMBERED:
            del self._quiet[next(iter(self._quiet))]
        self._quiet[lane.group] = lane

    def _put_head(self, lane: Lane) -> None:
        if len(self._heads) <= 2 * len(self.waiting) + _REMEMBERED:
            heappush(self._heads, (*lane.tickets[0][:3], lane))
            return
        self._heads = [(*lane.tickets[0][:3], lane) for lane in self.waiting.values()]
        heapify(self._heads)
