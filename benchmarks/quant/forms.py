"""CPU time of the forms that Ingot's search tries: ``python -m benchmarks.quant.forms [--only NAME] [--without-amx]``.

On a shared machine wall times are noisy, and the search's own choice changes from run to run. Here each form of a model
is called on one thread, and the least CPU time of a call counts. The table's heading names the processor. Models and
data are those of ``python -m benchmarks.quant``.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.quant import judge, processor, table
from benchmarks.quant.__main__ import CACHE
from benchmarks.quant.case import CASES, Case, prepare
from benchmarks.quant.ways import CaseFolder
from ingot.export import export_model
from ingot.model_store import Archive, BlobFolder
from ingot.quant.config import installed
from ingot.quant.data.samples import Samples
from ingot.quant.graph.source import Source
from ingot.quant.measure.runner import TrialRunner
from ingot.quant.metric import parse_metric
from ingot.quant.search.families import families
from ingot.runtime import Engine
from ingot.runtime.machine import devices
from ingot.runtime.profiling import profile

BATCHES = (1, 8)
_CALLS = 12


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quant.forms", description=__doc__)
    parser.add_argument("--only", default="resnet,minilm,mlp", help="names of models, with commas")
    parser.add_argument("--without-amx", action="store_true", help="as on a processor without matrix units")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for weights and data")
    options = parser.parse_args()
    if options.without_amx:
        processor.deny_amx()
    print(f"{devices.describe()}; {processor.describe(not options.without_amx)}; one thread")
    for case in CASES:
        if case.name in options.only.split(","):
            print(f"\n{case.title}\n")
            head = ("form", "drop", "holds", *(f"CPU speed-up at batch {rows}" for rows in BATCHES))
            print("\n".join(table.rows(head, _forms(case, prepare(case, options.cache)))), flush=True)


def _forms(case: Case, folder: Path) -> Iterator[tuple[str, ...]]:
    """Yield each form's name, drop, whether that is within the budget, and speed-ups."""
    path = folder / "float.ingot"
    if not path.exists():
        export_model(folder / "model.onnx", CaseFolder(folder).calibration(2)[0], name=case.name).save(path)
    archive = Archive.open(path)
    source = Source(Archive.open(path).unpacked().variant())
    labelled = case.metric == "accuracy"
    metric = parse_metric("accuracy:labels=y" if labelled else None, archive.signature)
    data = Samples.read(archive.signature, str(folder / "calibration.npz"))
    learnt, asked = data.split(min(0.5, 256 / data.rows), 0)
    runner = TrialRunner(
        source,
        calibration=learnt,
        evaluation=asked.take(512, 0),
        metric=metric,
        batches=BATCHES,
        threads=1,
        progress=lambda step: None,
    )
    budget = judge.DROP if labelled else 1 - judge.COSINE
    with contextlib.closing(runner):
        base = [_cpu(runner.original, runner, rows) for rows in BATCHES]
        for plan in families(source, True, installed()):
            built = runner.build(plan, BlobFolder.scratch(), link=False)
            with contextlib.closing(built.load(1)) as engine:
                drop = runner.compare(engine)[0].drop.value
                times = [_cpu(engine, runner, rows) for rows in BATCHES]
            speedups = (f"{was / now:.2f}" for was, now in zip(base, times, strict=True))
            yield (plan.name, f"{drop:.4f}", "yes" if drop <= budget else "no", *speedups)


def _cpu(engine: Engine, runner: TrialRunner, rows: int) -> float:
    """Return the least CPU seconds of a call."""
    inputs = profile.repeat(runner.source.signature, runner.example, rows)
    least = float("inf")
    for _ in range(_CALLS):
        start = time.process_time()
        engine.run(inputs)
        least = min(least, time.process_time() - start)
    return least


if __name__ == "__main__":
    main()
