"""How log records are written: as lines for people, or as JSON; both name the request that a record is about.

A thread writes them, so that a reader of stderr that stops, or a full disk, delays no request.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Literal, TextIO

import orjson

from ingot.protocol.context import CONTEXT
from ingot.serving.deployment import CHANGES

Format = Literal["human", "json"]

# Bytes of records that may wait to be written, and seconds in which they must be written when the process ends.
_MAX_WAITING = 8 << 20
_CLOSE_SECONDS = 1.0


class _Request(logging.Filter):
    """Adds the request that the current code serves."""

    def filter(self, record: logging.LogRecord) -> bool:
        context = CONTEXT.get()
        identity = {}
        if context is not None:
            identity["request_id"] = context.id.decode()
            if context.traceparent:
                identity["trace_id"] = context.traceparent[3:35].decode()
        record.identity = identity
        return True


class HumanFormatter(logging.Formatter):
    """One line per record, with its fields, except those already in the message, as ``name=value`` behind it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - as logging calls it
        shown = {name: value for name, value in _fields(record).items() if name not in ("method", "path", "status")}
        return " ".join([super().formatMessage(record), *(f"{name}={value}" for name, value in shown.items())])


class JsonFormatter(logging.Formatter):
    """One JSON object per record: ``time``, ``level``, ``logger``, ``message``, and the record's fields."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        content: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(content, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {**getattr(record, "fields", {}), **getattr(record, "identity", {})}


class LogWriter(logging.Handler):
    """Writes records to a stream in a thread; those that find too many bytes waiting are lost, and counted.

    Args:
        stream: written by its file descriptor if it has one: a thread that is blocked in a stream would keep the
            interpreter from ending.

    Attributes:
        on_lost: called in any thread with the number of records that were lost.
    """

    def __init__(self, stream: TextIO):
        super().__init__()
        self.on_lost: Callable[[int], None] = lambda _: None
        self._stream = stream
        self._lines: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        # `_accepted` and `_dropped` are changed under the handler's lock, `_written` by the writer.
        self._accepted = self._written = 0
        self._dropped = 0
        threading.Thread(target=self._run, name="ingot-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record."""
        line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        if self._accepted - self._written + len(line) > _MAX_WAITING:
            self._dropped += 1
            self.on_lost(1)
            return
        if self._dropped:
            line = f"{self._dropped} log records were lost, as stderr did not take them fast enough\n".encode() + line
            self._dropped = 0
        self._accepted += len(line)
        self._lines.put(line)

    def flush(self) -> None:
        """Wait until what was queued is written, for a limited time."""
        done = threading.Event()
        self._lines.put(done)
        done.wait(_CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            item = self._lines.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._write(item)
            except (OSError, ValueError):  # a full disk, a reader that has ended, or a closed stream
                self.on_lost(1)
            self._written += len(item)

    def _write(self, line: bytes) -> None:
        try:
            handle = self._stream.fileno()
        except io.UnsupportedOperation:
            self._stream.write(line.decode())
            return
        while line:
            line = line[os.write(handle, line) :]


def configure(level: int | str, form: Format = "human") -> None:
    """Send log records of this level and above to stderr; for the processes of ``ingot serve``."""
    handler = LogWriter(sys.stderr)
    handler.addFilter(_Request())
    handler.setFormatter(JsonFormatter() if form == "json" else HumanFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)  # otherwise the thread of a warning writes it to stderr, and waits
    # Changes of what is served are shown, whatever the level of other records is, and are not warnings.
    logging.getLogger(CHANGES).setLevel(logging.INFO)


def count_lost(count: Callable[[int], None]) -> None:
    """Call ``count`` with the number of log records of this process that are lost."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogWriter):
            handler.on_lost = count
