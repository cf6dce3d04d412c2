"""An engine process: ``python -m ingot.runtime.isolation.child PARENT CONNECTION CONTROL WRITTEN READ``.

The arguments are the server's process id, and file descriptors: the connection, the one that asks to end a call, and
the arenas that this process writes and reads. It ends when the connection ends.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import orjson

from ingot import foreign
from ingot.errors import IngotError, InternalError, TooLarge
from ingot.ipc.arena import Incoming, Outgoing
from ingot.ipc.records import dump_error
from ingot.runtime.engine import Engine
from ingot.runtime.engines import ort_arena
from ingot.runtime.engines.opening import open_engine
from ingot.runtime.isolation import confinement, description
from ingot.runtime.isolation.link import Kind, Link
from ingot.runtime.memory import Sweeper

# Words in the errors of engines that mean a lack of memory.
_MEMORY = ("bad allocation", "bad_alloc", "Failed to allocate", "allocate memory", "out of memory")


# Seconds of a call after which unused memory may be returned to the system.
_LONG = 10e-3


class _Kept(logging.Handler):
    """Keeps what is logged, for the server's log."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append((record.levelno, record.name, record.getMessage()))


def main() -> None:
    """Run an engine process."""
    parent, connection, control, written, read = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the server ends this process
    incoming = Incoming(read, lambda _: None, writable=True)
    link = Link(socket.socket(fileno=connection), Outgoing(written), incoming)
    os.close(written)
    os.close(read)
    try:
        _serve(link, socket.socket(fileno=control), parent)
    except (EOFError, OSError):  # the server has closed the connection, or ended
        os._exit(0)


def _serve(link: Link, control: socket.socket, parent: int) -> None:
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    how: dict[str, Any] = orjson.loads(link.receive()[1])
    memory = how.pop("memory_mb")
    limit = None if memory is None else memory << 20
    options = how["options"]
    unpacks = options.get("format", "onnx") != "onnx"
    measures = confinement.before_loading(parent, limit, gpu=how["gpu"], unpacks=unpacks)
    calls = _EngineCalls(limit)
    threading.Thread(target=_obey, args=(control, calls), daemon=True).start()
    opened = calls.attempt(lambda: calls.open(how), "loading it")
    if isinstance(opened, IngotError):
        link.send(Kind.ERROR, dump_error(opened))
        return
    measures += confinement.after_loading()
    logging.getLogger().removeHandler(kept)
    link.send(Kind.OPENED, description.dumps(opened, measures, kept.records))
    while True:
        _, body = link.receive()
        _answer(link, calls, opened, body)


def _answer(link: Link, calls: _EngineCalls, engine: Engine, body: memoryview) -> None:
    (count,) = struct.unpack_from("<I", body)
    link.free([*struct.unpack_from(f"<{count}Q", body, 4)])
    inputs = link.tensors(body[4 + 8 * count :])
    began = time.monotonic()
    outcome = calls.attempt(lambda: link.send_tensors(Kind.OUTPUTS, b"", engine.run(inputs)))
    if isinstance(outcome, IngotError):
        link.send(Kind.ERROR, dump_error(outcome))
    if (now := time.monotonic()) - began > _LONG:  # shorter calls do not grow this process by much
        calls.sweeper.check(now, idle=True)


class _EngineCalls:
    """The engine, and the meaning of its failures. ``limit`` is the most memory in bytes, None for no limit.

    Without a limit, the memory of each call is limited once the engine is open.
    """

    def __init__(self, limit: int | None):
        self.engine: Engine | None = None
        self.sweeper = Sweeper(ort_arena.give_back, lambda _: None)
        self._limit = limit
        self._setting = "its engine process may have", "--engine-memory-mb"

    def open(self, how: dict[str, Any]) -> Engine:
        options = how["options"]
        if options.get("ort_library") is not None:
            options["ort_library"] = Path(options["ort_library"])
        ort_arena.share(math.inf)
        self.engine = open_engine(Path(how["path"]), **options)
        self.sweeper.check(time.monotonic(), idle=True)
        graph = options.get("format", "onnx") == "onnx"  # the memory of other formats is their author's decision
        if graph and how["call_mb"] is not None and self._limit is None and self.engine.device == "cpu":
            self._limit = how["call_mb"] << 20
            self._setting = "a call may take", "--max-call-mb"
            confinement.limit_calls(self._limit)
        return self.engine

    def attempt(self, call: Any, cause: str = "this input") -> Any:
        """Return the result of a call, or its failure as an IngotError; ``cause`` is named if memory is lacking.

        Raises:
            OSError: the connection failed.
        """
        outcome = foreign.outcome(call)
        if isinstance(outcome, BrokenPipeError | ConnectionResetError):
            raise outcome
        reported = isinstance(outcome, InternalError | TooLarge | RuntimeError)
        if isinstance(outcome, MemoryError) or (reported and any(word in str(outcome) for word in _MEMORY)):
            if self._limit is None:
                return TooLarge(f"{cause} needs more memory than there is: {outcome}")
            return TooLarge(
                f"{cause} makes the model need more memory than {self._setting[0]}, {self._limit >> 20} MiB "
                f"({self._setting[1]})"
            )
        if isinstance(outcome, Exception) and not isinstance(outcome, IngotError):
            return InternalError(f"the engine failed: {foreign.typed(outcome)}")
        return outcome

    def terminate(self) -> None:
        """End the running call, if there is one and the engine can."""
        if self.engine is not None:
            self.engine.terminate()


def _obey(control: socket.socket, calls: _EngineCalls) -> None:
    """Pass on the server's requests to end a call; end with the server, also during one."""
    while True:
        try:
            if not control.recv(4096):  # repeated requests mean the same call
                os._exit(0)
        except OSError:
            os._exit(0)
        calls.terminate()


if __name__ == "__main__":
    main()
