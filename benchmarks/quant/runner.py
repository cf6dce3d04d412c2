"""Run every way (see :mod:`benchmarks.quant.ways`) on one case: each makes its model, then all are timed in turn."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.quant import peers
from benchmarks.quant.case import Case
from benchmarks.quant.judge import Judgement, judge
from benchmarks.quant.ways import BASELINE, BATCHES, WAYS, Way
from benchmarks.quant.worker import THREADS

_ROOT = Path(__file__).parents[2]
# Seconds before each turn: threads of the process before may still spin, and would slow the next one.
_PAUSE = 0.02
# Seconds of calls in one turn.
_TURN = 0.1


@dataclass
class Outcome:
    """The outcome of one way on one case.

    ``problem`` is why there is no result, or empty; ``made_in`` is the seconds to make the model, ``size`` its bytes.
    ``milliseconds``, ``speedups`` (over the baseline, medians over rounds) and ``fastest`` (the milliseconds of the
    fastest call, which other load on the machine disturbs least) are by batch size.
    """

    case: str
    way: str
    problem: str = ""
    made_in: float = 0.0
    size: int = 0
    judgement: Judgement | None = None
    milliseconds: dict[int, float] = field(default_factory=dict)
    speedups: dict[int, float] = field(default_factory=dict)
    fastest: dict[int, float] = field(default_factory=dict)

    @property
    def mean_speedup(self) -> float:
        """The geometric mean over the batch sizes; 0 without timings."""
        return float(np.exp(np.mean(np.log(list(self.speedups.values()))))) if self.speedups else 0.0

    @property
    def holds(self) -> bool:
        return self.judgement is not None and self.judgement.holds


@dataclass(frozen=True)
class Settings:
    """How ways are run.

    Attributes:
        cache: folder for environments.
        budget: time that a search may take, such as ``5m``.
        limit: seconds that a way may take to make its model.
        rounds: how often each way has its turn at each batch size.
        reuse: take models that an earlier run has made.
    """

    cache: Path
    budget: str = "5m"
    limit: float = 900
    rounds: int = 15
    reuse: bool = False


class Failed(Exception):
    """A way could not make or run its model."""


def run(
    case: Case, folder: Path, ways: Sequence[str], settings: Settings, progress: Callable[[str], None]
) -> list[Outcome]:
    """Return an outcome for each way, the baseline first; a way that fails has a ``problem``.

    Args:
        case: the model and its data.
        folder: made by :func:`benchmarks.quant.case.prepare`.
        ways: names in :data:`WAYS`; the baseline is added.
        settings: limits and rounds.
        progress: called with the name of each step as it begins.
    """
    chosen = [WAYS[BASELINE], *(WAYS[name] for name in ways if name != BASELINE)]
    outcomes = {way.name: Outcome(case.name, way.name) for way in chosen}
    with ExitStack() as stack:
        workers: dict[str, _Worker] = {}
        expected: Any = None
        for way in chosen:
            progress(f"{case.title}: {way.title}")
            outcome = outcomes[way.name]
            if way.name != BASELINE and outcomes[BASELINE].problem:
                outcome.problem = "not run: there is no baseline to compare it with"
                continue
            try:
                made = _make(way, folder, settings, outcome)
                workers[way.name] = stack.enter_context(_worker(way, folder, made, settings))
                actual = workers[way.name].predict()
                if way.name == BASELINE:
                    expected = actual
                outcome.judgement = judge(case.metric, expected, actual, case.parts.held_out.labels)
            except (Failed, ValueError) as error:
                outcome.problem = str(error)
                workers.pop(way.name, None)
        if workers:
            progress(f"{case.title}: timing")
            _time(workers, outcomes, settings.rounds)
    return list(outcomes.values())


def _make(way: Way, case_folder: Path, settings: Settings, outcome: Outcome) -> Path:
    """Make a way's model in its process, unless it may be reused, and return its folder."""
    folder = case_folder / "ways" / way.name
    done = folder / "seconds"  # written last: it marks a complete model
    if not (settings.reuse and done.exists()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        began = time.perf_counter()
        command = [*_command(way, case_folder, folder, settings), "--prepare", settings.budget]
        log = folder / "log"
        with log.open("wb") as stream:
            try:
                code = subprocess.run(
                    command, stdout=stream, stderr=stream, env=_environment(), timeout=settings.limit
                ).returncode
            except subprocess.TimeoutExpired:
                raise Failed(f"not done after {settings.limit:.0f} s") from None
        if code:
            raise Failed(_last_line(log))
        log.unlink()
        done.write_text(f"{time.perf_counter() - began:.1f}")
    outcome.made_in = float(done.read_text())
    outcome.size = sum(file.stat().st_size for file in folder.rglob(way.files) if file.is_file() and file != done)
    return folder


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line and not line.startswith(" ")]
    return (errors or lines or ["no output"])[-1].strip()[:500]


