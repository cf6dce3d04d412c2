"""A discrete-event simulation of servers: an event loop, a policy, and engines that pull batches from it."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from statistics import mean
from typing import Protocol

from ingot.deploy.capacity.traces import Arrival
from ingot.errors import DeadlineExceeded, IngotError
from ingot.runtime.dispatch.dispatcher import INLINE
from ingot.runtime.scheduling.entry import Entry, Outcome
from ingot.runtime.scheduling.latency_model import Latency

# The variation of calls of one size: the standard deviation of the logarithm of their duration.
NOISE = 0.05


class Policy(Protocol):
    """A batching policy. ``take`` is called when an engine is idle, and again at ``wake``; it adds to ``late``."""

    wake: float | None
    late: list[Entry]

    def offer(self, entry: Entry, now: float) -> IngotError | None: ...

    def take(self, now: float) -> list[Entry]: ...

    def finish(self, batch: list[Entry], now: float, seconds: float | None = None) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Time of a server outside its engines, in seconds.

    Attributes:
        request: CPU time of the event loop for a request, half of it before the request is queued: reading, checking,
            writing.
        wakeup: CPU time of the event loop for a turn with arrivals only, while a call runs in a thread.
        call: CPU time of the event loop for an engine call: forming a batch, waking a thread.
        wire: time of a request that costs the server nothing: the kernel, the network.
    """

    request: float = 0.0
    call: float = 0.0
    wakeup: float = 0.0
    wire: float = 0.0


@dataclass
class Result:
    """The outcome of a trace. Times are in seconds; ``loop`` and ``engine`` are the busy times of both.

    ``wakeups`` counts turns of the event loop in which requests arrived, but no call ended, while a call ran in a
    thread.
    """

    span: float = 0.0
    offered: int = 0
    on_time: int = 0
    latencies: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    loop: float = 0.0
    engine: float = 0.0
    wakeups: int = 0

    @property
    def goodput(self) -> float:
        """Answers in time a second."""
        return self.on_time / self.span

    @property
    def throughput(self) -> float:
        """Answers a second."""
        return len(self.latencies) / self.span

    @property
    def batch(self) -> float:
        return mean(self.batches) if self.batches else 0.0

    def percentile(self, share: float) -> float:
        """Return the latency that this share of the answers does not exceed; 0 if there are none."""
        ranked = sorted(self.latencies)
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))] if ranked else 0.0


@dataclass(frozen=True)
class Loop:
    """A closed loop: each client waits ``think`` seconds after an answer before it sends its next request.

    ``lengths`` are those of the requests, in turn, if they differ.
    """

    clients: int
    think: float
    count: int
    timeout: float = math.inf
    lengths: Sequence[int] = ()


class Events:
    """A queue of actions by time; ``now`` is the time of the action that runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last: dict[Callable[[], None], None] = {}

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, moment: float, action: Callable[[], None]) -> None:
        heappush(self._heap, (moment, next(self._order), action))

    def last(self, action: Callable[[], None]) -> None:
        """Run an action once, after all other actions of the present time, as at the end of an event loop's tick."""
        self._last[action] = None

    def run(self) -> None:
        """Run until nothing is left to do."""
        while self._heap or self._last:
            if self._last and (not self._heap or self._heap[0][0] > self.now):
                actions, self._last = self._last, {}
                for action in actions:
                    action()
                continue
            self.now, _, action = heappop(self._heap)
            action()


@dataclass
class _Call:
    """An engine call: its batch, and when it began and ends."""

    batch: list[Entry]
    began: float
    end: float


