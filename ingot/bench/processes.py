"""The processes that send the load, and what they report."""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from ingot.bench.plan import Plan, Start
from ingot.errors import InternalError, Unavailable

Seconds = npt.NDArray[np.float64]

# Seconds between the moment at which all processes are ready and the first request.
_LEAD = 0.1


@dataclass(frozen=True, kw_only=True)
class Window:
    """The answers, failures and times of one part of a run.

    Attributes:
        seconds: its length.
        latencies: of answered requests, from the time at which each was due.
        delays: from then until each was sent.
        first: from then until the first piece of each answer arrived, if answers are streams.
        gaps: the mean time between two tokens of each answer of two tokens or more.
        tokens: of all answers.
        errors: requests that failed, by reason.
        overdue: requests that are open for longer than the plan's limit at the end.
        waited: requests that were due while all connections were in use.
        cpu: the largest share of a core that one of the load generator's processes used.
    """

    seconds: float
    latencies: Seconds
    delays: Seconds
    first: Seconds = field(default_factory=lambda: np.empty(0))
    gaps: Seconds = field(default_factory=lambda: np.empty(0))
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    overdue: int = 0
    waited: int = 0
    cpu: float = 0.0

    @property
    def rate(self) -> float:
        """Answers per second."""
        return len(self.latencies) / self.seconds

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


def merged(windows: Sequence[Window]) -> Window:
    """Return successive windows as one."""
    return Window(
        seconds=sum(window.seconds for window in windows),
        latencies=np.concatenate([window.latencies for window in windows]),
        delays=np.concatenate([window.delays for window in windows]),
        first=np.concatenate([window.first for window in windows]),
        gaps=np.concatenate([window.gaps for window in windows]),
        tokens=sum(window.tokens for window in windows),
        errors=sum((window.errors for window in windows), Counter()),
        overdue=windows[-1].overdue,
        waited=sum(window.waited for window in windows),
        cpu=max(window.cpu for window in windows),
    )


def split(plan: Plan, processes: int) -> list[Plan]:
    """Return the plans of several processes that send the load of one plan together."""
    processes = max(1, min(processes, plan.connections))
    return [
        replace(
            plan,
            requests=plan.requests[number::processes] or plan.requests,
            clients=_part(plan.clients, processes, number),
            connections=_part(plan.connections, processes, number),
            rate=plan.rate / processes,
            times=plan.times[number::processes],
            seed=plan.seed + number,
        )
        for number in range(processes)
    ]


class Processes:
    """Running processes of the load generator, one for each plan; leaving the ``with`` block ends them.

    Raises:
        Unavailable: the server cannot be reached, or speaks another protocol.
    """

    def __init__(self, plans: Sequence[Plan]):
        self._plans = plans
        self._exit = contextlib.ExitStack()
        self._running: list[_Process] = []

    def __enter__(self) -> Processes:
        with self._exit:
            folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="ingot-bench-")))
            for number, plan in enumerate(self._plans):
                process = _Process(plan, folder / str(number))
                self._exit.callback(process.end)
                self._running.append(process)
            for process in self._running:
                process.read()
            begin = time.perf_counter() + _LEAD
            for process in self._running:
                process.begin(begin)
            self._exit = self._exit.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def window(self) -> Window:
        """Wait for the end of the next window, and return it."""
        parts = [process.window() for process in self._running]
        return replace(
            merged(parts),
            seconds=max(part.seconds for part in parts),
            overdue=sum(part.overdue for part in parts),
        )


class _Process:
    def __init__(self, plan: Plan, file: Path):
        self._file = file
        self._columns = 5 if plan.streams else 3
        self._last = 0.0
        self._cpu = 0.0
        self._read = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ingot.bench.generator"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._input, self._output = cast(IO[bytes], self._process.stdin), cast(IO[bytes], self._process.stdout)
        with contextlib.suppress(BrokenPipeError):  # read() reports it
            self._input.write(pickle.dumps(Start(plan=plan, file=file)))
            self._input.flush()

    def begin(self, at: float) -> None:
        self._last = at
        self._input.write(f"{at!r}\n".encode())
        self._input.flush()

    def read(self) -> dict[str, Any]:
        """Return the next report."""
        line = self._output.readline()
        if not line:
            raise InternalError("the load generator ended; its error is above")
        report: dict[str, Any] = json.loads(line)
        if failed := report.get("failed"):
            raise Unavailable(f"cannot send load to the server: {failed}")
        return report

    def window(self) -> Window:
        """Return the next window."""
        report = self.read()
        count = report["answered"]
        times = np.fromfile(self._file, dtype=np.float64, count=self._columns * count, offset=self._read)
        self._read += times.nbytes
        seconds, cpu = report["end"] - self._last, report["cpu"] - self._cpu
        self._last, self._cpu = report["end"], report["cpu"]
        due, sent, answered, *streams = times.reshape(self._columns, count)
        first, tokens = streams if streams else (np.empty(0), np.empty(0))
        several = tokens > 1
        return Window(
            seconds=seconds,
            latencies=answered - due,
            delays=sent - due,
            first=first - due if streams else first,
            gaps=(answered - first)[several] / (tokens[several] - 1) if streams else first,
            tokens=int(tokens.sum()),
            errors=Counter(report["errors"]),
            overdue=report["overdue"],
            waited=report["waited"],
            cpu=cpu / seconds if seconds > 0 else math.nan,
        )

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()


def _part(total: int, parts: int, number: int) -> int:
    return total // parts + (number < total % parts)
