"""One simulated replica: an engine and an event loop, and the cores that both share."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist

from ingot.bench.measurement import Objective
from ingot.deploy.capacity.simulation import NOISE, Overhead, Result, Simulation
from ingot.deploy.capacity.traces import Arrival, poisson
from ingot.errors import InvalidArgument
from ingot.report.units import duration
from ingot.runtime.dispatch.dispatcher import INLINE
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.scheduling.scheduler import Scheduler

# The search for the highest rate ends when it is known to this share of itself; no rate below a share is tried.
_PRECISION = 0.02
_LOWEST = 1 / 64
# Requests of one simulation: as many as come in so many times the objective's latency, within bounds.
_SPANS, _LEAST, _MOST = 60, 4000, 20_000


class Traffic:
    """Requests of one sample each at a mean rate.

    Args:
        times: recorded times in seconds; without them, arrivals are independent of each other (a Poisson process).
    """

    def __init__(self, times: Sequence[float] = ()):
        self._times = times
        if times and not times[-1] > times[0]:
            raise InvalidArgument("the recorded times are all equal; record requests over some seconds")

    @property
    def rate(self) -> float:
        """Requests per second of the recorded times; 0 without them."""
        return (len(self._times) - 1) / (self._times[-1] - self._times[0]) if self._times else 0.0

    def at(self, rate: float, seconds: float) -> list[Arrival]:
        """Return arrivals at a mean rate.

        Recorded requests are left out at random, or repeated within the gap that follows each, so that busy and quiet
        times stay as long as they were. If these are too many requests, the busiest part of the recording is used.

        Args:
            rate: requests per second.
            seconds: how long Poisson arrivals last at least; recorded ones last as long as the recording.
        """
        if not self._times:
            return poisson(rate, int(min(max(rate * seconds, _LEAST), _MOST)), math.inf)
        choose = random.Random(1)
        copies, times = rate / self.rate, self._times
        if len(times) > (most := max(2, int(_MOST / copies))):
            start = min(range(len(times) - most + 1), key=lambda place: times[place + most - 1] - times[place])
            times = times[start : start + most]
        found = []
        for time, following in itertools.pairwise((*times, times[-1])):
            count = int(copies) + (choose.random() < copies % 1)
            found += sorted(time + (following - time) * choose.random() * bool(copy) for copy in range(count))
        return [Arrival(time) for time in found]


@dataclass(frozen=True, kw_only=True)
class Server:
    """A replica.

    Attributes:
        seconds: of an engine call, by samples.
        overhead: time outside the engine.
        cores: that the replica has.
        threads: CPU threads of an engine call.
        batching: whether requests may share a call.
        max_batch: samples of a call at most.
        device: ``cpu`` or ``cuda``.
    """

    seconds: Mapping[int, float]
    overhead: Overhead = field(default_factory=Overhead)
    cores: int = 1
    threads: int = 1
    batching: bool = True
    max_batch: int = 64
    device: str = "cpu"

    @property
    def shared(self) -> bool:
        """Whether the event loop shares the engine's cores."""
        return self.device == "cpu" and self.cores <= self.threads

    @property
    def alone(self) -> float:
        """The p99 latency of a request on an idle replica, in seconds."""
        slow = math.exp(NormalDist().inv_cdf(0.99) * NOISE)
        return self.overhead.request + self.overhead.call + self.overhead.wire + slow * Latency(self.seconds)(1)

    @property
    def ceiling(self) -> float:
        """The upper bound of the throughput, in requests per second: that of the best batch size."""
        latency, most = Latency(self.seconds), self.max_batch if self.batching else 1
        return max(self._throughput(samples, latency(samples)) for samples in range(1, most + 1))

    def _throughput(self, samples: int, taken: float) -> float:
        loop, engine = self.overhead.request + self.overhead.call / samples, taken / samples
        if self.shared or (self.device == "cpu" and taken < INLINE):
            return 1 / (loop + engine)
        return 1 / max(loop, engine)

    def run(self, arrivals: Sequence[Arrival]) -> Result:
        """Simulate a load, with the scheduler as a server that has measured the model creates it."""
        scheduler = Scheduler(
            Limits(max_batch=self.max_batch),
            batching=self.batching,
            latency=Latency(self.seconds),
        )
        simulation = Simulation(
            scheduler,
            self.seconds,
            overhead=self.overhead,
            shared=self.shared,
            inline=self.device == "cpu",
        )
        return simulation.replay(arrivals)

    def search(self, objective: Objective, traffic: Traffic) -> Iterator[tuple[float, Result, bool]]:
        """Yield rates, their results and whether they hold an objective, until the highest that does is known.

        Raises:
            InvalidArgument: one request alone takes longer than the objective allows.
        """
        if self.alone > objective.seconds:
            raise InvalidArgument(
                f"a {objective} cannot be held: one request alone takes {duration(self.alone)}, which is the fastest "
                "possible; allow more time, or choose a faster variant or more cores"
            )
        low, high = 0.0, self.ceiling
        rate, lowest = 0.8 * high, high * _LOWEST
        while high - low > _PRECISION * high and rate > lowest:
            result = self.run(traffic.at(rate, _SPANS * objective.seconds))
            held = result.percentile(objective.quantile) <= objective.seconds
            yield rate, result, held
            low, high = (rate, high) if held else (low, rate)
            rate = (low + high) / 2
