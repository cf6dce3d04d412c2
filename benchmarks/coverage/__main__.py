"""Runs the coverage benchmark: ``python -m benchmarks.coverage [--only NAME] [--limit N] [--jobs 2]``.

Every case is exported by PyTorch's own exporter and by Ingot, and both files are judged alike. Without ``--only`` and
``--limit`` the tables under ``benchmarks/coverage/results`` are written anew; ``transformers`` must be installed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.coverage import runner, table, zoo

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _parser().parse_args()
    cases = [case for case in zoo.CASES if any(fnmatch(text, options.only) for text in (case.name, case.family))]
    cases = cases[: options.limit]
    exporters = options.exporters.split(",")
    console = Console()
    if not cases:
        console.print(f"no case or family is called {options.only}")
        raise SystemExit(2)
    whole = len(cases) == len(zoo.CASES) and len(exporters) == 2
    folder = options.out or (RESULTS if whole else None)
    verdicts = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("Exporting", total=len(cases) * len(exporters))
        for verdict in runner.run(cases, exporters, options.jobs, options.seconds):
            verdicts.append(verdict)
            progress.advance(bar)
            if folder is not None:
                table.write(
                    verdicts, folder
                )  # every time: a run that is broken off after an hour has something to show
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
    parser.add_argument("--only", default="*", help="a case or family; may hold * and ?")
    parser.add_argument("--limit", type=int, help="stop after so many cases")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--exporters", default="plain,ingot", help="plain, ingot or both")
    parser.add_argument("--seconds", type=float, default=180, help="limit of one export with its judging")
    parser.add_argument("--out", type=Path, help="folder for the tables")
    return parser


if __name__ == "__main__":
    main()
