"""Processes that serve a model, and the memory that they share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import ingot
from benchmarks.model_store.common import Layers
from benchmarks.model_store.worker import DEADLINE
from ingot.tensors import Array

PROCESSES = 4
_RESULT = re.compile(r'^ingot_derived_cache_total\{[^}]*result="(\w+)"[^}]*\} 1', re.MULTILINE)

Process = contextlib.AbstractContextManager[int]


class Worker:
    """A process of :mod:`benchmarks.model_store.worker`.

    ``seconds`` is its load time, ``answers`` those before and after it settled, and ``result`` the state of the derived
    cache.
    """

    def __init__(self, way: str, source: Path, width: int):
        command = [sys.executable, "-m", "benchmarks.model_store.worker", way, str(source), str(width)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        told = _read(self._process)
        self.seconds: dict[str, float] = told["seconds"]
        self.answers = [np.asarray(answer, np.float32) for answer in told["answers"]]
        self.result: str | None = told["result"]

    def time(self, rows: int) -> float:
        """Return the seconds of one call."""
        print(rows, file=self._process.stdin, flush=True)
        return float(_read(self._process))

    def close(self) -> None:
        _end(self._process)

    def __enter__(self) -> int:
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        self.close()


def check(worker: Worker, expected: Array, result: str | None) -> Worker:
    """Return the worker if it answers as it should, before and after it settled, and loaded as it should.

    Raises:
        SystemExit: it does not; it is closed.
    """
    scale = float(np.abs(expected).max())
    why = ""
    if not all(np.allclose(answer, expected, rtol=1e-3, atol=1e-4 * scale) for answer in worker.answers):
        why = "an answer differs from that of the protobuf file"
    elif worker.result != result:
        why = f"the derived cache had {worker.result!r} where {result!r} was to be measured"
    if why:
        worker.close()
        raise SystemExit(why)
    return worker


@contextlib.contextmanager
def serving(store: Path, layers: Layers, *, cached: bool) -> Iterator[int]:
    """Run ``ingot serve`` until the block ends; yields its process when it has answered and settled."""
    command = [sys.executable, "-m", "ingot", "serve", "layers:1", "--store", str(store), "--device", "cpu", "--json"]
    command += ["--http-port", "0", "--grpc-port", "0", "--derived-cache" if cached else "--no-derived-cache"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with ingot.Client(_read(process)["http"]) as client:
            client.infer("layers", {"x": layers.inputs(1)})
            if cached:
                _wait_for_hit(client)
            client.infer("layers", {"x": layers.inputs(1)})
        yield process.pid
    finally:
        process.terminate()
        _end(process)


def memory(start: Callable[[], Process]) -> tuple[int, int]:
    """Return the bytes of one process and those of :data:`PROCESSES`, pages that they share counted once."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(start())
        one = _memory([first])
        return one, _memory([first, *(stack.enter_context(start()) for _ in range(PROCESSES - 1))])


def forget(folder: Path) -> None:
    """Drop all files of a folder from the page cache.

    Raises:
        SystemExit: the first page of one is still there, as it is where files are kept in memory only.
    """
    os.sync()  # dirty pages cannot be dropped
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                if _in_memory(file.fileno()):
                    raise SystemExit(f"{path} cannot be dropped from memory; set TMPDIR to a folder on a disk")


def _in_memory(file: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False


def _wait_for_hit(client: ingot.Client) -> None:
    end = time.monotonic() + DEADLINE
    while not (found := _RESULT.findall(client.metrics())):
        if time.monotonic() > end:
            raise SystemExit("the server did not settle")
        time.sleep(0.05)
    if found != ["hit"]:
        raise SystemExit(f"the server's derived cache had {found} where a hit was to be measured")


def _memory(processes: Sequence[int]) -> int:
    """Return the sum of PSS, in bytes."""
    rolled = (Path(f"/proc/{process}/smaps_rollup").read_text() for process in processes)
    return sum(1024 * int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) for text in rolled)


def _read(process: subprocess.Popen[str]) -> Any:
    timer = threading.Timer(DEADLINE, process.kill)
    timer.start()
    line = process.stdout.readline() if process.stdout else ""
    timer.cancel()
    if not line:
        process.kill()
        process.wait()
        raise SystemExit("a process of the benchmark ended early, or was too slow")
    return json.loads(line)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
