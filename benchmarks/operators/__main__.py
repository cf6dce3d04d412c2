"""Runs PyTorch's operator and module databases through exporters: ``python -m benchmarks.operators``.

Every operator is exported with a dynamic dimension where it has one, and judged by eager at other sizes and on other
values, infinities and NaN among them. An outcome is written as each operator ends; the same command runs only what
is missing. It needs ``pip install -c constraints.txt -r benchmarks/operators/requirements.txt``.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.coverage.exporters import EXPORTERS
from benchmarks.operators import runner, samples, table
from benchmarks.operators.outcome import Outcome

RESULTS = Path(__file__).parent / "results"
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "bool")


def main() -> None:
    options = _parser().parse_args()
    console = Console()
    exporters = options.exporters.split(",")
    dtypes = options.dtypes.split(",")
    for value, known in ((exporters, tuple(EXPORTERS)), (dtypes, DTYPES)):
        if unknown := set(value) - set(known):
            console.print(f"{', '.join(sorted(unknown))} is unknown; use {', '.join(known)}")
            raise SystemExit(2)
    wanted = options.only.split(",")
    keys = [
        (name, dtype, exporter)
        for exporter in exporters
        for dtype in dtypes
        for name in samples.names(getattr(torch, dtype))[options.start :: options.every]
        if any(fnmatch(name, one) for one in wanted)
    ]
    if not keys:
        console.print(
            f"no operator or module of {', '.join(dtypes)} is called {options.only} from place {options.start} on"
        )
        raise SystemExit(2)
    kept = {item.key: item for item in table.read(options.out)}
    missing = keys if options.again else [key for key in keys if key not in kept]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("Judging", total=len(keys), completed=len(keys) - len(missing))
        for outcome in runner.run(missing, options.jobs, runner.Limits(options.samples, options.seed, options.seconds)):
            kept[outcome.key] = outcome
            table.append(outcome, options.out)
            progress.advance(bar)
            _print(console, outcome)
    table.write(list(kept.values()), options.out)
    for name in exporters:
        counts = Counter(item.status for item in kept.values() if item.exporter == name)
        console.print(f"{name}: {', '.join(f'{count} {status}' for status, count in counts.most_common())}")
    console.print(f"{options.out / 'operators.md'}")


def _print(console: Console, outcome: Outcome) -> None:
    if outcome.status in ("crashed", "wrong", "unexplained"):
        shown = "; ".join(outcome.messages[:1])[:300]
        console.print(f"{outcome.operator}, {outcome.dtype}, {outcome.exporter}: {shown}", markup=False)


def _exporters() -> list[str]:
    known = importlib.util.find_spec("transformers.exporters") if importlib.util.find_spec("transformers") else None
    return [name for name in EXPORTERS if name != "transformers" or known]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=__doc__)
    parser.add_argument("--only", default="*", help="operators or modules, by commas; may hold * and ?")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="datatypes, by commas")
    parser.add_argument("--exporters", default=",".join(_exporters()), help="by commas")
    parser.add_argument("--every", type=int, default=1, help="2 selects every second operator by name, and so on")
    parser.add_argument("--from", type=int, default=0, dest="start", help="place of the first operator by name")
    parser.add_argument("--samples", type=int, default=6, help="samples for each operator and datatype")
    parser.add_argument("--seed", type=int, default=0, help="of the values")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--seconds", type=float, default=120, help="CPU time of one operator with its judging")
    parser.add_argument("--again", action="store_true", help="run also what the results hold already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    return parser


if __name__ == "__main__":
    main()