class Replica:
    """One server: an event loop with a policy, and its engines.

    Without overhead, the loop takes no time. With overhead, each turn of the loop handles the requests that have
    arrived and the calls that have ended since the last turn, as in the server, and calls shorter than ``INLINE`` run
    in the loop.

    Args:
        events: of the simulation.
        policy: called with the simulated time.
        seconds: duration of a call by number of samples, before noise; or of a batch, if samples differ.
        engines: how many calls run at once.
        overhead: of the event loop.
        shared: whether the loop runs on the cores of the engines, so that its work delays their calls.
        inline: whether short calls run in the loop, if it has overhead.
        noise: see ``NOISE``.
        choose: generates the noise.
    """

    def __init__(
        self,
        events: Events,
        policy: Policy,
        seconds: Mapping[int, float] | Callable[[list[Entry]], float],
        *,
        engines: int = 1,
        overhead: Overhead = Overhead(),
        shared: bool = True,
        inline: bool = True,
        noise: float = NOISE,
        choose: random.Random | None = None,
    ):
        self.batches: list[int] = []
        self.busy_loop = self.busy_engine = 0.0
        self.replied = 0.0
        """When the present response is written."""
        self._events = events
        self._policy = policy
        self._seconds = seconds if callable(seconds) else _by_samples(Latency(seconds))
        self._half, self._call, self._wakeup = overhead.request / 2, overhead.call, overhead.wakeup
        self.wakeups = 0
        self._short = inline and overhead.request > 0
        self._inline = False  # whether the last call ran in the loop
        self._shared = shared
        self._noise = noise
        self._choose = choose or random.Random(1)
        self._idle = engines
        self._arrived: list[Entry] = []
        self._ended: list[_Call] = []
        self._running: list[_Call] = []
        self._busy = False  # whether the loop is
        self._wake = math.inf

    def arrive(self, entry: Entry) -> None:
        """Accept a request; its reply is called, also with a refusal, and :attr:`replied` is the time of that."""
        self._arrived.append(entry)
        self._events.last(self._turn)

    def _turn(self) -> None:
        """Begin a turn of the loop with the requests that have arrived and the calls that have ended."""
        if self._busy:
            return
        arrived, self._arrived = self._arrived, []
        ended, self._ended = self._ended, []
        answered = sum(len(call.batch) for call in ended)
        seconds = (len(arrived) + answered) * self._half + len(ended) * self._call
        if self._running and not ended:
            self.wakeups += 1
            seconds += self._wakeup
        self._work(seconds, partial(self._do, arrived, ended))

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        """Keep the loop busy for some seconds, then run an action."""
        if not seconds:
            then()
            return
        self._busy = True
        self.busy_loop += seconds
        if self._shared:
            for call in self._running:
                call.end += seconds
        self._events.at(self._events.now + seconds, then)

    def _do(self, arrived: list[Entry], ended: list[_Call]) -> None:
        """End a turn: answer calls that have ended, queue requests that have arrived, and start calls."""
        self._busy = False
        now = self._events.now
        written = now - len(arrived) * self._half
        for call in reversed(ended):  # the last response is written at the end
            written -= len(call.batch) * self._half
            self._answer(call, written)
        self.replied = now
        for entry in arrived:
            if (refusal := self._policy.offer(entry, now)) is not None:
                entry.reply(refusal)
        self._pull()
        if not self._busy and (self._arrived or self._ended):
            self._events.last(self._turn)

    def _answer(self, call: _Call, begin: float) -> None:
        self._idle += 1
        # As in the server: the time of a call contains the work of the event loop that interrupted it.
        self._policy.finish(call.batch, self._events.now, call.end - call.began + self._call)
        self.replied = begin
        for entry in call.batch:
            self.replied += self._half
            entry.reply({})

    def _take(self) -> list[Entry]:
        batch = self._policy.take(self._events.now)
        late, self._policy.late = self._policy.late, []
        for entry in late:
            entry.reply(DeadlineExceeded("its time was up"))
        return batch

    def _pull(self) -> None:
        now = self._events.now
        while self._idle and (batch := self._take()):
            self._idle -= 1
            expected = self._seconds(batch)
            taken = expected * math.exp(self._choose.gauss(0, self._noise))
            self.batches.append(sum(entry.samples for entry in batch))
            self.busy_engine += taken
            call = _Call(batch, now, now + taken)
            if self._runs_inline(expected + self._call):
                answering = self._call + len(batch) * self._half
                self._work(taken + answering, partial(self._do, [], [call]))
                self.busy_loop -= taken
                return
            self._running.append(call)
            self._events.at(call.end, partial(self._end, call))
        self._wake = math.inf
        if self._idle and self._policy.wake is not None:
            self._wake = self._policy.wake
            self._events.at(self._wake, self._awake)

    def _runs_inline(self, seconds: float) -> bool:
        # As the dispatcher decides.
        self._inline = self._short and seconds < (2 * INLINE if self._inline else INLINE)
        return self._inline

    def _awake(self) -> None:
        if self._events.now >= self._wake:  # otherwise it was to be asked at another time
            self._events.last(self._turn)

    def _end(self, call: _Call) -> None:
        if call.end > self._events.now:  # the loop took some of its time
            self._events.at(call.end, partial(self._end, call))
            return
        self._running.remove(call)
        self._ended.append(call)
        self._events.last(self._turn)


