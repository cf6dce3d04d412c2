"""Which requests run together, which waits and which is refused: pure policy, without threads, clocks or engines.

Times are seconds of one clock that the caller chooses; the scheduler never reads one.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ingot.errors import DeadlineExceeded, Unavailable
from ingot.report import units
from ingot.runtime.scheduling.entry import Entry
from ingot.runtime.scheduling.latency_model import Latencies, Latency
from ingot.runtime.scheduling.queue import Lane, Lanes

# The longest that an idle engine waits for more rows, as a share of what the fuller batch is expected to take.
LINGER = 0.1
# How many seconds a request is overtaken by such as come later but have less time; more than that none waits its turn,
# within one priority.
PATIENCE = 1.0
# Nothing is refused by an expectation that nothing has confirmed for so many seconds.
_STALE = 1.0
# By how much the number in the system is forgotten from batch to batch.
_DECAY = 0.9
# Of so many requests the time that they have is averaged.
_USUAL = 64
# The longest batch, as a share of that time: who comes just after one has begun waits for its end and then for his own.
# A little more is taken where larger ones are tried: they may take less than they seem to.
_LONGEST, _LONGEST_TRIED = 1 / 2, 5 / 8
# Groups that are looked at to tell how much goes before a request; more are taken to be like these.
_SAMPLE = 16


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


class Scheduler:
    """The queue of one model, from which idle engines pull.

    **Order.** The most urgent entry goes first: by priority, then by deadline, then by arrival. One without a deadline,
    or with a distant one, stands as if it had ``PATIENCE``, so that it is not overtaken for ever; a lower priority is.

    **Batches.** The most urgent entry and those of its group that follow it, up to the size at which the engine is
    fastest by its ``latency``, or less where more would make one of them late, or keep the engine for more than half of
    the time that requests usually have; a little more now and then, to see whether it takes as long as it seems.

    **Waiting.** A request that finds an engine idle runs at once, unless about as many as ran before are likely to
    follow at once and it pays to run them together: then the engine lingers for a small share of the time that the
    batch will take.

    **Refusal.** What cannot be answered in time, with what goes before it, is refused when it comes, or when its turn
    would have come. So is one that has little time left and would make a poor batch of all that wait behind it.

    Args:
        limits: of batches and the queue.
        batching: whether requests may share a batch.
        latency: what a call is expected to take; :meth:`finish` goes on to teach it.
        engines: how many pull.
        row_bytes: of the rows for which ``latency`` was measured; 0 if unknown.

    Attributes:
        wake: when to ask :meth:`take` again, if it gave nothing although entries wait and nothing happens before.
        latencies: what was learnt of rows of several weights, ``latency`` among them.
        late: entries that :meth:`take` took out because their time was up; whoever calls it empties this and answers
            them.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        batching: bool,
        latency: Latency | None = None,
        engines: int = 1,
        row_bytes: float = 0,
    ):
        self.limits = limits
        self.latency = latency or Latency()
        self.batching = batching
        self.wake: float | None = None
        self.late: list[Entry] = []
        self.latencies = Latencies(self.latency, row_bytes)
        self._engines = engines
        self._lanes = Lanes()
        self._running: dict[int, tuple[float, Lane, int]] = {}  # expected end, lane and rows, by the batch's id
        self._allowed = PATIENCE  # how long requests may take, on average
        self._confirmed: float | None = None  # when a batch last ended

    def __len__(self) -> int:
        return self._lanes.count

    @property
    def cap(self) -> int:
        """The rows that a batch has when enough wait."""
        return self._cap_of(self.latency)

    def offer(self, entry: Entry, now: float) -> None:
        """Take an entry in.

        Raises:
            Unavailable: the queue is full, or the answer would come too late.
            DeadlineExceeded: the model itself takes longer than the request has.
        """
        self._check_room(entry.nbytes)
        self._offer(entry, self._lanes.find(entry.group) or self._new_lane(entry), now)

    def offer_large(self, first: Entry, rows: int, nbytes: int, now: float) -> None:
        """Take in the first part of a request whose parts have as many rows, but for the last: all of them ``rows``.

        The bytes of all, ``nbytes``, count as waiting; :meth:`offer_next` takes the other parts.

        Raises:
            Unavailable: as for one entry.
            DeadlineExceeded: the model takes longer for all of them.
        """
        self._check_room(nbytes)
        lane = self._lanes.find(first.group) or self._new_lane(first)
        after = math.ceil(rows / first.rows) - 1
        latency, rounds = lane.latency, after // self._engines
        taken = (rounds * latency(first.rows) + latency(rows - after * first.rows)) * latency.margin
        if taken > first.deadline - now and self._sure(lane, now):
            raise _too_slow(first.deadline - now, taken)
        self._offer(first, lane, now, after)
        self._lanes.nbytes += nbytes - first.nbytes

    def offer_next(self, entry: Entry, now: float, counted: int) -> None:
        """Take in another part of a request that was taken in; so many of its bytes are ``counted`` as waiting."""
        lanes = self._lanes
        lanes.number(entry, now + min(entry.deadline - now, PATIENCE))
        lanes.put(lanes.find(entry.group) or self._new_lane(entry), entry)
        lanes.nbytes -= counted

    def release(self, nbytes: int) -> None:
        """Forget bytes of parts that :meth:`offer_next` will not bring."""
        self._lanes.nbytes -= nbytes

    def _check_room(self, nbytes: int) -> None:
        waiting, limits = self._lanes.count, self.limits
        if waiting >= limits.max_queue or (waiting and self._lanes.nbytes + nbytes > limits.max_queue_bytes):
            raise Unavailable(f"the queue is full ({waiting} requests wait); send fewer at once, or try later")

    def _offer(self, entry: Entry, lane: Lane, now: float, after: int = 0) -> None:
        left = entry.deadline - now
        allowed = left if left < PATIENCE else PATIENCE
        self._lanes.number(entry, now + allowed)
        if left < math.inf:
            self._check_time(entry, lane, now, after)
        self._allowed += (allowed - self._allowed) / _USUAL  # of those that are taken in: no other is in a batch
        self._lanes.put(lane, entry)

    def discard(self, entry: Entry) -> None:
        """Forget an entry whose client has left; one that runs already just loses its reader."""
        entry.done = True
        if entry.waiting:
            self._lanes.remove(entry)
            entry.inputs = {}

    def take(self, now: float) -> list[Entry]:
        """Return the next batch, for an engine that is idle; empty if none is due.

        Sets :attr:`wake`, and adds to :attr:`late`.
        """
        self.wake = None
        while (lane := self._lanes.first()) is not None:
            first = lane.tickets[0][3]
            lane.cap = self._cap_of(lane.latency)
            if self._is_late(first, lane, now) or self._holds_up(first, lane, now):
                self._lanes.remove_first(lane, 1)
                self.late.append(first)
                continue
            if (due := self._due(lane, now)) > now:
                self.wake = due
                return []
            return self._start(lane, now)
        return []

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None:
        """Note that a batch that :meth:`take` returned has run; ``seconds`` None means that it failed."""
        _, lane, rows = self._running.pop(id(batch))
        lane.recent = max(lane.rows + lane.running, _DECAY * lane.recent)
        lane.running -= rows
        self._confirmed = now
        if seconds is not None:
            lane.latency.learn(rows, seconds)

    def expected(self, batch: list[Entry]) -> float:
        """Return what a batch that :meth:`take` returned, and that runs, is expected to take in seconds."""
        _, lane, rows = self._running[id(batch)]
        return lane.latency(rows)

    def _cap_of(self, latency: Latency) -> int:
        if not self.batching:
            return 1
        best = latency.best(self.limits.max_batch)
        allowed = (_LONGEST_TRIED if latency.trying else _LONGEST) * self._allowed / latency.margin
        return best if latency(best) <= allowed else max(1, min(best, latency.within(allowed)))

    def _new_lane(self, entry: Entry) -> Lane:
        latency = self.latencies.of(entry.nbytes / max(entry.rows, 1))
        return Lane(entry.group, latency, self._cap_of(latency))

    def _check_time(self, entry: Entry, lane: Lane, now: float, after: int) -> None:
        """Refuse what cannot be answered in time, with ``after`` other parts of its request behind it."""
        if self._is_hopeless(entry, lane, now):
            raise _too_slow(entry.deadline - now, lane.latency(entry.rows))
        if (self._lanes.count or len(self._running) >= self._engines) and not lane.latency.guessed:
            self._check_queue(entry, lane, now, after)

    def _check_queue(self, entry: Entry, lane: Lane, now: float, after: int) -> None:
        """Refuse what would be late because of what goes before it."""
        latency, left = lane.latency, entry.deadline - now
        cap = max(lane.cap, entry.rows)
        full = latency(cap)
        before = lane.before(entry)
        rows = before * lane.rows // (len(lane.tickets) or 1) + entry.rows
        ahead = self._batches_before(entry, lane) if self._lanes.count > len(lane.tickets) else 0
        batches = ahead + int(lane.batches(before)) + after
        wait = self._wait(batches, full, now)
        # Behind others a batch is likely to be full, and must be, lest the engine fall behind.
        taken = wait + latency(cap if batches else min(cap, rows))
        if before and batches == ahead and rows > (room := self._room(lane, now + wait)):
            taken = max(taken, self._wait(ahead + 1, latency(min(room, rows - entry.rows)), now) + full)
        if full and taken * latency.margin > left:
            why = f"{self._lanes.count} requests wait" if self._lanes.count else "another request runs"
            raise Unavailable(
                f"{why}, so the answer would come later than in the {left:.3g} s that it has; "
                "send fewer at once, try later or allow more time"
            )

    def _room(self, lane: Lane, start: float) -> int:
        """Return how many rows the next batch of a lane has at most, if it starts then: what its first has time for.

        The cap, if the last batch left that one behind, as it is dropped if it holds the others up, or if it never had
        time for a full batch.
        """
        first, latency = lane.tickets[0][3], lane.latency
        if first.arrived < lane.started or not self._had_time(first, latency(lane.cap)):
            return lane.cap
        return max(first.rows, min(lane.cap, latency.within((first.deadline - start) / latency.margin)))

    def _batches_before(self, entry: Entry, own: Lane) -> int:
        """Return how many batches of other groups go before an entry."""
        lanes = self._lanes.waiting
        others = [lane for lane in itertools.islice(lanes.values(), _SAMPLE) if lane is not own]
        found = sum(math.ceil(lane.batches(lane.before(entry))) for lane in others)
        return found * (len(lanes) - bool(own.tickets)) // len(others) if others else 0

    def _wait(self, batches: int, seconds: float, now: float) -> float:
        """Return in how many seconds an engine is free for what comes after ``batches`` that take ``seconds`` each."""
        rounds, place = divmod(batches, self._engines)
        place -= self._engines - len(self._running)
        if place < 0:
            return rounds * seconds
        # One that should have ended is taken to need as long again as it is late.
        left = sorted(abs(end - now) for end, _, _ in self._running.values())
        return left[place] + rounds * seconds

    def _sure(self, lane: Lane, now: float) -> bool:
        """Tell whether what is expected was confirmed lately. Else one entry may show that it is no longer true."""
        if lane.latency.guessed:
            return False
        if self._confirmed is None:
            self._confirmed = now
        return bool(self._running) or now < self._confirmed + _STALE

    def _is_late(self, entry: Entry, lane: Lane, now: float) -> bool:
        return entry.deadline <= now or self._is_hopeless(entry, lane, now)

    def _is_hopeless(self, entry: Entry, lane: Lane, now: float) -> bool:
        """Tell whether an entry would be late if it ran at once.

        An engine for which nothing else waits takes what may just make it. Else calls that were slow for a while would
        be thought slow for long, as nothing would show that they are no more.
        """
        left, taken = entry.deadline - now, lane.latency(entry.rows)
        if taken <= left or not self._sure(lane, now):
            return False
        others = self._lanes.count - entry.waiting
        idle = len(self._running) < self._engines and not others
        return not idle or taken > left * lane.latency.margin

    def _holds_up(self, entry: Entry, lane: Lane, now: float) -> bool:
        """Tell whether an entry that came in good time would now make a poor batch of one that is full without it.

        Else each small batch would make those behind it late in turn, until none is full: one is lost instead of many.
        Half a batch is enough where the entry was left behind by the last one: while it waits, few are taken in.
        """
        latency, left = lane.latency, entry.deadline - now
        without = min(lane.cap, lane.rows - entry.rows)
        if without < lane.cap and (entry.arrived >= lane.started or without < lane.cap / 2):
            return False
        full = latency(without)
        if left >= full or lane.tickets[-1][0] != entry.ticket[0] or not self._had_time(entry, full):
            return False
        rows = max(entry.rows, latency.within(left / latency.margin))
        return rows / latency(rows) < (1 - LINGER) * without / full

    def _had_time(self, entry: Entry, seconds: float) -> bool:
        """Tell whether an entry had time to wait for one batch of so many seconds, when it came, and to run in another.

        Batches of trials may be longer than that, see ``_LONGEST``.
        """
        return entry.deadline - entry.arrived >= 2 * min(seconds, _LONGEST * self._allowed)

    def _due(self, lane: Lane, now: float) -> float:
        """Return until when it is worth waiting for more of this lane's group."""
        expected = min(int(lane.recent) - lane.running, lane.cap)
        if lane.rows >= expected or self._lanes.count > len(lane.tickets):
            return now
        latency = lane.latency
        together = latency(expected)
        linger = min(LINGER * together, latency(lane.rows) + latency(expected - lane.rows) - together)
        if self.limits.max_delay is not None:
            linger = min(linger, self.limits.max_delay)
        first = lane.tickets[0][3]
        latest = first.deadline - together * (1 + LINGER)
        return min(max(self._confirmed or first.arrived, first.arrived) + linger, latest)

    def _start(self, lane: Lane, now: float) -> list[Entry]:
        """Take the first entries of a lane out as a batch that runs."""
        batch: list[Entry] = []
        rows = taken = 0
        deadline, room = math.inf, lane.cap
        for _, _, _, entry in lane.tickets:
            if entry.deadline < deadline:
                fits = min(room, lane.latency.within((entry.deadline - now) / lane.latency.margin))
                if batch and fits < rows + entry.rows:
                    if not self._is_late(entry, lane, now):
                        break
                    self.late.append(entry)
                    taken += 1
                    continue
                deadline, room = entry.deadline, fits
            if batch and rows + entry.rows > room:
                break
            batch.append(entry)
            rows += entry.rows
            taken += 1
        self._lanes.remove_first(lane, taken)
        lane.running += rows
        lane.started = now
        self._running[id(batch)] = (now + lane.latency(rows), lane, rows)
        return batch


def _too_slow(left: float, taken: float) -> DeadlineExceeded:
    has, takes = (units.written(float(f"{max(0.0, seconds):.3g}")) for seconds in (left, taken))
    return DeadlineExceeded(f"the request has {has}, and the model takes {takes}; allow more time")
