"""Compare ways to use several cores: ``python -m benchmarks.scale.processes``.

One server, and several that share their ports (``--share-port``), serve the same model in turn, on all cores of this
machine, which the load generator shares. Throughput, p99 and the server's CPU time for a request are written to
``docs/guides/deploy/scale.md`` as ratios to one server, medians of the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.serving.docs import updated
from benchmarks.serving.models import Model, model
from benchmarks.serving.pairs import build_folder
from benchmarks.serving.processes import DEADLINE, NoAnswer, Process, free_ports
from ingot.bench.measurement import Bench, Rule
from ingot.bench.target import PROTOCOLS, Target
from ingot.runtime.machine import devices

_HTTP = ("binary", "json")
_PAGE = Path(__file__).parents[2] / "docs" / "guides" / "deploy" / "scale.md"


@dataclass(frozen=True)
class Way:
    """A way to serve: how many servers, and their options."""

    servers: int = 1
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """A load: requests per second, p99 in seconds, CPU seconds of all servers for a request, and the mean batch, if it
    is known."""

    rate: float
    p99: float
    cpu: float
    batch: float | None


def ways(cores: int) -> dict[str, Way]:
    """Return the arrangements that are compared on a machine."""
    return {
        "one server": Way(),
        f"{cores} servers, one port": Way(cores, ("--share-port",)),
        f"{cores} servers, one port, one engine thread each": Way(cores, ("--share-port", "--threads", "1")),
    }


def main() -> None:
    """Measure, and print a table for each model."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale.processes", description=__doc__)
    parser.add_argument("--models", default="tiny,wide", help="of the serving benchmark's, separated by commas")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3, help="of each load")
    parser.add_argument("--print", action="store_true", help="write nothing to docs/guides/deploy/scale.md")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    found: dict[tuple[str, str, str], list[Found]] = defaultdict(list)
    names = options.models.split(",")
    for number in range(options.rounds):
        for name in names:
            served = model(name, build_folder())
            for label, way in ways(cores).items():
                for protocol, load in measured(served, way, cores, options.clients, options.seconds):
                    found[name, protocol, label].append(load)
                    print(f"round {number + 1}: {name}, {protocol}, {label}: {load}", file=sys.stderr, flush=True)
    lines = _table(found, f"{devices.describe()}; {options.clients} clients; {options.rounds} rounds")
    print("\n".join(lines))
    if not options.print:
        _PAGE.write_text(updated(_PAGE.read_text(), lines, "processes"))


def _table(found: Mapping[tuple[str, str, str], list[Found]], about: str) -> list[str]:
    """Return the ratios to one server in Markdown."""
    lines = [f"{about}. Ratios to one server:", ""]
    lines.append("| model | protocol | | throughput, median (lowest to highest) | p99 | CPU a request | mean batch |")
    lines.append("|---|---|---|---|---|---|---|")
    for (name, protocol, label), loads in found.items():
        cells = _cells(loads, found[name, protocol, "one server"])
        lines.append(f"| {name} | {protocol} | {label} | {' | '.join(cells)} |")
    return lines


def _cells(loads: list[Found], base: list[Found]) -> list[str]:
    pairs = list(zip(loads, base, strict=True))
    rates = [one.rate / other.rate for one, other in pairs]
    p99 = median(one.p99 / other.p99 for one, other in pairs)
    cpu = median(one.cpu / other.cpu for one, other in pairs)
    batches = [one.batch for one in loads if one.batch is not None]
    batch = f"{median(batches):.1f}" if batches else ""
    return [f"{median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})", f"{p99:.2f}", f"{cpu:.2f}", batch]


def measured(served: Model, way: Way, cores: int, clients: int, seconds: int) -> Iterator[tuple[str, Found]]:
    """Yield the load of each protocol on one way to serve."""
    with _serving(served, way, cores) as (processes, port):
        for protocol in (each for each in PROTOCOLS if each in _HTTP):
            with Target(f"http://127.0.0.1:{port}", served.name, protocol=protocol) as target:
                payload = target.payload(None, {}, 1, 1)
                bench = Bench(target, target.plan(payload), payload.samples, Rule(warmup=1, windows=seconds))
                bench.closed(clients)  # the servers learn their batch sizes
                before = sum(process.usage().cpu for process in processes)
                point = bench.closed(clients)
                cpu = sum(process.usage().cpu for process in processes) - before
            batch = point.batch if way.servers == 1 else None  # which of the servers reports is chance
            # The CPU time contains the second of the warm-up.
            answered = point.total.rate * (seconds + 1)
            yield protocol, Found(point.total.rate, point.quantile(0.99), cpu / answered, batch)


@contextlib.contextmanager
def _serving(served: Model, way: Way, cores: int) -> Iterator[tuple[list[Process], int]]:
    """Run the servers of a way until the block ends; all of them are ready when it begins."""
    port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as running:
        processes = []
        for number in range(way.servers):
            source = ["serve", f"{served.name}:1", "--store", str(served.store), "--device", "cpu", "--json"]
            ports = ["--http-port", str(port), "--grpc-port", str(grpc_port)]
            every = ["taskset", "-c", f"0-{cores - 1}"]  # which overrides the one core of Process
            log = Path(work) / f"{number}.log"
            process = Process([*every, sys.executable, "-m", "ingot", *source, *ports, *way.options], {}, log)
            running.callback(process.close)
            _wait(process, log)
            processes.append(process)
        yield processes, port


def _wait(process: Process, log: Path) -> None:
    """Wait until a server has printed its addresses.

    Raises:
        NoAnswer: it failed or takes too long; the message has the end of its log.
    """
    while '"http"' not in (text := log.read_text(errors="replace")):
        if text.startswith("error") or time.perf_counter() - process.started > DEADLINE:
            raise NoAnswer(f"a server is not ready; the end of its log:\n{text[-2000:]}")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
