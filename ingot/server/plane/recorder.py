"""Writes some of the live requests and their responses to a folder, for calibration.

    FOLDER/<model>/<version>/NNNNNN.safetensors     cases as ingot.model_store.format.goldens keeps them

A file is named after the number of cases that were recorded before it, so that a later run continues counting.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import IO

from ingot.errors import InvalidArchive, InvalidArgument, write_error
from ingot.model_store import Golden
from ingot.model_store.blobs.files import atomic_file
from ingot.model_store.format import goldens
from ingot.runtime import Metrics
from ingot.runtime.scheduling.entry import size_of

log = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_FLUSH_SECONDS = 5.0
_CASES_A_FILE = 64
_BYTES_A_FILE = 4 << 20  # encoding holds the interpreter lock, so files are kept small
# Limits of the queue: in requests, and in bytes that they keep in memory.
_MAX_WAITING = 1024
_MAX_WAITING_BYTES = 64 << 20

_Key = tuple[str, str]  # a model and its version


@dataclass
class _Recorded:
    """One model's version: the cases in its folder, and those to be written there."""

    folder: Path
    cases: int = 0
    nbytes: int = 0
    waiting: list[Golden] = field(default_factory=list)
    waiting_bytes: int = 0


class Recorder:
    """Writes a random share of the requests in a background thread; never slows or fails a request.

    Requests that do not fit into its bounded queue, or cannot be written, are dropped and counted.

    Args:
        folder: created if it does not exist, for this user alone.
        share: which share of the requests is recorded.
        limit: most requests of a model's version, including those of earlier runs in the folder.
        limit_bytes: the same in bytes of their arrays.
        metrics: where to count.

    Raises:
        InvalidArgument: the folder cannot be written, or another server records there.
    """

    def __init__(self, folder: Path, share: float, limit: int, limit_bytes: int, metrics: Metrics):
        self._folder = folder
        self._share = share
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._metrics = metrics
        self._queue: SimpleQueue[tuple[_Key, Golden, int] | None] = SimpleQueue()
        self._lock = Lock()
        self._waiting = 0
        self._waiting_bytes = 0
        self._recorded: dict[_Key, _Recorded] = {}
        self._full: set[_Key] = set()
        self._lock_file = _claim(folder)
        self._thread = Thread(target=self._loop, name="ingot-recorder", daemon=True)
        self._thread.start()

    def offer(self, model: str, version: str, case: Golden) -> None:
        """Queue a request and its response, or not. They are not copied, so the arrays must not change afterwards.

        Args:
            model: its name.
            version: its version.
            case: the inputs and outputs of a graph, or the raw inputs and answers of steps.
        """
        key = (model, version)
        if key in self._full or random.random() >= self._share:
            return
        sides = case.inputs, case.outputs, case.raw, case.answers
        size = sum(size_of(array) for arrays in sides for array in arrays.values())
        with self._lock:
            accepted = self._waiting < _MAX_WAITING and self._waiting_bytes + size <= _MAX_WAITING_BYTES
            if accepted:
                self._waiting += 1
                self._waiting_bytes += size
        if accepted:
            self._queue.put((key, case, size))
        else:
            self._metrics.recorded_dropped.labels(*key).inc()

    def close(self, timeout: float | None = None) -> None:
        """Write the queue and stop, within ``timeout`` seconds. Closing twice does nothing."""
        self._queue.put(None)
        self._thread.join(timeout)
        self._lock_file.close()

    def _loop(self) -> None:
        due = time.monotonic() + _FLUSH_SECONDS
        while True:
            with contextlib.suppress(Empty):
                item = self._queue.get(timeout=max(0.0, due - time.monotonic()))
                if item is None:
                    self._flush_all()
                    return
                self._take(*item)
            if time.monotonic() >= due:
                self._flush_all()
                due = time.monotonic() + _FLUSH_SECONDS

    def _take(self, key: _Key, case: Golden, size: int) -> None:
        try:
            recorded = self._recorded_of(key)
        except OSError as error:
            log.error("a request could not be recorded: %s", error)
            self._metrics.recorded_dropped.labels(*key).inc()
            self._release(1, size)
            return
        full = recorded.cases + len(recorded.waiting) >= self._limit
        full = full or recorded.nbytes + recorded.waiting_bytes + size > self._limit_bytes
        if full:
            if key not in self._full:
                self._full.add(key)
                log.info("model %s version %s: the limit of recorded requests is reached", *key)
            self._release(1, size)
            return
        recorded.waiting.append(case)
        recorded.waiting_bytes += size
        if len(recorded.waiting) >= _CASES_A_FILE or recorded.waiting_bytes >= _BYTES_A_FILE:
            self._flush(key, recorded)

    def _recorded_of(self, key: _Key) -> _Recorded:
        if key not in self._recorded:
            self._recorded[key] = _read_recorded(self._folder.joinpath(*key))
        return self._recorded[key]

    def _flush_all(self) -> None:
        for key, recorded in self._recorded.items():
            if recorded.waiting:
                self._flush(key, recorded)

    def _flush(self, key: _Key, recorded: _Recorded) -> None:
        count, size = len(recorded.waiting), recorded.waiting_bytes
        try:
            content = goldens.encode(recorded.waiting)
            for folder in (recorded.folder.parent, recorded.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
            with atomic_file(recorded.folder / f"{recorded.cases:06d}{SUFFIX}", mode=0o600) as stream:
                stream.write(content)
        except Exception as error:  # noqa: BLE001 - a full disk, say, must not end the recording of later requests
            log.error("%d requests could not be recorded in %s: %s", count, recorded.folder, error)
            self._metrics.recorded_dropped.labels(*key).inc(count)
        else:
            recorded.cases += count
            recorded.nbytes += size
            self._metrics.recorded.labels(*key).inc(count)
        recorded.waiting, recorded.waiting_bytes = [], 0
        self._release(count, size)

    def _release(self, count: int, size: int) -> None:
        with self._lock:
            self._waiting -= count
            self._waiting_bytes -= size


def _claim(folder: Path) -> IO[bytes]:
    """Create the folder and return a lock on it, which ends with the process or when it is closed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.fdopen(os.open(folder / ".lock", os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    except OSError as error:
        remedy = "; give --record (in Python record) a folder that this server may write"
        raise write_error(f"requests cannot be recorded in {folder}", error, remedy) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InvalidArgument(
            f"another server records in {folder}; stop it, or give --record (in Python record) another folder"
        ) from error
    return lock


def _read_recorded(folder: Path) -> _Recorded:
    """Return the state of a folder after earlier runs."""
    recorded = _Recorded(folder)
    files = [path for path in folder.glob(f"*{SUFFIX}") if path.stem.isdecimal()]
    if files:
        last = max(files, key=lambda path: int(path.stem))
        try:
            cases = len(goldens.decode(last.read_bytes()))
        except (InvalidArchive, OSError):
            cases = _CASES_A_FILE  # the most that it can hold
        recorded.cases = int(last.stem) + cases
        recorded.nbytes = sum(path.stat().st_size for path in files)
    return recorded
