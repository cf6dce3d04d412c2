"""Models that share the cores of a machine: ``python -m benchmarks.scheduler_sim.models``.

Each model has its own scheduler and its own engine thread, as in the server. A light model is asked at a twentieth of
its capacity, a heavy one at several loads. The light model's 99th percentile is shown as a multiple of that alone: if
the operating system shares the cores in time slices, and if each engine call keeps its core to its end, as on a device
with one queue. ``python -m benchmarks.serving.neighbours`` measures real servers.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.scheduler_sim.contest import ours
from benchmarks.scheduler_sim.profiles import PROFILES, Profile
from ingot.deploy.capacity import traces
from ingot.deploy.capacity.simulation import Result
from ingot.deploy.capacity.traces import Arrival
from ingot.errors import IngotError
from ingot.runtime.scheduling.entry import Entry, Outcome
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.scheduling.scheduler import Scheduler

# Seconds that a thread runs while another one waits for the core: Linux' base slice on a few cores.
SLICE = 0.003
LOADS = (0.5, 1.0, 3.0)
_LIGHT = 0.05
_COUNT = 1500  # requests of the light model


@dataclass
class _Engine:
    """A model's engine thread."""

    scheduler: Scheduler
    latency: Latency
    result: Result = field(default_factory=Result)
    batch: list[Entry] = field(default_factory=list)
    began: float = 0.0
    left: float = 0.0  # seconds on a core until the call ends
    ran: float = 0.0  # seconds of the present slice
    ended: float = 0.0  # when the last call did


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_sim.models", description=__doc__)
    parser.parse_args()
    profiles = {profile.name: profile for profile in PROFILES}
    print("| light model | heavy model | its load | cores | p99, in slices | p99, call by call |")
    print("|---|---|---|---|---|---|")
    for light, heavy in (("wide", "minilm"), ("wide", "cnn"), ("minilm", "cnn")):
        for load, cores in itertools.product(LOADS, (1, 2)):
            ratios = [p99_ratio(profiles[light], profiles[heavy], load, cores, each) for each in (SLICE, math.inf)]
            print(f"| {light} | {heavy} | {load:g} | {cores} | {ratios[0]:.1f} | {ratios[1]:.1f} |")


def p99_ratio(
    light: Profile, heavy: Profile, load: float, cores: int, slice_seconds: float, count: int = _COUNT
) -> float:
    """Return the light model's 99th percentile with the heavy one, as a multiple of that alone.

    Args:
        load: of the heavy model, as a share of its capacity.
        slice_seconds: the time slice; infinite if calls keep their core.
        count: requests of the light model.
    """
    rate = _LIGHT * light.capacity
    asked = traces.poisson(rate, count, math.inf)
    flood = traces.poisson(load * heavy.capacity, int(count * load * heavy.capacity / rate), math.inf, 2)
    alone = run([(light, asked)], cores, slice_seconds)[light.name]
    together = run([(light, asked), (heavy, flood)], cores, slice_seconds)[light.name]
    return together.percentile(0.99) / alone.percentile(0.99)


def run(requests: Sequence[tuple[Profile, Sequence[Arrival]]], cores: int, slice_seconds: float) -> dict[str, Result]:
    """Return each model's result."""
    engines = {profile.name: _Engine(ours(profile), Latency(profile.seconds)) for profile, _ in requests}
    coming = heapq.merge(
        *([(each.time, profile.name, each) for each in arrivals] for profile, arrivals in requests),
        key=lambda item: item[0],
    )
    following = next(coming, None)
    queue: list[_Engine] = []  # those with a call; the first of them run, one per core
    now = 0.0
    while True:
        running = queue[:cores]
        steps = [min(each.left, slice_seconds - each.ran) for each in running]
        wakes = [each.scheduler.wake for each in engines.values() if not each.batch and each.scheduler.wake is not None]
        moments = [now + step for step in steps] + [max(now, wake) for wake in wakes]
        if following is not None:
            moments.append(following[0])
        if not moments:
            return {name: engine.result for name, engine in engines.items()}
        passed, now = min(moments) - now, min(moments)
        for engine in running:
            engine.left -= passed
            engine.ran += passed
        while following is not None and following[0] <= now:
            _offer(engines[following[1]], following[2], now)
            following = next(coming, None)
        for engine in running:
            if engine.left <= 1e-12:
                queue.remove(engine)
                _end(engine, now)
            elif engine.ran >= slice_seconds - 1e-12:
                queue.remove(engine)
                queue.append(engine)
                engine.ran = 0.0
        for engine in engines.values():
            if not engine.batch:
                _begin(engine, now)
                if engine.batch:
                    queue.append(engine)


def _offer(engine: _Engine, arrival: Arrival, now: float) -> None:
    def reply(outcome: Outcome) -> None:
        if not isinstance(outcome, IngotError):
            engine.result.latencies.append(engine.ended - arrival.time)

    entry = Entry({}, arrival.rows, reply, now, deadline=math.inf, nbytes=64 * arrival.rows)
    engine.scheduler.offer(entry, now)  # or its queue is full


def _begin(engine: _Engine, now: float) -> None:
    engine.batch = engine.scheduler.take(now)
    engine.began, engine.ran = now, 0.0
    engine.left = engine.latency(sum(entry.samples for entry in engine.batch)) if engine.batch else 0.0


def _end(engine: _Engine, now: float) -> None:
    batch, engine.batch, engine.ended = engine.batch, [], now
    engine.scheduler.finish(batch, now, now - engine.began)
    for entry in batch:
        entry.reply({})


if __name__ == "__main__":
    main()