def _command(way: Way, case_folder: Path, folder: Path, settings: Settings) -> list[str]:
    try:
        python = peers.python_of(way.environment, settings.cache)
    except subprocess.CalledProcessError as error:
        raise Failed(f"requirements-{way.environment}.txt could not be installed") from error
    return [str(python), "-m", "benchmarks.quant.worker", way.name, str(case_folder), str(folder)]


def _environment() -> dict[str, str]:
    own = {"PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": str(THREADS), "PYTHONWARNINGS": "ignore"}
    return {**os.environ, **own}


class _Worker:
    """A process that has a model loaded."""

    def __init__(self, process: subprocess.Popen[str], log: Path):
        self._process = process
        self._log = log

    def read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise Failed(_last_line(self._log))
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **command: Any) -> dict[str, Any]:
        if self._process.stdin:
            with contextlib.suppress(BrokenPipeError):  # it ended; reading then raises its error
                print(json.dumps(command), file=self._process.stdin, flush=True)
        return self.read()

    def predict(self) -> Any:
        """Return the first output for all held-out rows, [rows, values]."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "answers.npy")
            self.ask(do="predict", rows=BATCHES[-1], to=str(path))
            return np.load(path)

    def time(self, rows: int, calls: int) -> list[float]:
        """Return the seconds of each of ``calls`` calls with ``rows`` rows."""
        seconds: list[float] = self.ask(do="time", rows=rows, calls=calls)["seconds"]
        return seconds


@contextmanager
def _worker(way: Way, case_folder: Path, folder: Path, settings: Settings) -> Iterator[_Worker]:
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log")
        with log.open("wb") as errors:
            process = subprocess.Popen(
                _command(way, case_folder, folder, settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                text=True,
            )
        try:
            worker = _Worker(process, log)
            worker.read()  # its first line: the model is loaded
            yield worker
        finally:
            process.kill()
            process.communicate()


def _time(workers: dict[str, _Worker], outcomes: dict[str, Outcome], rounds: int) -> None:
    """Give each way its turn, round by round: other load on the machine affects all of them alike."""
    for rows in BATCHES:
        calls = {name: max(3, min(200, int(_TURN / median(worker.time(rows, 3))))) for name, worker in workers.items()}
        taken: dict[str, list[float]] = {name: [] for name in workers}
        fastest = dict.fromkeys(workers, float("inf"))
        for _ in range(rounds):
            for name, worker in workers.items():
                time.sleep(_PAUSE)
                seconds = worker.time(rows, calls[name])
                taken[name].append(median(seconds))
                fastest[name] = min(fastest[name], *seconds)
        base = taken[BASELINE]
        for name, times in taken.items():
            outcomes[name].fastest[rows] = 1000 * fastest[name]
            outcomes[name].milliseconds[rows] = 1000 * median(times)
            outcomes[name].speedups[rows] = median(was / now for was, now in zip(base, times, strict=True))
