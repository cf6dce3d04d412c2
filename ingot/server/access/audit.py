"""The audit log: refused requests, and changes of the rules, as lines of JSON.

Lines are written by a thread, so that a slow disk delays no request. A flood of refused requests is cut to a rate; the
suppressed lines are counted. The file is opened again when it was moved, so any program can rotate it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ingot.errors import write_error
from ingot.faults import rate_limited_logger
from ingot.runtime import Metrics
from ingot.server.access.grants import Refusal
from ingot.server.access.keys import hidden
from ingot.server.access.peers import Peer

log = rate_limited_logger(__name__)

# Lines of refused requests: so many at once, and then so many a second, for each process that accepts connections.
_BURST = 100
_RATE = 10.0
_MAX_WAITING = 1000
_MAX_TARGET = 200
_CLOSE_SECONDS = 2.0
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK


class AuditLog:
    """Appends lines to a file, which several processes may share.

    Args:
        path: the file; it is created with access for its owner only.
        metrics: where suppressed and lost lines are counted.
        clock: returns seconds.

    Raises:
        InvalidArgument: the file cannot be written.
        StorageFull: the disk is full.
    """

    def __init__(self, path: Path, metrics: Metrics, clock: Callable[[], float] = time.monotonic):
        self._path = path.expanduser()
        self._metrics = metrics
        self._clock = clock
        self._tokens, self._since = float(_BURST), clock()
        self._suppressed = 0
        self._handle = check_writable(self._path)
        self._torn = False
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="ingot-audit", daemon=True)
        self._thread.start()

    def refused(self, refusal: Refusal, protocol: str, target: str, peer: Peer) -> None:
        """Write that a request was refused; the line has neither its key nor its query.

        Args:
            refusal: why.
            protocol: ``http`` or ``grpc``.
            target: the path of the request.
            peer: where it came from.
        """
        if not self._allowed():
            self._suppressed += 1
            self._metrics.audit_suppressed.inc()
            return
        details = {"protocol": protocol, "target": hidden(target[:_MAX_TARGET]), "address": peer.address}
        self.write("request", "refused", reason=refusal.reason, client=refusal.client, **details)

    def write(self, action: str, result: str, **details: str | int) -> None:
        """Write a line; empty details are left out."""
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        content = {"time": now, "action": action, "result": result}
        content |= {name: value for name, value in details.items() if value != ""}  # type: ignore[misc]
        try:
            self._lines.put_nowait(json.dumps(content).encode() + b"\n")
        except queue.Full:
            self._metrics.audit_lost.inc()

    def summarize(self) -> None:
        """Write how many lines were suppressed, once the flood is over; call it at intervals."""
        if self._suppressed and self._allowed():
            self.write("request", "refused", suppressed=self._suppressed)
            self._suppressed = 0

    def close(self) -> None:
        """Write the waiting lines and close the file."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        self._thread.join(_CLOSE_SECONDS)

    def _allowed(self) -> bool:
        now = self._clock()
        self._tokens = min(float(_BURST), self._tokens + (now - self._since) * _RATE)
        self._since = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._append(line)
            except OSError as error:
                self._metrics.audit_lost.inc()
                log.error("a line of the audit log was lost: %s: %s", self._path, error.strerror or error)
        os.close(self._handle)

    def _append(self, line: bytes) -> None:
        if self._moved():
            handle = os.open(self._path, _FLAGS, 0o600)
            os.close(self._handle)
            self._handle, self._torn = handle, False
        data = b"\n" + line if self._torn else line  # after a part of a line, when the disk was full
        written = os.write(self._handle, data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(None, "only a part of the line could be written")

    def _moved(self) -> bool:
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return True
        used = os.fstat(self._handle)
        return (found.st_dev, found.st_ino) != (used.st_dev, used.st_ino)


def check_writable(path: Path) -> int:
    """Open the file, which is created if needed, and return its descriptor.

    Raises:
        InvalidArgument: it cannot be written.
        StorageFull: the disk is full.
    """
    try:
        return os.open(path.expanduser(), _FLAGS, 0o600)
    except OSError as error:
        raise write_error(f"the audit log {path} cannot be written", error) from error
