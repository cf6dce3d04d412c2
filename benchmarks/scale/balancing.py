"""Simulate 1,000 replicas behind a load balancer: ``python -m benchmarks.scale.balancing``. It runs no engine.

Each replica has the server's own scheduler. Requests come at random; the balancer chooses a replica for each, by what
it knows about them now or knew 100 ms ago. The replicas are equal, or differ in speed as the machines of a cloud do.
The results are written to ``docs/guides/deploy/scale.md`` and ``docs/images/balancing.svg``.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.scheduler_sim import profiles
from benchmarks.scheduler_sim.contest import ours
from benchmarks.scheduler_sim.profiles import Profile
from benchmarks.serving.docs import updated
from ingot.deploy.capacity.simulation import Events, Replica
from ingot.errors import IngotError
from ingot.report import charts
from ingot.runtime.scheduling.entry import Entry, Outcome

REPLICAS = 1000
LOADS = (0.5, 0.8, 0.95)
# Batches do not pay for minilm on one core. The other model is larger, and its calls pay for 32 samples and more.
PROFILES = {
    "minilm": next(item for item in profiles.PROFILES if item.name == "minilm"),
    "large": Profile("large", {n: 0.1 + 0.005 * n for n in (1, 2, 4, 8, 16, 32, 64)}, 1.0, "synthetic"),
}
# The latency that counts for goodput, and how many requests each replica gets at full load: some two seconds of them.
MODELS = {"minilm": (0.25, 60), "large": (1.0, 150)}
# Seconds after which the balancer's information about the replicas is replaced.
STALE = 0.1
# The standard deviation of the logarithm of the replicas' speeds, where they differ.
SPREAD = 0.2
_DOCS = Path(__file__).parents[2] / "docs"
_WARMUP = 0.25  # the share of the requests that does not count

Values = npt.NDArray[np.float64]


class Balancer:
    """Chooses a replica for each request, at random.

    Args:
        seconds: of each replica for a sample, at its best batch size.
        choose: of all chances.

    Attributes:
        waiting: the requests at each replica that are not answered, as far as the balancer knows.
    """

    stale = 0.0
    counts = False
    """Whether it adds the requests that it has sent since its information was new."""

    def __init__(self, seconds: Values, choose: random.Random):
        self.seconds = seconds
        self.choose = choose
        self.waiting = np.zeros(len(seconds))

    def pick(self, passed: float) -> int:
        """Return the replica for a request, ``passed`` seconds after the information was new."""
        return self.choose.randrange(len(self.seconds))


class RoundRobin(Balancer):
    """Each replica in turn."""

    def __init__(self, seconds: Values, choose: random.Random):
        super().__init__(seconds, choose)
        self._turn = itertools.cycle(range(len(seconds)))

    def pick(self, passed: float) -> int:
        return next(self._turn)


class TwoChoices(Balancer):
    """The one of two random replicas that has fewer requests."""

    def pick(self, passed: float) -> int:
        one, other = self.choose.randrange(len(self.seconds)), self.choose.randrange(len(self.seconds))
        return one if self.waiting[one] <= self.waiting[other] else other


class LeastWait(Balancer):
    """The replica with the least expected wait, by its number of requests and its speed."""

    def pick(self, passed: float) -> int:
        waits = (self.waiting + 1) * self.seconds
        if self.counts:
            waits = np.maximum(waits - passed, self.seconds)
        best = np.flatnonzero(waits <= waits.min() * (1 + 1e-9))
        return int(best[self.choose.randrange(len(best))])


class StaleTwoChoices(TwoChoices):
    stale = STALE


class StaleLeastWait(LeastWait):
    stale = STALE


class CountingLeastWait(StaleLeastWait):
    counts = True


BALANCERS: dict[str, type[Balancer]] = {
    "random": Balancer,
    "round robin": RoundRobin,
    "two choices": TwoChoices,
    "two choices, 100 ms old": StaleTwoChoices,
    "least wait": LeastWait,
    "least wait, 100 ms old": StaleLeastWait,
    "least wait, 100 ms old, own requests counted": CountingLeastWait,
}


@dataclass(frozen=True)
class Row:
    """One simulation; ``p50`` and ``p99`` in seconds, ``goodput`` as a share of all requests."""

    model: str
    spread: float
    load: float
    balancer: str
    p50: float
    p99: float
    goodput: float


class Cluster:
    """Replicas behind a balancer.

    Args:
        profile: of the model.
        kind: of the balancer.
        replicas: how many.
        spread: the standard deviation of the logarithm of the replicas' speeds.
    """

    def __init__(self, profile: Profile, kind: type[Balancer], replicas: int, spread: float):
        self._choose = random.Random(1)
        speeds = np.array([math.exp(self._choose.gauss(0, spread)) for _ in range(replicas)])
        speeds /= speeds.mean()
        self.rate = replicas * profile.capacity
        self._events = Events()
        self._replicas = []
        for speed in speeds:
            own = Profile(profile.name, {n: taken / speed for n, taken in profile.seconds.items()}, profile.slo, "")
            self._replicas.append(Replica(self._events, ours(own), own.seconds, choose=self._choose))
        self._balancer = kind(1 / (profile.capacity * speeds), self._choose)
        self._waiting = np.zeros(replicas) if kind.stale else self._balancer.waiting
        self._renewed = 0.0
        self._latencies: list[float] = []

    def run(self, load: float, count: int) -> Values:
        """Send ``count`` requests at a share of the capacity; return the latencies after a warm-up."""
        self._left, self._load = count, load
        self._events.at(0.0, self._arrive)
        if self._balancer.stale:
            self._events.at(0.0, self._renew)
        self._events.run()
        return np.array(self._latencies[int(_WARMUP * count) :])

    def _renew(self) -> None:
        self._balancer.waiting[:] = self._waiting
        self._renewed = self._events.now
        if self._left:
            self._events.at(self._events.now + self._balancer.stale, self._renew)

    def _arrive(self) -> None:
        now, balancer, waiting = self._events.now, self._balancer, self._waiting
        number = balancer.pick(now - self._renewed)
        replica = self._replicas[number]
        waiting[number] += 1
        if balancer.counts:
            balancer.waiting[number] += 1

        def reply(outcome: Outcome) -> None:
            waiting[number] -= 1
            self._latencies.append(math.inf if isinstance(outcome, IngotError) else replica.replied - now)

        replica.arrive(Entry({}, 1, reply, now, nbytes=64))
        self._left -= 1
        if self._left:
            self._events.at(now + self._choose.expovariate(self._load * self.rate), self._arrive)


def simulate(model: str, spread: float, load: float, balancer: str, replicas: int, scale: float = 1.0) -> Row:
    """Return the row of one balancer; ``scale`` shortens the run."""
    limit, requests = MODELS[model]
    cluster = Cluster(PROFILES[model], BALANCERS[balancer], replicas, spread)
    found = cluster.run(load, int(scale * load * requests * replicas))
    p50, p99 = (float(each) for each in np.quantile(found, (0.5, 0.99), method="lower"))
    return Row(model, spread, load, balancer, p50, p99, float((found <= limit).mean()))


def page(rows: Sequence[Row], replicas: int) -> str:
    """Return the tables in Markdown."""
    parts = []
    for model, spread in dict.fromkeys((row.model, row.spread) for row in rows):
        kind = f"speeds that differ by {spread:.0%} (standard deviation)" if spread else "equal speeds"
        limit = MODELS[model][0] * 1e3
        parts += ["", f"`{model}`, {replicas:,} replicas of {kind}: p99 in ms; share within {limit:g} ms", ""]
        shown = [row for row in rows if (row.model, row.spread) == (model, spread)]
        loads = sorted({row.load for row in shown})
        parts += [
            "| balancer | " + " | ".join(f"load {load:g}" for load in loads) + " |",
            "|---" * (len(loads) + 1) + "|",
        ]
        for name in BALANCERS:
            cells = [
                f"{r.p99 * 1e3:,.0f}; {r.goodput:.1%}"
                for load in loads
                for r in shown
                if (r.load, r.balancer) == (load, name)
            ]
            parts.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(parts).strip()


def picture(rows: Sequence[Row]) -> str:
    """Return p99 by load as SVG, for the first model with replicas that differ."""
    model = rows[0].model
    shown = [row for row in rows if row.model == model and row.spread]
    items = [
        charts.Curve(name, tuple((row.load, row.p99 * 1e3) for row in shown if row.balancer == name), color)
        for color, name in enumerate(BALANCERS)
    ]
    chart = charts.curves(items, ("share of the capacity of all replicas that is asked for", "p99 in ms"))
    return charts.image(chart, f"{model}, replicas of different speeds: p99 by load and balancer")


def main() -> None:
    """Simulate, and write the results to the docs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.balancing", description=__doc__)
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--scale", type=float, default=1.0, help="how long runs are, as a share of the usual")
    parser.add_argument("--print", action="store_true", help="write nothing")
    options = parser.parse_args()
    every = itertools.product(options.models.split(","), (0.0, SPREAD), LOADS, BALANCERS)
    with ProcessPoolExecutor() as pool:
        runs = [pool.submit(simulate, *each, options.replicas, options.scale) for each in every]
        rows = [run.result() for run in runs]
    text = page(rows, options.replicas)
    print(text)
    if not options.print:
        path = _DOCS / "scale.md"
        path.write_text(updated(path.read_text(), text.split("\n"), "balancing"))
        (_DOCS / "images" / "balancing.svg").write_text(picture(rows))


if __name__ == "__main__":
    main()
