"""Run every case with every exporter, each in a fresh process with bounded time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from benchmarks.coverage.case import Case
from benchmarks.coverage.verdict import Verdict

# One thread each, so that two runs at a time do not disturb each other; and nothing is fetched.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}


def run(cases: Sequence[Case], exporters: Sequence[str], jobs: int, limit: float) -> Iterator[Verdict]:
    """Yield verdicts as they are reached.

    Args:
        cases: the models to export.
        exporters: names of :data:`benchmarks.coverage.exporters.EXPORTERS`.
        jobs: how many processes run at a time.
        limit: seconds that one process may take.
    """
    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(_run, case, exporter, limit) for case in cases for exporter in exporters]
        try:
            for task in as_completed(tasks):
                yield task.result()
        finally:
            for task in tasks:
                task.cancel()


def _run(case: Case, exporter: str, limit: float) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "verdict.json"), Path(folder, "log")
        command = [sys.executable, "-m", "benchmarks.coverage.exporters", case.name, exporter, str(out)]
        with log.open("wb") as stream:
            code = wait(command, stream.fileno(), limit)
        if out.exists():
            return Verdict(**json.loads(out.read_text()))
        verdict = Verdict(case.name, case.family, exporter, seconds=limit if code is None else 0.0)
        if code is None:
            verdict.message = f"not done after {limit:.0f} s"
        else:
            lines = log.read_text(errors="replace").strip().splitlines()
            verdict.message = f"the process ended with {code}: {lines[-1] if lines else 'no output'}"
        return verdict


def wait(command: list[str], output: int, limit: float) -> int | None:
    """Return a process's exit code, or None if it had to be stopped together with its children."""
    environment = {**os.environ, **_ENVIRONMENT}
    process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
