"""Compare policies over models and loads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.scheduler_sim.policies import Fixed, Regression
from benchmarks.scheduler_sim.profiles import Profile
from ingot.deploy.capacity import traces
from ingot.deploy.capacity.simulation import Loop, Policy, Result, Simulation
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.scheduling.scheduler import Scheduler

LOADS = (0.5, 1.0, 2.0, 3.0)
CLIENTS = (1, 8, 32)
POLICIES = ("ingot", "fixed delay", "fixed, tuned", "regression", "no batching")
# Settings tried for "fixed, tuned": delays in seconds, batches, queue lengths. The best on the very trace counts, which
# is better than anyone could tune in advance.
GRID = tuple(itertools.product((0.001, 0.005, 0.01), (8, 32), (32, 1024)))
# Requests of one run: as many as come in so many times the SLO, within bounds.
_SPANS, _LEAST, _MOST = 60, 1500, 20_000


@dataclass(frozen=True)
class Row:
    """One run. Rates are shares of the model's capacity, times shares of its SLO."""

    model: str
    traffic: str
    load: float
    policy: str
    goodput: float
    throughput: float
    p50: float
    p99: float
    batch: float


def contest(profile: Profile, loads: tuple[float, ...] = LOADS, scale: float = 1.0) -> Iterator[Row]:
    """Run all policies over all traffic on one model; ``scale`` shortens the runs."""
    for kind, load in itertools.product(("poisson", "bursts"), loads):
        rate = load * profile.capacity
        count = int(scale * min(max(rate * profile.slo * _SPANS, _LEAST), _MOST))
        make = traces.poisson if kind == "poisson" else traces.bursts
        arrivals = make(rate, count, profile.slo)
        yield from _rows(profile, kind, load, lambda item, arrivals=arrivals: item.replay(arrivals))  # type: ignore[misc]
    for clients in CLIENTS:
        loop = Loop(clients, 0.0002, int(scale * _LEAST * 2))
        yield from _rows(profile, "closed loop", clients, lambda item, loop=loop: item.closed(loop))  # type: ignore[misc]


def replay(profile: Profile, arrivals: list[traces.Arrival]) -> Iterator[Row]:
    """Run all policies over a recorded trace."""
    load = sum(item.rows for item in arrivals) / traces.span(arrivals) / profile.capacity
    yield from _rows(profile, "recorded", load, lambda item: item.replay(arrivals))


def ours(profile: Profile, engines: int = 1) -> Scheduler:
    """Return the scheduler as a server that has measured the model creates it."""
    return Scheduler(Limits(), batching=True, latency=Latency(profile.seconds), engines=engines)


def _rows(profile: Profile, kind: str, load: float, run: Callable[[Simulation], Result]) -> Iterator[Row]:
    def result(policy: Policy) -> Result:
        return run(Simulation(policy, profile.seconds))

    found = {
        "ingot": result(ours(profile)),
        "fixed delay": result(Fixed()),
        "fixed, tuned": max(
            (result(Fixed(*setting)) for setting in GRID), key=lambda item: (item.on_time, -item.percentile(0.5))
        ),
        "regression": result(Regression(profile.slo)),
        "no batching": result(Fixed(most=1)),
    }
    for name, item in found.items():
        yield Row(
            profile.name,
            kind,
            load,
            name,
            item.goodput / profile.capacity,
            item.throughput / profile.capacity,
            item.percentile(0.5) / profile.slo,
            item.percentile(0.99) / profile.slo,
            item.batch,
        )
