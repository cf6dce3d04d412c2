"""The cost of a model in Python: ``python -m benchmarks.serving.python_models``.

Every server runs the same class, which does nearly nothing, on one core, in turn in every round, with its batches as in
``python -m benchmarks.serving``. Printed are medians of the ratios within rounds, so that other work on the machine
affects both. On a busy machine, the CPU time of all processes of a server per request is the reliable figure.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.serving.contestants import PEERS, contestants
from benchmarks.serving.loads import Load, checked_wrk, missing_tools
from benchmarks.serving.models import SPECS, Model
from benchmarks.serving.pairs import build_folder
from benchmarks.serving.processes import LOAD_CORE, NoAnswer
from benchmarks.serving.rounds import serving
from ingot.tensors import Array

OURS = ("ingot", "ingot, compiled")
PEERS_WITH_CLASSES = ("mosec", "litserve", "bentoml", "mlserver", "torchserve")
_FORMATS = ("json", "binary")
_MANY = 32

# The loads of 1 and of many clients in one round.
Pair = tuple[Load, Load]
_COLUMNS: dict[str, Callable[[Pair, Pair], float]] = {
    f"throughput, {_MANY} clients": lambda ours, theirs: ours[1].rate / theirs[1].rate,
    "p50, 1 client": lambda ours, theirs: ours[0].p50_ms / theirs[0].p50_ms,
    f"CPU a request, {_MANY} clients": lambda ours, theirs: ours[1].cpu_us / theirs[1].cpu_us,
    "CPU a request, 1 client": lambda ours, theirs: ours[0].cpu_us / theirs[0].cpu_us,
}


class Empty(Model):
    """The class of ``peers/empty.py``, with the samples of ``tiny``, of which it returns the first ten numbers."""

    def __init__(self) -> None:
        super().__init__(SPECS["tiny"], PEERS)
        self.name, self.path = "empty", PEERS / "empty.py"

    @property
    def source(self) -> list[str]:
        return [f"{self.path}:Empty"]

    @property
    def expected(self) -> Array:
        return np.stack([sample["x"][:10] for sample in self.samples])


def measure(name: str, form: str, served: Model, build: Path, seconds: float) -> Pair:
    """Start a server, load it, and end it.

    Raises:
        NoAnswer: it does not start.
        WrongAnswer: an answer is another request's.
    """
    contestant = contestants()[name]
    with serving(contestant, served, form, build) as server:
        wrk = checked_wrk(served, contestant.wires[form], server.start.port, server.start.work)
        load = partial(wrk.load, server.process, seconds=seconds)
        load(clients=_MANY)  # until compilers and caches have settled
        return load(clients=1), load(clients=_MANY)


def main() -> None:
    """Measure, and print a table."""
    options = _options()
    build, served = build_folder(), Empty()
    ours = [name for name in OURS if _takes_part(name, build)]
    names = [*ours, *(peer for peer in options.peers.split(",") if _takes_part(peer, build))]
    os.sched_setaffinity(0, {LOAD_CORE})
    found: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for number in range(options.rounds):
        for form in _FORMATS:
            for name in names[:: 1 if number % 2 else -1]:
                if form in contestants()[name].wires:
                    pair = measure(name, form, served, build, options.seconds)
                    found[name, form].append(pair)
                    print(f"{number} {name} {form} {_figures(pair)}", file=sys.stderr, flush=True)
    print("\n".join(table(found)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.python_models")
    parser.add_argument("--peers", default=",".join(PEERS_WITH_CLASSES), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each load")
    options = parser.parse_args()
    if missing := missing_tools():
        raise SystemExit(f"install {', '.join(missing)}")
    return options


def _takes_part(name: str, build: Path) -> bool:
    """Return whether a server is installed; say so if it is not."""
    if why := contestants()[name].missing(build):
        print(f"{name} is left out: {why}", file=sys.stderr)
    return not why


def _figures(pair: Pair) -> str:
    return ", ".join(f"{load.rate:.0f}/s p50 {load.p50_ms:.3f} ms {load.cpu_us:.1f} us" for load in pair)


def table(found: Mapping[tuple[str, str], Sequence[Pair]]) -> list[str]:
    """Return the figures of each Ingot divided by those of each peer: medians of the rounds, least and most."""
    lines = [f"| server / peer | format | {' | '.join(_COLUMNS)} |", "|---" * (len(_COLUMNS) + 2) + "|"]
    for (ours, form), (peer, theirs) in product(found, found):
        if ours in OURS and peer not in OURS and form == theirs:
            rounds = list(zip(found[ours, form], found[peer, form], strict=True))
            cells = [_cell([ratio(*each) for each in rounds]) for ratio in _COLUMNS.values()]
            lines.append(f"| {ours} / {peer} | {form} | {' | '.join(cells)} |")
    return lines


def _cell(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


if __name__ == "__main__":
    try:
        main()
    except NoAnswer as error:
        raise SystemExit(str(error)) from error
