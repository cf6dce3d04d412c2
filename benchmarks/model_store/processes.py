"""Processes that serve a model, and the memory that they share."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ingot
from benchmarks.model_store.common import Layers

PROCESSES = 4

Process = contextlib.AbstractContextManager[int]


class Worker:
    """A process of :mod:`benchmarks.model_store.worker`; ``seconds`` are what its load took."""

    def __init__(self, way: str, source: Path, width: int):
        command = [sys.executable, "-m", "benchmarks.model_store.worker", way, str(source), str(width)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seconds: dict[str, float] = _read(self._process)

    def time(self, rows: int) -> float:
        """Return the seconds of one call."""
        print(rows, file=self._process.stdin, flush=True)
        return float(_read(self._process))

    def close(self) -> None:
        self._process.communicate()

    def __enter__(self) -> int:
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def serving(store: Path, layers: Layers, *, cached: bool) -> Iterator[int]:
    """Run ``ingot serve`` until the block ends; yields its process when it has answered and settled."""
    command = [sys.executable, "-m", "ingot", "serve", "layers:1", "--store", str(store), "--device", "cpu", "--json"]
    command += ["--http-port", "0", "--grpc-port", "0", "--derived-cache" if cached else "--no-derived-cache"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            with ingot.Client(_read(process)["http"]) as client:
                client.infer("layers", {"x": layers.inputs(1)})
                while cached and "ingot_derived_cache_total{" not in client.metrics():
                    pass
                client.infer("layers", {"x": layers.inputs(1)})
            yield process.pid
        finally:
            process.terminate()


def shared(start: Callable[[], Process]) -> float:
    """Return the memory of :data:`PROCESSES` processes, divided by that of one."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start())
        one = _memory([first])
        return _memory([first, *(stack.enter_context(start()) for _ in range(PROCESSES - 1))]) / one


def _memory(processes: Sequence[int]) -> int:
    """Return the memory of processes in kB, shared pages counted once: the sum of their PSS."""
    rolled = (Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes)
    return sum(int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) for text in rolled)


def _read(process: subprocess.Popen[str]) -> Any:
    line = process.stdout.readline() if process.stdout else ""
    if not line:
        raise SystemExit("a process of the benchmark ended early")
    return json.loads(line)
