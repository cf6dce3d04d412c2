"""A client with light load with one that overloads the model: ``python -m benchmarks.scheduler_sim.neighbours``.

The light client sends a twentieth of the model's capacity. The number of its answers in time and their 99th percentile
are shown as multiples of those that it has alone: if the scheduler takes both clients for one, and if it knows them
apart. Where one call takes more than half of the time that requests allow, no order of calls can help.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.scheduler_sim.contest import ours
from benchmarks.scheduler_sim.profiles import Profile, load
from ingot.deploy.capacity import traces
from ingot.deploy.capacity.simulation import Result, Simulation
from ingot.deploy.capacity.traces import Arrival

_LIGHT = 0.05
_LOADS = (0.5, 1.0, 3.0)
_COUNT = 1500  # requests of the light client


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_sim.neighbours", description=__doc__)
    parser.parse_args()
    print("| model | requests of the other | its load | answers in time, as one | apart | p99, as one | apart |")
    print("|---|---|---|---|---|---|---|")
    for profile in load():
        rate = _LIGHT * profile.capacity
        light = traces.poisson(rate, _COUNT, profile.slo)
        alone = _run(profile, light)
        for rows in (1, 64):
            for share in _LOADS:
                other = traces.poisson(share * profile.capacity / rows, int(_COUNT * share / _LIGHT / rows), 1e9, 2)
                heavy = [Arrival(item.time, rows) for item in other]
                results = [_run(profile, light, heavy, apart=apart) for apart in (False, True)]
                in_time = " | ".join(f"{item.on_time / alone.on_time:.2f}" for item in results)
                late = " | ".join(f"{item.percentile(0.99) / alone.percentile(0.99):.1f}" for item in results)
                print(f"| {profile.name} | of {rows} rows | {share:g} | {in_time} | {late} |")


def _run(profile: Profile, light: Sequence[Arrival], heavy: Sequence[Arrival] = (), *, apart: bool = True) -> Result:
    """Return the result of the light client."""
    simulation = Simulation(ours(profile), profile.seconds)
    named = [(item, "light") for item in light] + [(item, "heavy") for item in heavy]
    simulation.replay([Arrival(item.time, item.rows, item.timeout, name, apart) for item, name in named])
    return simulation.clients["light"]


if __name__ == "__main__":
    main()
