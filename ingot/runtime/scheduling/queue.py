"""The queue: a sub-queue per group of entries that may share a batch, most urgent first, and the clients' shares."""

from __future__ import annotations

import itertools
import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from operator import attrgetter
from typing import Any, Final

from ingot.errors import Unavailable
from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.scheduling.limits import Limits

# Number of empty groups whose recent load is remembered.
_REMEMBERED: Final = 64
# Number of groups that are searched for an entry that has waited long, and of clients that are compared.
_INSPECTED: Final = 64
# Clients without entries whose share is remembered, so that it does not start again with each request.
_REMEMBERED_CLIENTS: Final = 1024
# Entries of a client that are inspected to find one of a given group.
_SEARCHED: Final = 16
# A client may use this multiple of the free room in the queue: seven eighths of the queue if it is alone.
_TIMES_FREE: Final = 7

_place = attrgetter("place")


class GroupQueue:
    """The waiting entries of one group, most urgent first, and the group's state.

    ``most``, ``samples``, ``running`` and ``recent`` count samples; ``latency``, ``cap`` and ``work`` are in units of
    work, which are samples too unless these differ in size.
    """

    __slots__ = (
        "cap",
        "entries",
        "key",
        "latency",
        "most",
        "passed",
        "recent",
        "running",
        "samples",
        "started",
        "work",
    )

    def __init__(self, key: tuple[Any, ...], latency: Latency, cap: int, most: int = sys.maxsize):
        self.key = key
        self.latency = latency
        self.cap = cap
        self.most = most  # samples of a batch, by the memory that its entries need
        self.entries: list[Entry] = []
        self.samples = 0
        self.work = 0  # of the waiting entries, without padding of one to another
        self.running = 0
        self.started = -math.inf  # when the last batch began
        self.recent = 0.0  # decaying maximum of samples queued and running at once
        self.passed = 0  # number of the entry that the last batch has passed over; entries count from 1

    def before(self, entry: Entry) -> int:
        """Return how many of these entries precede the latest one, which is not in a queue yet."""
        entries = self.entries
        if not entries or _follows(entry, entries[-1]):
            return len(entries)
        return bisect_left(entries, entry.place, key=_place)

    def batches(self, entries: int) -> float:
        """Return how many full batches ``entries`` of these entries make."""
        return entries / max(1, self.cap * len(self.entries) // self.work) if entries else 0


class Client:
    """The waiting entries of one client, most urgent first.

    ``served`` is its share so far: the seconds of engine time that it has received, counted from the virtual time at
    which it joined; see :class:`Clients`. ``allowed`` is the time that its last request with a deadline allowed, in
    seconds, and ``seen`` when that arrived.
    """

    __slots__ = ("allowed", "entries", "samples", "seen", "served")

    def __init__(self) -> None:
        self.served = 0.0
        self.allowed = math.inf
        self.seen = -math.inf
        self.entries: list[Entry] = []
        self.samples = 0


def _follows(latest: Entry, entry: Entry) -> bool:
    """Return whether the latest entry is due after another one."""
    return latest.due >= entry.due and latest.priority <= entry.priority


def _insert(entries: list[Entry], entry: Entry) -> None:
    """Insert the latest entry into a queue that is not empty, mostly as its last."""
    if _follows(entry, entries[-1]):
        entries.append(entry)
    else:
        insort(entries, entry, key=_place)


class Clients:
    """The clients with waiting entries.

    While each has only a few samples waiting, all are served in the order of their entries. Otherwise the next entry is
    the most urgent one of the client that has received the least engine time. A client that joins starts at the virtual
    time, the least share of those that wait, so that it neither makes up for its absence nor waits for the backlog of
    others (start-time fair queueing, Goyal, Vin and Cheng 1996, https://doi.org/10.1145/248157.248171).

    Args:
        few: samples that a client may have waiting before its share is considered.
    """

    def __init__(self, few: int):
        self._known: dict[Hashable, Client] = {}
        self._waiting: dict[Hashable, Client] = {}  # those with entries
        self._hurried: dict[Hashable, Client] = {}  # those whose requests have deadlines, the latest last
        self._few = few
        self._many = 0  # clients with more than `few` samples
        self._virtual = 0.0
        self._reserved: dict[Hashable, int] = {}

    @property
    def backlog(self) -> bool:
        """Whether a client has more than a few samples waiting."""
        return self._many > 0

    @property
    def uneven(self) -> bool:
        """Whether the next entry depends on the clients' shares."""
        return self._many > 0 and len(self._waiting) > 1

    def held(self, key: Hashable) -> tuple[int, int]:
        """Return how many entries of a client wait, and the bytes that it holds, with those that are reserved."""
        client = self._known.get(key)
        entries = [] if client is None else client.entries
        return len(entries), self._reserved.get(key, 0) + sum(entry.nbytes for entry in entries)

    def reserve(self, key: Hashable, nbytes: int) -> None:
        """Reserve bytes for parts of a client's request that are to be queued later, or release them if negative."""
        left = self._reserved.get(key, 0) + nbytes
        if left > 0:
            self._reserved[key] = left
        else:
            self._reserved.pop(key, None)

    def put(self, entry: Entry) -> None:
        """Add a waiting entry."""
        client = self._known.get(entry.client)
        if client is None:
            client = self._join(entry.client)
        if client.entries:
            _insert(client.entries, entry)
        else:
            client.entries.append(entry)
            self._waiting[entry.client] = client
            if client.served < self._virtual:
                client.served = self._virtual
        before = client.samples
        client.samples = after = before + entry.samples
        if before <= self._few < after:
            self._many += 1

    def remove(self, entry: Entry) -> None:
        """Remove an entry that runs, or that is dropped."""
        client = self._known[entry.client]
        entries = client.entries
        del entries[0 if entries[0] is entry else bisect_left(entries, entry.place, key=_place)]
        before = client.samples
        client.samples = after = before - entry.samples
        if after <= self._few < before:
            self._many -= 1
        if not entries:
            del self._waiting[entry.client]

    def expect(self, key: Hashable, allowed: float, now: float) -> None:
        """Record how much time a client's requests allow."""
        client = self._known.get(key) or self._join(key)
        client.allowed, client.seen = allowed, now
        self._hurried.pop(key, None)
        self._hurried[key] = client

    def tightest(self, entry: Entry, since: float) -> float:
        """Return the least time that requests of other clients have allowed since then; of many, of the latest."""
        own, least = self._known.get(entry.client), math.inf
        for client in itertools.islice(reversed(self._hurried.values()), _INSPECTED):
            if client.seen <= since:
                break
            if client is not own:
                least = min(least, client.allowed)
        return least

    def _join(self, key: Hashable) -> Client:
        """Add a client, and forget those without entries if there are many."""
        if len(self._known) >= max(_REMEMBERED_CLIENTS, 2 * len(self._waiting)):
            self._known, self._hurried = dict(self._waiting), {}
        client = self._known[key] = Client()
        return client

    def first(self) -> Entry:
        """Return the most urgent entry of the client with the least share, among those of the highest priority."""
        client = min(self._waiting.values(), key=lambda client: _rank(client.entries[0], client.served))
        self._virtual = max(self._virtual, client.served)
        return client.entries[0]

    def fair(self, group: tuple[Any, ...], seconds: float) -> Iterator[Entry]:
        """Yield the waiting entries of a group in the order in which they are due, at ``seconds`` per unit of work."""
        heads = []
        for order, client in enumerate(self._waiting.values()):
            entries = _of_group(client, group)
            if (entry := next(entries, None)) is not None:
                heads.append((*_rank(entry, client.served), order, entry, entries))
        heapify(heads)
        while heads:
            _, served, _, _, order, first, entries = heads[0]
            yield first
            served += seconds * first.work
            if (entry := next(entries, None)) is None:
                heappop(heads)
            else:
                heapreplace(heads, (*_rank(entry, served), order, entry, entries))

    def charge(self, entry: Entry, seconds: float) -> None:
        """Add time of an entry that waited, and runs now, to its client's share; a forgotten client has none."""
        if (client := self._known.get(entry.client)) is not None:
            client.served += seconds

    def ahead(self, entry: Entry) -> int | None:
        """Return about how many waiting samples run before a new entry: its client's own, and as many of each other.

        Some of the others are inspected, and the rest are extrapolated. Returns None if the order is
        that of the entries.
        """
        own = self._waiting.get(entry.client)
        others = len(self._waiting) - (own is not None)
        if not self._many or not others:
            return None
        before = 0 if own is None else own.samples
        share = before + entry.samples
        some = list(itertools.islice(self._waiting.values(), _INSPECTED))
        found = [min(share, client.samples) for client in some if client is not own]
        return before + sum(found) * others // max(1, len(found))


def _rank(entry: Entry, served: float) -> tuple[int, float, float, int]:
    """Return the sort key of a client's first entry: its priority, the client's share, its place among others."""
    return -entry.priority, served, entry.due, entry.number


def _of_group(client: Client, group: tuple[Any, ...]) -> Iterator[Entry]:
    """Yield a client's entries of a group; a client with entries of many groups is not searched to the end."""
    missed = 0
    for entry in client.entries:
        if entry.group == group:
            yield entry
        else:
            missed += 1
            if missed > _SEARCHED:
                return


class Queue:
    """All groups. Insertion, removal and finding the most urgent entry cost about the same for any number of groups.

    Args:
        few: samples that each of several clients may have waiting before they are served by their shares.
    """

    def __init__(self, few: int) -> None:
        self.clients = Clients(few)
        self.waiting: dict[tuple[Any, ...], GroupQueue] = {}
        self.count = 0
        self.nbytes = 0
        self._quiet: dict[tuple[Any, ...], GroupQueue] = {}
        self._heads: list[tuple[int, float, int, GroupQueue]] = []  # may contain stale entries
        self._numbers = 0
        self._latest: GroupQueue | None = None

    def find(self, key: tuple[Any, ...]) -> GroupQueue | None:
        """Return the group of a key, or None if it is not remembered."""
        latest = self._latest
        if latest is not None and latest.key is key:  # as of most requests; hashing a key costs more
            return latest
        return self.waiting.get(key) or self._quiet.get(key)

    def number(self, entry: Entry, due: float) -> None:
        """Assign an entry its place: after entries of its priority that are due before ``due``."""
        self._numbers += 1
        entry.due = due
        entry.number = self._numbers

    def put(self, group: GroupQueue, entry: Entry) -> None:
        """Insert a numbered entry into its group."""
        entries = group.entries
        if entries:
            _insert(entries, entry)
        else:
            self._quiet.pop(group.key, None)
            self.waiting[group.key] = group
            entries.append(entry)
        self._latest = group
        entry.waiting = True
        self.clients.put(entry)
        group.samples += entry.samples
        group.work += entry.work
        self.count += 1
        self.nbytes += entry.nbytes
        if entries[0] is entry:
            self._put_head(group)

    def first(self) -> GroupQueue | None:
        """Return the group that holds the most urgent entry, or None if the queue is empty."""
        heads = self._heads
        while heads:
            _, _, number, group = heads[0]
            if group.entries and group.entries[0].number == number:
                return group
            heappop(heads)
        return None

    def next(self) -> tuple[GroupQueue, Entry] | None:
        """Return the entry that is due, with its group, or None if the queue is empty."""
        if self.clients.uneven:
            entry = self.clients.first()
            return self.waiting[entry.group], entry
        group = self.first()
        return None if group is None else (group, group.entries[0])

    def aged(self, before: float) -> tuple[GroupQueue, Entry] | None:
        """Return an entry of a low priority that arrived before a time, with its group, or None."""
        found = None
        for group in itertools.islice(self.waiting.values(), _INSPECTED):
            entries = group.entries
            entry = entries[bisect_left(entries, -entries[-1].priority, key=lambda entry: -entry.priority)]
            if entry.arrived < before:
                found, before = (group, entry), entry.arrived
        return found

    def remove(self, entry: Entry) -> None:
        """Remove one entry from any position."""
        group = self.waiting[entry.group]
        place = bisect_left(group.entries, entry.place, key=_place)
        self._remove(group, place, place + 1)
        if not place:
            self._changed(group)

    def remove_first(self, group: GroupQueue, count: int) -> None:
        """Remove the first ``count`` entries of a group."""
        self._remove(group, 0, count)
        self._changed(group)

    def _remove(self, group: GroupQueue, start: int, stop: int) -> None:
        samples = work = nbytes = 0
        for entry in group.entries[start:stop]:
            entry.waiting = False
            self.clients.remove(entry)
            samples += entry.samples
            work += entry.work
            nbytes += entry.nbytes
        del group.entries[start:stop]
        group.samples -= samples
        group.work -= work
        self.count -= stop - start
        self.nbytes -= nbytes

    def _changed(self, group: GroupQueue) -> None:
        """Update the queue after the first entry of a group changed or the group became empty."""
        if group.entries:
            self._put_head(group)
            return
        del self.waiting[group.key]
        if len(self._quiet) >= _REMEMBERED:
            del self._quiet[next(iter(self._quiet))]
        self._quiet[group.key] = group

    def _put_head(self, group: GroupQueue) -> None:
        if len(self._heads) <= 2 * len(self.waiting) + _REMEMBERED:
            heappush(self._heads, (*group.entries[0].place, group))
            return
        self._heads = [(*group.entries[0].place, group) for group in self.waiting.values()]
        heapify(self._heads)


def no_room(
    limits: Limits,
    waiting: int,
    waiting_bytes: int,
    nbytes: int,
    client: Hashable,
    held: Callable[[Hashable], tuple[int, int]],
) -> Unavailable | None:
    """Return why a queue has no room for another request, or None; no client can fill the queue alone.

    Args:
        limits: of the queue.
        waiting: requests in the queue.
        waiting_bytes: their bytes.
        nbytes: bytes of the new request.
        client: who sent the request; None for a request that counts for no client.
        held: returns how many of the requests a client has, and their bytes.

    Returns:
        Unavailable if the queue is full, or the client has its share.
    """
    if waiting >= limits.max_queue or (waiting and waiting_bytes + nbytes > limits.max_queue_bytes):
        return Unavailable(f"the queue is full ({queued(waiting)}); send fewer at once, or try later")
    room, free = _TIMES_FREE * (limits.max_queue - waiting), _TIMES_FREE * (limits.max_queue_bytes - waiting_bytes)
    if client is None or (waiting < room and waiting_bytes + nbytes <= free):
        return None
    entries, size = held(client)
    if not entries or (entries < room and size + nbytes <= free):
        return None
    return Unavailable(
        f"{queued(entries, ' of this client')}, and the rest of the queue is kept for others; send fewer at once, "
        "or try later"
    )


def check_room(
    limits: Limits,
    waiting: int,
    waiting_bytes: int,
    nbytes: int,
    client: Hashable,
    held: Callable[[Hashable], tuple[int, int]],
) -> None:
    """Raise what :func:`no_room` returns, which has the same arguments."""
    if (refusal := no_room(limits, waiting, waiting_bytes, nbytes, client, held)) is not None:
        raise refusal


def queued(requests: int, whose: str = "") -> str:
    """Return how many requests wait, as a clause."""
    return f"1 request{whose} waits" if requests == 1 else f"{requests} requests{whose} wait"
