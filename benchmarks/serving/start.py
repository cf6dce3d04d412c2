"""Measures from the start of a server's process to its first answer: ``python -m benchmarks.serving.start``.

Every server is started again in every round, in turn, on one core, with the files in the page cache. Its time, the CPU
time and the memory (PSS) of all of its processes when it has answered are reported as medians and as ratios to the
peer. On a busy machine, CPU time is the reliable figure.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.serving.contestants import Start, contestants
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import Process, free_ports
from ingot.report.units import size

# Seconds to the first answer, seconds of CPU until then, bytes.
Sample = tuple[float, float, float]
_FORMAT = "binary"


def start(name: str, served: Model, build: Path) -> Sample:
    """Start a server, ask until it answers, and end it.

    Raises:
        SystemExit: it does not answer.
    """
    server = contestants()[name]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        port, grpc_port = free_ports(2)
        how = Start(served, port, grpc_port, _FORMAT, build, work)
        request = server.wires[_FORMAT].request(served, 0).http()
        process = Process(server.command(how), server.environment(how), work / "log")
        try:
            seconds, body = process.wait(how.port, request)
            usage = process.usage()
        finally:
            process.close()
        server.wires[_FORMAT].answer(body)
    return seconds, usage.cpu, usage.memory


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.start")
    parser.add_argument("--models", default="tiny,wide", help="comma-separated")
    parser.add_argument("--peer", default="mosec", help="whom Ingot is compared with")
    parser.add_argument("--rounds", type=int, default=7, help="that count; one more comes before")
    parser.add_argument("--build", type=Path, default=Path("build/serving"), help="models and environments")
    options = parser.parse_args()
    build: Path = options.build.absolute()
    if why := contestants()[options.peer].missing(build):
        raise SystemExit(f"{options.peer} cannot take part: {why}")
    for name in options.models.split(","):
        served = model(name, build)
        found: dict[str, list[Sample]] = {options.peer: [], "ingot": []}
        for number in range(options.rounds + 1):
            for server, samples in found.items():
                sample = start(server, served, build)
                if number:
                    samples.append(sample)
        _print(name, options.rounds, found)


def _print(name: str, rounds: int, found: dict[str, list[Sample]]) -> None:
    table = Table("server", "first answer", "CPU until then", "memory", title=f"{name}, medians of {rounds} starts")
    middles = {server: [median(column) for column in zip(*samples, strict=True)] for server, samples in found.items()}
    for server, (seconds, cpu, memory) in middles.items():
        table.add_row(server, f"{seconds:.2f} s", f"{cpu:.2f} s", size(memory))
    peer, ours = middles.values()
    table.add_row("ratio", *(f"{mine / theirs:.2f}x" for mine, theirs in zip(ours, peer, strict=True)))
    Console().print(table)


if __name__ == "__main__":
    main()
