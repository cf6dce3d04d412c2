"""A discrete-event simulation of engines that pull batches from a policy."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from statistics import mean

from benchmarks.scheduler_sim.policies import Policy
from benchmarks.scheduler_sim.traces import Arrival
from ingot.errors import DeadlineExceeded, IngotError
from ingot.runtime.scheduling.entry import Entry, Outcome
from ingot.runtime.scheduling.latency_model import Latency

# By how much one call differs from another of the same size: the standard deviation of its logarithm.
NOISE = 0.05


@dataclass
class Result:
    """The outcome of a trace. Times are in seconds."""

    span: float = 0.0
    offered: int = 0
    on_time: int = 0
    latencies: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)

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
    """Clients that each send their next request ``think`` seconds after the answer to the last."""

    clients: int
    think: float
    count: int
    timeout: float = math.inf


class Simulation:
    """One run of a policy.

    Args:
        policy: called with the simulated time.
        seconds: what calls take by rows, before noise.
        noise: see ``NOISE``.
    """

    def __init__(
        self, policy: Policy, seconds: Mapping[int, float], *, engines: int = 1, noise: float = NOISE, seed: int = 1
    ):
        self.result = Result()
        self.clients: defaultdict[str, Result] = defaultdict(Result)
        self._policy = policy
        self._latency = Latency(seconds)
        self._noise = noise
        self._choose = random.Random(seed)
        self._idle = engines
        self._events: list[tuple[float, int, Arrival | list[Entry] | None]] = []
        self._order = itertools.count()
        self._now = 0.0
        self._taken: dict[int, float] = {}  # by the batch's id
        self._wake = math.inf
        self._loop: Loop | None = None

    def replay(self, arrivals: Sequence[Arrival]) -> Result:
        """Run an open loop: requests come when they come."""
        for arrival in arrivals:
            self._at(arrival.time, arrival)
        self._run()
        self.result.span = max(self._now, arrivals[-1].time) - arrivals[0].time
        return self.result

    def closed(self, loop: Loop) -> Result:
        """Run a closed loop until ``loop.count`` requests were sent."""
        self._loop = loop
        for client in range(loop.clients):
            self._at(client * loop.think / loop.clients, Arrival(0.0, 1, loop.timeout))
        self._run()
        self.result.span = self._now
        return self.result

    def _at(self, moment: float, event: Arrival | list[Entry] | None) -> None:
        heappush(self._events, (moment, next(self._order), event))

    def _run(self) -> None:
        while self._events:
            self._now, _, event = heappop(self._events)
            if isinstance(event, Arrival):
                self._arrive(event)
            elif event is not None:
                self._end(event)
            elif self._now < self._wake:
                continue  # it was to be asked at another time
            # Events at the same moment are handled together, as in one tick of an event loop.
            if not self._events or self._events[0][0] > self._now:
                self._pull()

    def _arrive(self, arrival: Arrival) -> None:
        results, now = (self.result, self.clients[arrival.client]), self._now
        for result in results:
            result.offered += 1
        deadline = now + arrival.timeout

        def reply(outcome: Outcome) -> None:
            if not isinstance(outcome, IngotError):
                for result in results:
                    result.latencies.append(self._now - now)
                    result.on_time += self._now <= deadline
            self._again()

        entry = Entry({}, arrival.rows, reply, now, deadline=deadline, nbytes=64 * arrival.rows)
        entry.client = arrival.client if arrival.known else None
        try:
            self._policy.offer(entry, now)
        except IngotError:
            self._again()

    def _again(self) -> None:
        loop = self._loop
        if loop is not None and self.result.offered + len(self._events) < loop.count:
            self._at(self._now + loop.think * self._choose.uniform(0.5, 1.5), Arrival(0.0, 1, loop.timeout))

    def _end(self, batch: list[Entry]) -> None:
        self._idle += 1
        self._policy.finish(batch, self._now, self._taken.pop(id(batch)))
        for entry in batch:
            entry.reply({})

    def _take(self) -> list[Entry]:
        batch = self._policy.take(self._now)
        late, self._policy.late = self._policy.late, []
        for entry in late:
            entry.reply(DeadlineExceeded("its time was up"))
        return batch

    def _pull(self) -> None:
        while self._idle and (batch := self._take()):
            self._idle -= 1
            rows = sum(entry.samples for entry in batch)
            taken = self._latency(rows) * math.exp(self._choose.gauss(0, self._noise))
            self._taken[id(batch)] = taken
            self.result.batches.append(rows)
            self._at(self._now + taken, batch)
        self._wake = math.inf
        if self._idle and self._policy.wake is not None:
            self._wake = self._policy.wake
            self._at(self._wake, None)
