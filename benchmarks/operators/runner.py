"""Run operators in child processes, several in each, because PyTorch's databases take seconds to load."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from benchmarks.coverage.runner import wait
from benchmarks.operators.outcome import MARK, Outcome

Key = tuple[str, str, str]
"""Operator, datatype and exporter."""

_TOGETHER = 100


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
                names = _child(names, dtype, exporter, limits, found, stopped)
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
    names: list[str],
    dtype: str,
    exporter: str,
    limits: Limits,
    found: queue.SimpleQueue[Outcome | None],
    stopped: threading.Event,
) -> list[str]:
    """Run a process over operators; if it ends early, count the one at fault, and return those after it."""
    numbers = map(str, (limits.samples, limits.seed, limits.seconds))
    command = [sys.executable, "-m", "benchmarks.operators.worker", exporter, dtype, *numbers, *names]
    read, write = os.pipe()
    done, last = 0, "no output"
    with os.fdopen(read, errors="replace") as lines, ThreadPoolExecutor(1) as pool:
        ended = pool.submit(_wait, command, write, 4 * limits.seconds * len(names))
        for line in lines:
            if stopped.is_set():
                lines.close()  # the process ends when it writes the next outcome
                break
            if line.startswith(MARK):
                found.put(Outcome(**json.loads(line.removeprefix(MARK))))
                done += 1
            else:
                last = line.strip() or last
        code = ended.result()
    rest = names[done:]
    if rest and not stopped.is_set():
        outcome = Outcome(rest[0], dtype, exporter)
        outcome.add("crashed", message=f"the process ended with {code}: {last}")
        found.put(outcome)
    return rest[1:]


def _wait(command: list[str], output: int, limit: float) -> int | None:
    try:
        return wait(command, output, limit)
    finally:
        os.close(output)
