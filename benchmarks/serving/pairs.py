"""Compare two ways to run Ingot: both serve the same archives, and each load of one follows that of the other."""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.serving.__main__ import BUILD
from benchmarks.serving.contestants import Ingot
from benchmarks.serving.loads import H2load, Load, checked_wrk, missing_tools, python_load
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import LOAD_CORE
from benchmarks.serving.rounds import Server, serving

CLIENTS = (1, 8, 32)
# Models with long calls get fewer clients, and more time to answer enough requests.
SLOW_CLIENTS = (1, 8)
SLOW = 3


def options(parser: argparse.ArgumentParser, models: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a comparison; ``models`` are those that are measured by default."""
    parser.add_argument("--models", default=",".join(models), help="of the benchmark's models, separated by commas")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each load")
    parsed = parser.parse_args()
    if missing := missing_tools():
        raise SystemExit(f"install {', '.join(missing)}")
    return parsed


def build_folder() -> Path:
    """Return the absolute path of the folder for models and logs, and create it."""
    build = BUILD.absolute()
    build.mkdir(parents=True, exist_ok=True)
    return build


def compare(one: Ingot, other: Ingot, parsed: argparse.Namespace) -> None:
    """Measure both, and print the figures of ``one`` divided by those of ``other`` as medians of the rounds.

    Raises:
        WrongAnswer: a server answered wrongly.
    """
    build = build_folder()
    served = [model(name, build) for name in parsed.models.split(",")]
    os.sched_setaffinity(0, {LOAD_CORE})
    found: dict[tuple[str, str, int], list[tuple[Load, Load]]] = defaultdict(list)
    for number in range(parsed.rounds):
        for each in served:
            turned = (one, other) if number % 2 else (other, one)
            with ExitStack() as stack:
                start = partial(serving, served=each, form=each.spec.formats[0], build=build)
                servers = {kind.name: stack.enter_context(start(kind)) for kind in turned}
                for form, clients in _loads(each):
                    # The loads of a pair follow each other: the speed of a shared machine changes within seconds.
                    loads = {
                        kind.name: _load(kind, servers[kind.name], form, clients, build, parsed.seconds)
                        for kind in turned
                    }
                    found[each.name, form, clients].append((loads[one.name], loads[other.name]))
        print(f"round {number + 1} of {parsed.rounds}", file=sys.stderr, flush=True)
    print("| model | format | clients | throughput, median (lowest to highest) | p50 | p99 | CPU a request |")
    print("|---|---|---|---|---|---|---|")
    for (name, form, clients), pairs in found.items():
        print(f"| {name} | {form} | {clients} | {' | '.join(_ratios(pairs))} |")


def _ratios(pairs: Sequence[tuple[Load, Load]]) -> list[str]:
    """Return the columns of one row."""
    rates = [one.rate / other.rate for one, other in pairs]
    others = [
        median(getattr(one, name) / getattr(other, name) for one, other in pairs)
        for name in ("p50_ms", "p99_ms", "cpu_us")
    ]
    return [f"{median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})", *(f"{ratio:.2f}" for ratio in others)]


def _loads(served: Model) -> list[tuple[str, int]]:
    """Return the formats and numbers of clients of a model's loads."""
    return [
        (form, clients) for form in served.spec.formats for clients in (CLIENTS if served.spec.exact else SLOW_CLIENTS)
    ]


def _load(kind: Ingot, server: Server, form: str, clients: int, build: Path, seconds: float) -> Load:
    """Load a server, and return what was measured."""
    served, start = server.start.model, server.start
    if not served.spec.exact:  # only the client in Python allows answers that depend on the batch
        return python_load("ingot", served, form, start.port, build, server.process, clients, SLOW * seconds)
    grpc = form == "grpc"
    load = (H2load if grpc else checked_wrk)(
        served, kind.wires[form], start.grpc_port if grpc else start.port, start.work
    )
    return load.load(server.process, clients, seconds)
