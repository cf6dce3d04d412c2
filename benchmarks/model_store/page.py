"""Common parts of the result pages: ratios, the machine and versions, and the output folder."""

from __future__ import annotations

import argparse
import datetime
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

from ingot.runtime.machine import devices

RESULTS = Path(__file__).parent / "results"


def ratios(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Divide round by round, so that other load in a round affects both figures."""
    return [value / other for value, other in zip(values, base, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median of all rounds, with the least and the most."""
    middle, least, most = (f"{value:.{digits}f}" for value in (median(values), min(values), max(values)))
    return middle if least == most else f"{middle} ({least}-{most})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def about(options: argparse.Namespace, **versions: str) -> str:
    """Return a line with the machine, versions, options, commit and day of a page."""
    given = " ".join(f"--{key} {value}" for key, value in vars(options).items() if key != "out")
    parts = [f"machine {devices.describe()}", *(f"{name} {number}" for name, number in versions.items())]
    parts += [f"options `{given}`", *_commit(), datetime.datetime.now(datetime.UTC).date().isoformat()]
    return "; ".join(parts) + "."


def finish(page: str, name: str, out: Path | None) -> None:
    """Print a page, and write it to a folder if there is one."""
    print(page)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(page)


def _commit() -> list[str]:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return []  # a copy without its history
    return [f"commit {found}"]
