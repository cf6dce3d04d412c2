"""Which layers of MiniLM must stay in floating point: ``python -m benchmarks.quant.sensitivity [--cache FOLDER]``.

Ingot's search is held against quantizing one layer at a time: the time of both, and whether they find the same layers.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.quant.__main__ import CACHE
from benchmarks.quant.case import CASES, prepare

Search = Callable[[Path], Collection[str]]
"""From a case's folder to the names of the layers that matter."""

AIM = 0.25
"""The largest share of the time of one at a time."""


@dataclass(frozen=True)
class Comparison:
    """Seconds of both searches, and the layers that each found."""

    seconds: float
    one_by_one_seconds: float
    found: frozenset[str]
    expected: frozenset[str]

    @property
    def ratio(self) -> float:
        return self.seconds / self.one_by_one_seconds

    @property
    def reached(self) -> bool:
        return self.found == self.expected and self.ratio <= AIM


def compare(search: Search, one_by_one: Search, folder: Path) -> Comparison:
    """Run both searches on a case, one after the other."""
    began = time.perf_counter()
    found = frozenset(search(folder))
    middle = time.perf_counter()
    expected = frozenset(one_by_one(folder))
    return Comparison(middle - began, time.perf_counter() - middle, found, expected)


def searches() -> tuple[Search, Search]:
    """Return Ingot's search and one at a time."""
    # HOOK for ingot.quant.sensitivity.
    raise SystemExit("this version of Ingot has no search for sensitive layers")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quant.sensitivity", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for weights and data")
    options = parser.parse_args()
    minilm = next(case for case in CASES if case.name == "minilm")
    found = compare(*searches(), prepare(minilm, options.cache))
    console = Console()
    console.print(f"Ingot: {found.seconds:.1f} s, {len(found.found)} layers: {', '.join(sorted(found.found))}")
    console.print(f"one at a time: {found.one_by_one_seconds:.1f} s, {len(found.expected)} layers")
    console.print(f"{found.ratio:.2f} of the time, {'same' if found.found == found.expected else 'other'} layers")


if __name__ == "__main__":
    main()
