"""Compare models in engine processes with models in the server's: ``python -m benchmarks.serving.isolation``.

Both serve the same archives with the same settings, in turn within each round. The table shows the figures of
``--isolate all`` divided by those of ``--isolate none``, as medians of the rounds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.serving.__main__ import BUILD
from benchmarks.serving.contestants import Ingot
from benchmarks.serving.loads import H2load, Load, WrongAnswer, checked_wrk, missing_tools, python_load
from benchmarks.serving.models import SPECS, Model, model
from benchmarks.serving.processes import LOAD_CORE
from benchmarks.serving.rounds import serving

CLIENTS = (1, 8, 32)
# Models with long calls get fewer clients, and more time to answer enough requests.
SLOW_CLIENTS = (1, 8)
SLOW = 3


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.isolation")
    parser.add_argument("--models", default=",".join(SPECS), help="of the benchmark's models, separated by commas")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each load")
    options = parser.parse_args()
    if missing := missing_tools():
        raise SystemExit(f"install {', '.join(missing)}")
    build = BUILD.absolute()
    build.mkdir(parents=True, exist_ok=True)
    kinds = [Ingot(kind, options=("--isolate", kind)) for kind in ("all", "none")]
    served = [model(name, build) for name in options.models.split(",")]
    os.sched_setaffinity(0, {LOAD_CORE})
    found: dict[tuple[str, str, int], list[tuple[Load, Load]]] = defaultdict(list)
    for number in range(options.rounds):
        for each in served:
            loads = {
                kind.name: _measure(kind, each, build, options.seconds)
                for kind in (kinds if number % 2 else kinds[::-1])
            }
            for (form, clients), isolated in loads["all"].items():
                found[each.name, form, clients].append((isolated, loads["none"][form, clients]))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print("| model | format | clients | throughput, median (lowest to highest) | p50 | p99 | CPU a request |")
    print("|---|---|---|---|---|---|---|")
    for (name, form, clients), pairs in found.items():
        print(f"| {name} | {form} | {clients} | {' | '.join(_ratios(pairs))} |")


def _ratios(pairs: Sequence[tuple[Load, Load]]) -> list[str]:
    """Return the columns of one row."""
    rates = [isolated.rate / inside.rate for isolated, inside in pairs]
    others = [
        median(getattr(isolated, name) / getattr(inside, name) for isolated, inside in pairs)
        for name in ("p50_ms", "p99_ms", "cpu_us")
    ]
    return [f"{median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})", *(f"{ratio:.2f}" for ratio in others)]


def _measure(kind: Ingot, served: Model, build: Path, seconds: float) -> dict[tuple[str, int], Load]:
    """Return the loads of one server by format and number of clients."""
    found = {}
    with serving(kind, served, served.spec.formats[0], build) as server:
        for form in served.spec.formats:
            wire, work = kind.wires[form], server.start.work
            if not served.spec.exact:  # only the client in Python allows answers that depend on the batch
                for clients in SLOW_CLIENTS:
                    measured = (server.start.port, build, server.process, clients, SLOW * seconds)
                    found[form, clients] = python_load("ingot", served, form, *measured)
                continue
            grpc = form == "grpc"
            load = (H2load if grpc else checked_wrk)(
                served, wire, server.start.grpc_port if grpc else server.start.port, work
            )
            for clients in CLIENTS:
                found[form, clients] = load.load(server.process, clients, seconds)
    return found


if __name__ == "__main__":
    try:
        main()
    except WrongAnswer as error:
        raise SystemExit(str(error)) from error
