"""Which layers of MiniLM must stay in floating point: ``python -m benchmarks.quant.sensitivity [--cache FOLDER]``.

Ingot's search is compared with quantizing one layer at a time: the time of both, and whether they find the same layers.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.quant.__main__ import CACHE
from benchmarks.quant.case import CASES, prepare
from benchmarks.quant.ways import CaseFolder
from ingot.export import export_model
from ingot.model_store import BlobFolder
from ingot.quant import StaticInt8
from ingot.quant.data.samples import Samples
from ingot.quant.graph.source import Source
from ingot.quant.measure.runner import TrialRunner
from ingot.quant.metric import parse_metric
from ingot.quant.schemes.plan import Plan
from ingot.quant.search import sensitivity
from ingot.quant.search.search import fewest

Search = Callable[[Path], Collection[str]]
"""From a case's folder to the names of the layers that matter."""

DROP = 0.004
"""What the mean cosine may lose. Static int8 of all layers loses some .008 here, so that some must stay."""

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


class _Task:
    """MiniLM with static int8, prepared for both searches."""

    def __init__(self, folder: Path):
        content = next(case for case in CASES if case.name == "minilm")
        found = CaseFolder(folder)
        example = {name: torch.from_numpy(array[:2]) for name, array in found.calibration(2)[0].items()}
        module = content.module(folder / "weights.pth")
        archive = export_model(module, example, inputs=content.inputs, output_names=["output"], name="minilm")
        self.archive = archive.copy_to(BlobFolder.scratch())
        source = Source(self.archive.variant())
        first, second = Samples.read(source.signature, folder / "calibration.npz").split(0.5, 0)
        metric = parse_metric(None, source.signature)
        self.runner = TrialRunner(
            source,
            calibration=first,
            evaluation=second,
            metric=metric,
            batches=(1,),
            threads=None,
            progress=lambda step: None,
        )
        self.plan = StaticInt8().plan(source)
        self.samples = first
        _ = self.runner.seen  # ranges are the same for both, so learning them is timed for neither

    def holds(self, kept: Sequence[str]) -> bool:
        """Return whether the plan with these layers kept is exact enough."""
        return 1 - self.cosine(self.plan.keep(kept)) <= DROP

    def cosine(self, plan: Plan) -> float:
        """Return the mean cosine of a plan's answers to the original's."""
        built = self.runner.build(plan, BlobFolder.scratch())
        with contextlib.closing(built.load()) as engine:
            return self.runner.compare(engine)[0].after.value


def searches() -> tuple[Search, Search]:
    """Return Ingot's search and one at a time; both keep the fewest of the layers that they rank first."""
    task: list[_Task] = []

    def made(folder: Path) -> _Task:
        if not task:
            task.append(_Task(folder))
        return task[0]

    def ours(folder: Path) -> Collection[str]:
        found = made(folder)
        noises = sensitivity.rank(found.runner.source, found.plan, found.runner.seen, found.samples)
        return _fewest(found, [noise.layer for noise in noises])

    def one_by_one(folder: Path) -> Collection[str]:
        found = made(folder)
        alone = {name: found.cosine(replace(found.plan, schemes={name: "static"})) for name in found.plan.schemes}
        return _fewest(found, sorted(alone, key=lambda name: alone[name]))

    return ours, one_by_one


def _fewest(task: _Task, order: Sequence[str]) -> Collection[str]:
    count = fewest(len(order), lambda count: task.holds(order[:count]))
    return order[:count] if count is not None else order


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quant.sensitivity", description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for weights and data")
    options = parser.parse_args()
    minilm = next(case for case in CASES if case.name == "minilm")
    ours, one_by_one = searches()
    folder = prepare(minilm, options.cache)
    ours(folder)  # prepares both, and warms them up
    found = compare(ours, one_by_one, folder)
    console = Console()
    console.print(f"Ingot: {found.seconds:.1f} s, {len(found.found)} layers: {', '.join(sorted(found.found))}")
    console.print(f"one at a time: {found.one_by_one_seconds:.1f} s, {len(found.expected)} layers")
    console.print(f"{found.ratio:.2f} of the time, {'same' if found.found == found.expected else 'other'} layers")


if __name__ == "__main__":
    main()
