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
from ingot.runtime.scheduling.queue import GroupQueue, Queue

# The longest that an idle engine waits for more samples, as a share of what the fuller batch is expected to take.
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

    ``max_batch`` is in samples; a single entry of more samples runs alone. The queue is bounded in requests and in bytes.
    ``max_delay`` is the longest, in seconds, that an idle engine waits for more samples; None leaves it to the profile.
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
        sample_bytes: of the samples for which ``latency`` was measured; 0 if unknown.

    Attributes:
        wake: when to ask :meth:`take` again, if it gave nothing although entries wait and nothing happens before.
        latencies: what was learnt of samples of several weights, ``latency`` among them.
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
        sample_bytes: float = 0,
    ):
        self.limits = limits
        self.latency = latency or Latency()
        self.batching = batching
        self.wake: float | None = None
        self.late: list[Entry] = []
        self.latencies = Latencies(self.latency, sample_bytes)
        self._engines = engines
        self._queue = Queue()
        self._running: dict[
            int, tuple[float, GroupQueue, int]
        ] = {}  # expected end, group and samples, by the batch's id
        self._allowed = PATIENCE  # how long requests may take, on average
        self._confirmed: float | None = None  # when a batch last ended

    def __len__(self) -> int:
        return self._queue.count

    @property
    def cap(self) -> int:
        """The samples that a batch has when enough wait."""
        return self._cap_of(self.latency)

    def offer(self, entry: Entry, now: float) -> None:
        """Take an entry in.

        Raises:
            Unavailable: the queue is full, or the answer would come too late.
            DeadlineExceeded: the model itself takes longer than the request has.
        """
        self._check_room(entry.nbytes)
        self._offer(entry, self._queue.find(entry.group) or self._new_group(entry), now)

    def offer_large(self, first: Entry, samples: int, nbytes: int, now: float) -> None:
        """Take in the first part of a request whose parts have as many samples, but for the last: all of them ``samples``.

        The bytes of all, ``nbytes``, count as waiting; :meth:`offer_next` takes the other parts.

        Raises:
            Unavailable: as for one entry.
            DeadlineExceeded: the model takes longer for all of them.
        """
        self._check_room(nbytes)
        group = self._queue.find(first.group) or self._new_group(first)
        after = math.ceil(samples / first.samples) - 1
        latency, rounds = group.latency, after // self._engines
        taken = (rounds * latency(first.samples) + latency(samples - after * first.samples)) * latency.margin
        if taken > first.deadline - now and self._sure(group, now):
            raise _too_slow(first.deadline - now, taken)
        self._offer(first, group, now, after)
        self._queue.nbytes += nbytes - first.nbytes

    def offer_next(self, entry: Entry, now: float, counted: int) -> None:
        """Take in another part of a request that was taken in; so many of its bytes are ``counted`` as waiting."""
        queue = self._queue
        queue.number(entry, now + min(entry.deadline - now, PATIENCE))
        queue.put(queue.find(entry.group) or self._new_group(entry), entry)
        queue.nbytes -= counted

    def release(self, nbytes: int) -> None:
        """Forget bytes of parts that :meth:`offer_next` will not bring."""
        self._queue.nbytes -= nbytes

    def _check_room(self, nbytes: int) -> None:
        waiting, limits = self._queue.count, self.limits
        if waiting >= limits.max_queue or (waiting and self._queue.nbytes + nbytes > limits.max_queue_bytes):
            raise Unavailable(f"the queue is full ({waiting} requests wait); send fewer at once, or try later")

    def _offer(self, entry: Entry, group: GroupQueue, now: float, after: int = 0) -> None:
        left = entry.deadline - now
        allowed = left if left < PATIENCE else PATIENCE
        self._queue.number(entry, now + allowed)
        if left < math.inf:
            self._check_time(entry, group, now, after)
        self._allowed += (allowed - self._allowed) / _USUAL  # of those that are taken in: no other is in a batch
        self._queue.put(group, entry)

    def discard(self, entry: Entry) -> None:
        """Forget an entry whose client has left; one that runs already just loses its reader."""
        entry.done = True
        if entry.waiting:
            self._queue.remove(entry)
            entry.inputs = {}

    def take(self, now: float) -> list[Entry]:
        """Return the next batch, for an engine that is idle; empty if none is due.

        Sets :attr:`wake`, and adds to :attr:`late`.
        """
        self.wake = None
        while (group := self._queue.first()) is not None:
            first = group.tickets[0][3]
            group.cap = self._cap_of(group.latency)
            if self._is_late(first, group, now) or self._holds_up(first, group, now):
                self._queue.remove_first(group, 1)
                self.late.append(first)
                continue
            if (due := self._due(group, now)) > now:
                self.wake = due
                return []
            return self._start(group, now)
        return []

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None:
        """Note that a batch that :meth:`take` returned has run; ``seconds`` None means that it failed."""
        _, group, samples = self._running.pop(id(batch))
        group.recent = max(group.samples + group.running, _DECAY * group.recent)
        group.running -= samples
        self._confirmed = now
        if seconds is not None:
            group.latency.learn(samples, seconds)

    def expected(self, batch: list[Entry]) -> float:
        """Return what a batch that :meth:`take` returned, and that runs, is expected to take in seconds."""
        _, group, samples = self._running[id(batch)]
        return group.latency(samples)

    def _cap_of(self, latency: Latency) -> int:
        if not self.batching:
            return 1
        best = latency.best(self.limits.max_batch)
        allowed = (_LONGEST_TRIED if latency.trying else _LONGEST) * self._allowed / latency.margin
        return best if latency(best) <= allowed else max(1, min(best, latency.within(allowed)))

    def _new_group(self, entry: Entry) -> GroupQueue:
        latency = self.latencies.of(entry.nbytes / max(entry.samples, 1))
        return GroupQueue(entry.group, latency, self._cap_of(latency))

    def _check_time(self, entry: Entry, group: GroupQueue, now: float, after: int) -> None:
        """Refuse what cannot be answered in time, with ``after`` other parts of its request behind it."""
        if self._would_be_late(entry, group, now):
            raise _too_slow(entry.deadline - now, group.latency(entry.samples))
        if (self._queue.count or len(self._running) >= self._engines) and not group.latency.guessed:
            self._check_queue(entry, group, now, after)

    def _check_queue(self, entry: Entry, group: GroupQueue, now: float, after: int) -> None:
        """Refuse what would be late because of what goes before it."""
        latency, left = group.latency, entry.deadline - now
        cap = max(group.cap, entry.samples)
        full = latency(cap)
        before = group.before(entry)
        samples = before * group.samples // (len(group.tickets) or 1) + entry.samples
        ahead = self._batches_before(entry, group) if self._queue.count > len(group.tickets) else 0
        batches = ahead + int(group.batches(before)) + after
        wait = self._wait(batches, full, now)
        # Behind others a batch is likely to be full, and must be, lest the engine fall behind.
        taken = wait + latency(cap if batches else min(cap, samples))
        if before and batches == ahead and samples > (room := self._room(group, now + wait)):
            taken = max(taken, self._wait(ahead + 1, latency(min(room, samples - entry.samples)), now) + full)
        if full and taken * latency.margin > left:
            why = f"{self._queue.count} requests wait" if self._queue.count else "another request runs"
            raise Unavailable(
                f"{why}, so the answer would come later than in the {left:.3g} s that it has; "
                "send fewer at once, try later or allow more time"
            )

    def _room(self, group: GroupQueue, start: float) -> int:
        """Return how many samples the next batch of a group has at most, if it starts then: what its first has time for.

        The cap, if the last batch left that one behind, as it is dropped if it holds the others up, or if it never had
        time for a full batch.
        """
        first, latency = group.tickets[0][3], group.latency
        if first.arrived < group.started or not self._had_time(first, latency(group.cap)):
            return group.cap
        return max(first.samples, min(group.cap, latency.within((first.deadline - start) / latency.margin)))

    def _batches_before(self, entry: Entry, own: GroupQueue) -> int:
        """Return how many batches of other groups go before an entry."""
        queue = self._queue.waiting
        others = [group for group in itertools.islice(queue.values(), _SAMPLE) if group is not own]
        found = sum(math.ceil(group.batches(group.before(entry))) for group in others)
        return found * (len(queue) - bool(own.tickets)) // len(others) if others else 0

    def _wait(self, batches: int, seconds: float, now: float) -> float:
        """Return in how many seconds an engine is free for what comes after ``batches`` that take ``seconds`` each."""
        rounds, place = divmod(batches, self._engines)
        place -= self._engines - len(self._running)
        if place < 0:
            return rounds * seconds
        # One that should have ended is taken to need as long again as it is late.
        left = sorted(abs(end - now) for end, _, _ in self._running.values())
        return left[place] + rounds * seconds

    def _sure(self, group: GroupQueue, now: float) -> bool:
        """Tell whether what is expected was confirmed lately. Else one entry may show that it is no longer true."""
        if group.latency.guessed:
            return False
        if self._confirmed is None:
            self._confirmed = now
        return bool(self._running) or now < self._confirmed + _STALE

    def _is_late(self, entry: Entry, group: GroupQueue, now: float) -> bool:
        return entry.deadline <= now or self._would_be_late(entry, group, now)

    def _would_be_late(self, entry: Entry, group: GroupQueue, now: float) -> bool:
        """Tell whether an entry would be late if it ran at once.

        An engine for which nothing else waits takes what may just make it. Else calls that were slow for a while would
        be thought slow for long, as nothing would show that they are no more.
        """
        left, taken = entry.deadline - now, group.latency(entry.samples)
        if taken <= left or not self._sure(group, now):
            return False
        others = self._queue.count - entry.waiting
        idle = len(self._running) < self._engines and not others
        return not idle or taken > left * group.latency.margin

    def _holds_up(self, entry: Entry, group: GroupQueue, now: float) -> bool:
        """Tell whether an entry that came in good time would now make a poor batch of one that is full without it.

        Else each small batch would make those behind it late in turn, until none is full: one is lost instead of many.
        Half a batch is enough where the entry was left behind by the last one: while it waits, few are taken in.
        """
        latency, left = group.latency, entry.deadline - now
        without = min(group.cap, group.samples - entry.samples)
        if without < group.cap and (entry.arrived >= group.started or without < group.cap / 2):
            return False
        full = latency(without)
        if left >= full or group.tickets[-1][0] != entry.ticket[0] or not self._had_time(entry, full):
            return False
        samples = max(entry.samples, latency.within(left / latency.margin))
        return samples / latency(samples) < (1 - LINGER) * without / full

    def _had_time(self, entry: Entry, seconds: float) -> bool:
        """Tell whether an entry had time to wait for one batch of so many seconds, when it came, and to run in another.

        Batches of trials may be longer than that, see ``_LONGEST``.
        """
        return entry.deadline - entry.arrived >= 2 * min(seconds, _LONGEST * self._allowed)

    def _due(self, group: GroupQueue, now: float) -> float:
        """Return until when it is worth waiting for more of this group's group."""
        expected = min(int(group.recent) - group.running, group.cap)
        if group.samples >= expected or self._queue.count > len(group.tickets):
            return now
        latency = group.latency
        together = latency(expected)
        linger = min(LINGER * together, latency(group.samples) + latency(expected - group.samples) - together)
        if self.limits.max_delay is not None:
            linger = min(linger, self.limits.max_delay)
        first = group.tickets[0][3]
        latest = first.deadline - together * (1 + LINGER)
        return min(max(self._confirmed or first.arrived, first.arrived) + linger, latest)

    def _start(self, group: GroupQueue, now: float) -> list[Entry]:
        """Take the first entries of a group out as a batch that runs."""
        batch: list[Entry] = []
        samples = taken = 0
        deadline, room = math.inf, group.cap
        for _, _, _, entry in group.tickets:
            if entry.deadline < deadline:
                fits = min(room, group.latency.within((entry.deadline - now) / group.latency.margin))
                if batch and fits < samples + entry.samples:
                    if not self._is_late(entry, group, now):
                        break
                    self.late.append(entry)
                    taken += 1
                    continue
                deadline, room = entry.deadline, fits
            if batch and samples + entry.samples > room:
                break
            batch.append(entry)
            samples += entry.samples
            taken += 1
        self._queue.remove_first(group, taken)
        group.running += samples
        group.started = now
        self._running[id(batch)] = (now + group.latency(samples), group, samples)
        return batch


def _too_slow(left: float, taken: float) -> DeadlineExceeded:
    has, takes = (units.written(float(f"{max(0.0, seconds):.3g}")) for seconds in (left, taken))
    return DeadlineExceeded(f"the request has {has}, and the model takes {takes}; allow more time")
