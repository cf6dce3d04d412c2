"""Runs the coverage benchmark: ``python -m benchmarks.coverage [--only NAME,...] [--limit N] [--jobs 2]``.

Every case is exported by PyTorch's own exporter, by that of transformers and by Ingot, and all files are judged alike.
A whole run writes the tables under ``benchmarks/coverage/results``; ``--update`` adds a part of it.
It needs ``pip install -c constraints.txt -r benchmarks/coverage/requirements.txt``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.coverage import runner, table, zoo
from benchmarks.coverage.exporters import EXPORTERS
from benchmarks.coverage.verdict import Verdict

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _parser().parse_args()
    wanted = options.only.split(",")
    cases = [
        case for case in zoo.CASES if any(fnmatch(text, one) for text in (case.name, case.family) for one in wanted)
    ]
    cases = cases[: options.limit]
    exporters = options.exporters.split(",")
    console = Console()
    if not cases:
        console.print(f"no case or family is called {options.only}")
        raise SystemExit(2)
    whole = len(cases) == len(zoo.CASES) and set(exporters) == set(EXPORTERS)
    folder = options.out or (RESULTS if whole or options.update else None)
    done = {(case.name, exporter) for case in cases for exporter in exporters}
    kept = [verdict for verdict in table.read(folder) if verdict.key not in done] if folder and options.update else []
    verdicts: list[Verdict] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("Exporting", total=len(cases) * len(exporters))
        for verdict in runner.run(cases, exporters, options.jobs, options.seconds):
            verdicts.append(verdict)
            progress.advance(bar)
            if folder is not None:
                table.write([*kept, *verdicts], folder)  # every time, so that an interrupted run leaves results
            if verdict.status != "correct":
                console.print(
                    f"{verdict.name}, {verdict.exporter}: {verdict.status}: {verdict.message[:300]}", markup=False
                )
    for name in exporters:
        counts = Counter(verdict.status for verdict in verdicts if verdict.exporter == name)
        console.print(f"{name}: {', '.join(f'{count} {status}' for status, count in counts.most_common())}")
    if folder is not None:
        console.print(f"{folder / 'coverage.md'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__)
    parser.add_argument("--only", default="*", help="cases or families, by commas; may hold * and ?")
    parser.add_argument("--limit", type=int, help="stop after so many cases")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--exporters", default=",".join(EXPORTERS), help="by commas")
    parser.add_argument("--update", action="store_true", help="keep what the tables hold of other cases and exporters")
    parser.add_argument("--seconds", type=float, default=180, help="limit of one export with its judging")
    parser.add_argument("--out", type=Path, help="folder for the tables")
    return parser


if __name__ == "__main__":
    main()
