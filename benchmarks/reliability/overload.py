"""Offer more requests than a server can answer, at the times of a Poisson process, and count answers in time.

``python -m benchmarks.reliability.overload`` measures Ingot, and mosec and a naive FastAPI server where they are
installed (``python -m benchmarks.serving.install``). The capacity is what 32 clients in a closed loop get from Ingot;
all servers are offered shares of it, over HTTP with binary tensors. A request counts from the moment when it was due,
also while the generator waits for a connection. For each deadline: the answers in time, as a share of the capacity
(goodput), the median and the p99 of the answers, and the highest rate at which 99% of all requests are answered in
time, at one of two attempts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reliability.generator import Shape, compiled, finish, http_samples, start
from benchmarks.serving.contestants import Contestant, Ingot, contestants
from benchmarks.serving.models import Model, model
from benchmarks.serving.rounds import Server, serving

BUILD = Path("build/serving")
SHARES = (0.5, 1.0, 2.0, 3.0, 5.0)
DEADLINES = (100.0, 50.0)
CONNECTIONS = 512
STEPS = 6  # of the search for the highest rate: to 1% of the capacity


def servers() -> dict[str, Contestant]:
    """Return the servers by name."""
    return {
        "ingot": Ingot(),
        "mosec": contestants()["mosec"],
        "fastapi": contestants()["fastapi"],
    }


class Bench:
    """Loads on one model; each has a new server, as learnt times and queues of an overload outlast it."""

    def __init__(self, served: Model, build: Path, seconds: float):
        self._served = served
        self._build = build
        self._seconds = seconds
        self._program = compiled(build)

    def capacity(self, contestant: Contestant, slo_ms: float | None = None) -> float:
        """Return the answers a second in a closed loop of 32 clients."""
        found = self._load(contestant, Shape(32), slo_ms)
        return float(found["right"] / found["seconds"])

    def offered(self, contestant: Contestant, rate: float, deadline: float, seed: int) -> dict[str, Any]:
        """Offer ``rate`` requests a second that must be answered within ``deadline`` ms."""
        return self._load(contestant, Shape(CONNECTIONS, rate=rate, deadline_ms=deadline, seed=seed), deadline)

    def highest(self, contestant: Contestant, capacity: float, deadline: float) -> float:
        """Return the highest share of a capacity at which 99% of all requests are answered in time."""
        low, high = 0.0, 1.1
        for step in range(STEPS):
            share = (low + high) / 2 if low else 0.8
            # A stall of the machine of a tenth of a second fails ten seconds of load: what fails is offered again.
            if any(self._in_time(contestant, share * capacity, deadline, seed) for seed in (step, STEPS + step)):
                low = share
            else:
                high = share
                low = low if low or step else 0.01
        return low

    def _in_time(self, contestant: Contestant, rate: float, deadline: float, seed: int) -> bool:
        found = self.offered(contestant, rate, deadline, seed)
        return bool(found["good"] >= 0.99 * found["due"])

    def _load(self, contestant: Contestant, shape: Shape, slo_ms: float | None) -> dict[str, Any]:
        with self._serving(contestant, slo_ms) as server, tempfile.TemporaryDirectory() as work:
            samples = Path(work) / "samples"
            http_samples(samples, self._served, contestant.wires["binary"], server.start.port)
            finish(start(self._program, server.start.port, "http", samples, 1.0, Shape(8)))  # warm
            return finish(start(self._program, server.start.port, "http", samples, self._seconds, shape))

    @contextlib.contextmanager
    def _serving(self, contestant: Contestant, slo_ms: float | None) -> Iterator[Server]:
        with serving(contestant, self._served, "binary", self._build, slo_ms=slo_ms) as server:
            yield server


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table: one row for each server and deadline."""
    shares = sorted({each["share"] for each in found if "share" in each})
    head = "| server | deadline | " + " | ".join(f"{share:g}x" for share in shares) + " | highest rate |"
    rows = [head, "|---" * (len(shares) + 3) + "|"]
    for name, deadline in dict.fromkeys((each["server"], each["deadline_ms"]) for each in found):
        mine = [each for each in found if (each["server"], each["deadline_ms"]) == (name, deadline)]
        by_share = {each["share"]: each for each in mine if "share" in each}
        cells = [
            f"{by_share[share]['goodput']:.2f} ({by_share[share]['p99_ms']:.0f} ms)" if share in by_share else ""
            for share in shares
        ]
        highest = next((f"{each['highest']:.2f}" for each in mine if "highest" in each), "")
        rows.append(" | ".join([f"| {name}", f"{deadline:g} ms", *cells, f"{highest} |"]))
    return "\n".join(rows)


def main() -> None:
    """Measure all; print a table of goodput (and the p99 of the answers)."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.overload", description=__doc__)
    parser.add_argument("--servers", default=",".join(servers()), help="comma-separated")
    parser.add_argument("--model", default="wide", help="tiny or wide, whose answers are equal in every batch")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)))
    parser.add_argument("--deadlines", default=",".join(map(str, DEADLINES)), help="in ms")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    options = parser.parse_args()
    build = options.build.absolute()
    bench = Bench(model(options.model, build), build, options.seconds)
    chosen = [servers()[name] for name in options.servers.split(",")]
    for contestant in [each for each in chosen if each.missing(build)]:
        print(f"{contestant.name} is left out: {contestant.missing(build)}", file=sys.stderr)
        chosen.remove(contestant)
    capacity = bench.capacity(servers()["ingot"])
    print(f"capacity: {capacity:.0f} a second", file=sys.stderr, flush=True)
    found: list[dict[str, Any]] = []
    for deadline in map(float, options.deadlines.split(",")):
        for contestant in chosen:
            about = {"server": contestant.name, "deadline_ms": deadline, "capacity": capacity}
            for share in map(float, options.shares.split(",")):
                load = bench.offered(contestant, share * capacity, deadline, round(10 * share))
                goodput = load["good"] / load["seconds"] / capacity
                found.append({**about, "share": share, "goodput": goodput, **load})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
            found.append({**about, "highest": bench.highest(contestant, capacity, deadline)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    if wrong := [each for each in found if each.get("wrong")]:
        raise SystemExit(f"wrong answers: {wrong}")


if __name__ == "__main__":
    main()
