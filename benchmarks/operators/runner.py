"""Run operators in child processes, several in each, because PyTorch's databases take seconds to load."""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from benchmarks.coverage.runner import wait
from benchmarks.operators.outcome import Outcome

Key = tuple[str, str, str]
"""Operator, datatype and exporter."""

_TOGETHER = 25


@dataclass(frozen=True)
class Limits:
    """Samples for each operator, the seed of their values, and the CPU seconds of one operator."""

    samples: int
    seed: int
    seconds: float


def run(keys: Sequence[Key], jobs: int, limits: Limits) -> Iterator[Outcome]:
    """Yield outcomes as they are reached."""
    found: queue.SimpleQueue[Outcome | None] = queue.SimpleQueue()
    stopped = threading.Event()
    parts = [
        ([name for name, _, _ in chunk], dtype, exporter)
        for (exporter, dtype), own in groupby(keys, lambda key: (key[2], key[1]))
        for chunk in _chunks(list(own))
    ]

    def work(names: list[str], dtype: str, exporter: str) -> None:
        try:
            while names and not stopped.is_set():
                names = _child(names, dtype, exporter, limits, found)
        finally:
            found.put(None)

    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(work, *part) for part in parts]
        try:
            for _ in tasks:
                while (outcome := found.get()) is not None:
                    yield outcome
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)
        for task in tasks:
            task.result()


def _chunks(keys: list[Key]) -> Iterator[list[Key]]:
    for first in range(0, len(keys), _TOGETHER):
        yield keys[first : first + _TOGETHER]


def _child(
    names: list[str], dtype: str, exporter: str, limits: Limits, found: queue.SimpleQueue[Outcome | None]
) -> list[str]:
    """Run a process over operators; if it ends early, count the one at fault, and return those after it."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "outcomes"), Path(folder, "log")
        numbers = map(str, (limits.samples, limits.seed, limits.seconds))
        command = [sys.executable, "-m", "benchmarks.operators.worker", exporter, dtype, *numbers, str(out), *names]
        with log.open("wb") as stream:
            code = wait(command, stream.fileno(), 4 * limits.seconds * len(names))
        lines = out.read_text().splitlines() if out.exists() else []
        for line in lines:
            found.put(Outcome(**json.loads(line)))
        rest = names[len(lines) :]
        if rest:
            printed = log.read_text(errors="replace").strip().splitlines()
            outcome = Outcome(rest[0], dtype, exporter)
            outcome.add("crashed", message=f"the process ended with {code}: {printed[-1] if printed else 'no output'}")
            found.put(outcome)
        return rest[1:]