def _by_samples(latency: Latency) -> Callable[[list[Entry]], float]:
    return lambda batch: latency(sum(entry.samples for entry in batch))


class Simulation:
    """One run of a policy on one replica. The arguments are those of :class:`Replica`; ``seed`` is of all chances."""

    def __init__(
        self,
        policy: Policy,
        seconds: Mapping[int, float] | Callable[[list[Entry]], float],
        *,
        engines: int = 1,
        noise: float = NOISE,
        seed: int = 1,
        overhead: Overhead = Overhead(),
        shared: bool = True,
        inline: bool = True,
    ):
        self.result = Result()
        self.clients: defaultdict[str, Result] = defaultdict(Result)
        self._choose = random.Random(seed)
        self._wire = overhead.wire
        self._events = Events()
        self._replica = Replica(
            self._events,
            policy,
            seconds,
            engines=engines,
            overhead=overhead,
            shared=shared,
            inline=inline,
            noise=noise,
            choose=self._choose,
        )
        self._loop: Loop | None = None
        self._lengths: Iterator[int] = itertools.repeat(0)

    def replay(self, arrivals: Sequence[Arrival]) -> Result:
        """Run an open loop: requests come when they come."""
        for arrival in arrivals:
            self._events.at(arrival.time, partial(self._arrive, arrival))
        return self._run(arrivals[0].time, arrivals[-1].time)

    def closed(self, loop: Loop) -> Result:
        """Run a closed loop until ``loop.count`` requests were sent."""
        self._loop = loop
        self._lengths = itertools.cycle(loop.lengths or (0,))
        for client in range(loop.clients):
            self._send(client * loop.think / loop.clients)
        return self._run(0.0, 0.0)

    def _run(self, first: float, last: float) -> Result:
        self._events.run()
        result, replica = self.result, self._replica
        result.span = max(self._events.now, last) - first
        result.batches, result.loop, result.engine = replica.batches, replica.busy_loop, replica.busy_engine
        result.wakeups = replica.wakeups
        return result

    def _arrive(self, arrival: Arrival) -> None:
        results, now = (self.result, self.clients[arrival.client]), self._events.now
        for result in results:
            result.offered += 1
        deadline = now + arrival.timeout

        def reply(outcome: Outcome) -> None:
            at = self._replica.replied + self._wire
            if not isinstance(outcome, IngotError):
                for result in results:
                    result.latencies.append(at - now)
                    result.on_time += at <= deadline
            self._again(at)

        rows, length = arrival.rows, arrival.length
        sizes, work = ((length,), rows * length) if length else ((), rows)
        entry = Entry({}, rows, reply, now, deadline=deadline, nbytes=64 * work, sizes=sizes, work=work)
        entry.client = arrival.client if arrival.known else None
        self._replica.arrive(entry)

    def _again(self, now: float) -> None:
        loop = self._loop
        if loop is not None and self.result.offered + len(self._events) < loop.count:
            self._send(max(now + loop.think * self._choose.uniform(0.5, 1.5), self._events.now))

    def _send(self, moment: float) -> None:
        loop = self._loop
        timeout = math.inf if loop is None else loop.timeout
        length = next(self._lengths)
        self._events.at(moment, partial(self._arrive, Arrival(0.0, 1, timeout, length=length)))
