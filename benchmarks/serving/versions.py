"""Compare the server of another commit with this tree's: ``python -m benchmarks.serving.versions COMMIT``.

Both serve the same archives with the same interpreter and packages, in turn within each round. The table shows this
tree's throughput divided by the commit's, and the CPU time of a request likewise; over 1 means that this tree's is
larger.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.serving.__main__ import BUILD
from benchmarks.serving.contestants import Ingot, Start
from benchmarks.serving.loads import H2load, Load, WrongAnswer, checked_wrk
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import LOAD_CORE
from benchmarks.serving.rounds import serving

CLIENTS = (1, 8, 32)
MODELS = ("tiny", "wide")


@dataclass(frozen=True)
class Version(Ingot):
    """The server as it is in a folder."""

    folder: str = ""

    def environment(self, start: Start) -> dict[str, str]:
        return {"PYTHONPATH": self.folder}


def main() -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.versions")
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each load")
    options = parser.parse_args()
    build = BUILD.absolute()
    versions = [Version("new", folder=str(Path.cwd())), Version("old", folder=str(_checkout(options.commit, build)))]
    served = [model(name, build) for name in MODELS]
    os.sched_setaffinity(0, {LOAD_CORE})
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = defaultdict(list)
    for number in range(options.rounds):
        for each in served:
            loads = {
                version.name: _measure(version, each, build, options.seconds)
                for version in (versions if number % 2 else versions[::-1])
            }
            for (form, clients), new in loads["new"].items():
                old = loads["old"][form, clients]
                found[each.name, form, clients].append((new.rate / old.rate, new.cpu_us / old.cpu_us))
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
    print("| model | format | clients | throughput, median (lowest to highest) | CPU a request, median |")
    print("|---|---|---|---|---|")
    for (name, form, clients), ratios in found.items():
        rates = [rate for rate, _ in ratios]
        spread = f"{median(rates):.2f} ({min(rates):.2f} to {max(rates):.2f})"
        print(f"| {name} | {form} | {clients} | {spread} | {median(cpu for _, cpu in ratios):.2f} |")


def _measure(version: Version, served: Model, build: Path, seconds: float) -> dict[tuple[str, int], Load]:
    found = {}
    with serving(version, served, "json", build) as server:
        for form, wire in version.wires.items():
            for clients in CLIENTS:
                if form == "grpc":
                    grpc = H2load(served, wire, server.start.grpc_port, server.start.work)
                    found[form, clients] = grpc.load(server.process, clients, seconds)
                else:
                    wrk = checked_wrk(served, wire, server.start.port, server.start.work)
                    found[form, clients] = wrk.load(server.process, clients, seconds)
    return found


def _checkout(commit: str, build: Path) -> Path:
    """Return a folder with the tree of a commit."""
    whole = subprocess.run(["git", "rev-parse", commit], check=True, capture_output=True, text=True).stdout.strip()
    folder = build / "versions" / whole
    if not folder.exists():
        folder.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", whole, "ingot"], check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], check=True, input=archive)
    return folder


if __name__ == "__main__":
    try:
        main()
    except WrongAnswer as error:
        raise SystemExit(str(error)) from error
