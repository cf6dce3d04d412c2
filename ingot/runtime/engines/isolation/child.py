"""An engine process: ``python -m ingot.runtime.engines.isolation.child PARENT (CONNECTION WRITTEN READ)... CONTROL``.

The arguments are the server's process id, and file descriptors: for each call that may run at a time a connection and
the arenas that this process writes and reads, and the one that asks to end a call. It ends when a connection ends.
"""

from __future__ import annotations

import functools
import io
import itertools
import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn

import numpy as np
import orjson

from ingot import foreign, permissions
from ingot.errors import IngotError, InternalError, SamplesFailed, TooLarge
from ingot.runtime.engines.engine import Engine, lanes_of
from ingot.runtime.engines.ipc.arena import Incoming, Outgoing
from ingot.runtime.engines.ipc.records import decode_error, encode_error
from ingot.runtime.engines.isolation import calls as other_models
from ingot.runtime.engines.isolation import confinement, description
from ingot.runtime.engines.isolation.link import HEALTH, STREAMS, Kind, Link
from ingot.runtime.engines.isolation.spec import ProcessSpec
from ingot.runtime.engines.opening import open_engine
from ingot.runtime.engines.ort import ort_arena
from ingot.runtime.engines.python.calls import Answer, Caller
from ingot.runtime.machine import memory
from ingot.runtime.machine.memory import NO_MEMORY, Sweeper
from ingot.tensors import Array

# Seconds of a call after which unused memory may be returned to the system.
_LONG = 10e-3
# Limits of what a model logs and prints in one call, in records and characters.
_MOST_RECORDS = 19
_MOST_TEXT = 1000
# Seconds between two checks of the memory of code, and the share of what it may hold beyond its load.
_GROWTH_SECONDS, _RETIRE_SECONDS = 0.05, 1.0
_GROWN = 0.8
_HEALTH_SECONDS = 1.0

Join = Callable[[], None]
"""Connects this process with the others of its engine."""


def _encodable(text: str) -> str:
    return text[:_MOST_TEXT].encode(errors="replace").decode()


class _Kept(logging.Handler):
    """Keeps what is logged, for the server's log: the first records, and the number of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[tuple[int, str, str]] = []
        self._left_out = 0

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.records) < _MOST_RECORDS:
            message = foreign.outcome(record.getMessage)  # which formats what the code passed
            text = message if isinstance(message, str) else foreign.typed(message)
            self.records.append((record.levelno, _encodable(record.name), _encodable(text)))
        else:
            self._left_out += 1

    def take(self) -> list[tuple[int, str, str]]:
        """Return the records since the last call."""
        records, self.records = self.records, []
        if self._left_out:
            records.append((logging.WARNING, __name__, f"{self._left_out} more lines were not kept"))
            self._left_out = 0
        return records


class _Printed(io.TextIOBase):
    """A stream that logs the lines that a model prints."""

    def __init__(self, name: str, level: int):
        self._log = functools.partial(logging.getLogger(name).log, level, "%s")
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, rest = text[: _MOST_TEXT * _MOST_RECORDS].split("\n")
        if lines:
            for line in (self._line + lines[0], *lines[1:]):
                self._log(line)
            self._line = ""
        self._line = (self._line + rest)[:_MOST_TEXT]
        return len(text)


def main() -> None:
    """Run an engine process."""
    parent, *handles, control = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the server ends this process
    links = [link_of(*each) for each in zip(*[iter(handles)] * 3, strict=True)]
    serve(links, socket.socket(fileno=control), parent)


def link_of(connection: int, written: int, read: int) -> Link:
    """Return the link of the file descriptors of a connection and of the arenas that this process writes and reads."""
    incoming = Incoming(read, lambda _: None, writable=True)
    link = Link(socket.socket(fileno=connection), Outgoing(written), incoming)
    os.close(written)
    os.close(read)
    return link


def serve(links: Sequence[Link], control: socket.socket, parent: int, join: Join | None = None) -> None:
    """Open the engine that the server asks for, and run it until a connection ends.

    Args:
        links: one for each call that may run at a time.
        control: what asks to end a call.
        parent: the process that this one ends with.
        join: connects this process with the others of the engine, if there are any.
    """
    try:
        _serve(links, control, parent, join)
    except (EOFError, OSError):  # the server has closed the connection, or ended
        os._exit(0)


def confine(spec: ProcessSpec, parent: int, join: Join | None) -> list[str]:
    """Confine this process as the server asks for it; return the measures in force."""
    return confinement.before_loading(
        parent,
        spec.memory,
        gpu=spec.gpu,
        unpacks=spec.unpacks,
        cache=spec.cache,
        join=join,
        network=spec.permits(permissions.NETWORK, permissions.NETWORK_AT_LOAD),
    )


def confine_loaded(spec: ProcessSpec) -> list[str]:
    """Forbid what only loading needs; return the measures in force."""
    if spec.permits(permissions.PROGRAMS):
        return []
    at_load = spec.permits(permissions.NETWORK_AT_LOAD) and not spec.permits(permissions.NETWORK)
    return confinement.after_loading(reads=spec.reads, connects=not at_load)


def _serve(links: Sequence[Link], control: socket.socket, parent: int, join: Join | None) -> None:
    link = links[0]
    kept = _Kept()
    logging.getLogger().addHandler(kept)
    spec = ProcessSpec.loads(link.receive()[1])
    measures = confine(spec, parent, join)
    if spec.code:
        if not spec.permits(permissions.PROGRAMS):
            confinement.after_loading()
        logging.getLogger().setLevel(logging.INFO)
        sys.stdout, sys.stderr = _Printed("stdout", logging.INFO), _Printed("stderr", logging.WARNING)
    calls = _EngineCalls(spec.memory)
    threading.Thread(target=_obey, args=(control, calls), daemon=True).start()
    opened = calls.attempt(lambda: calls.open(spec), "loading it")
    if isinstance(opened, IngotError):
        if records := kept.take():
            link.send(Kind.LOG, orjson.dumps(records))
        link.send(Kind.ERROR, encode_error(opened))
        return
    measures += confine_loaded(spec)
    if spec.code:
        calls.log, calls.growth = kept, _Growth(spec.memory)
    else:
        logging.getLogger().removeHandler(kept)
    lanes = calls.lanes
    link.send(Kind.OPENED, description.dumps(opened, measures, kept.take(), len(lanes)))
    # Where a process that follows another has fewer lanes, several connections share one.
    for other, lane in zip(links[1:], itertools.cycle([*lanes[1:], lanes[0]]), strict=False):
        threading.Thread(target=_serve_lane, args=(other, calls, lane), daemon=True).start()
    if opened.capabilities.streams:
        threading.Thread(target=_end_streams, args=(calls.over, lanes[0]), daemon=True).start()
    if opened.capabilities.reports_health:
        threading.Thread(target=_report_health, args=(control, lanes[0]), daemon=True).start()
    _answer_all(link, calls, lanes[0])


def _report_health(control: socket.socket, lane: _Lane) -> None:
    """Report to the server while the engine is unfit for requests, and once it is fit; it is asked between two calls.

    The reason is repeated, as the server drops what arrives before it supervises the process.
    """
    reported = ""
    while True:
        time.sleep(_HEALTH_SECONDS)
        with lane.running:
            found = lane.engine.health()
        if found or reported:
            reported = found
            control.send(HEALTH + found[:_MOST_TEXT].encode())


def _end_streams(over: SimpleQueue[list[int]], lane: _Lane) -> NoReturn:
    """Let the engine forget streams that are over, between two calls: that runs code of the model."""
    while True:
        numbers = over.get()
        with lane.running:
            lane.engine.end_streams(numbers)


def _serve_lane(link: Link, calls: _EngineCalls, lane: _Lane) -> None:
    """Answer the calls of a further lane, and end the process as the main thread does."""
    ended = foreign.outcome(functools.partial(_answer_all, link, calls, lane))
    if isinstance(ended, EOFError | OSError):
        os._exit(0)
    print(foreign.typed(ended), file=sys.stderr)
    os._exit(1)


def _answer_all(link: Link, calls: _EngineCalls, lane: _Lane) -> NoReturn:
    while True:
        _, body = link.receive()
        with lane.running:
            _answer(link, calls, lane.engine, body)


def _answer(link: Link, calls: _EngineCalls, engine: Engine, body: memoryview) -> None:
    (count,) = struct.unpack_from("<I", body)
    link.free([*struct.unpack_from(f"<{count}Q", body, 4)])
    inputs = link.tensors(body[4 + 8 * count :])
    began = time.monotonic()
    outcome = calls.attempt(lambda: engine.run(inputs) if calls.log is None else calls.logged(link, engine, inputs))
    if isinstance(outcome, SamplesFailed):
        outcome = calls.attempt(functools.partial(link.send_partial, outcome))
    elif not isinstance(outcome, IngotError):
        outcome = calls.attempt(functools.partial(link.send_tensors, Kind.OUTPUTS, b"", outcome))
    if isinstance(outcome, IngotError):
        link.send(Kind.ERROR, encode_error(outcome))
        if down := engine.down:  # its device has failed for this process, but not for the next one
            print(down, file=sys.stderr, flush=True)
            os._exit(1)
    # Shorter calls do not grow this process by much; other lanes may use memory that looks unused.
    if (now := time.monotonic()) - began > _LONG and len(calls.lanes) == 1:
        calls.sweeper.check(now, idle=True)


class _Growth:
    """Decides when code that keeps memory of each request gets another process.

    Args:
        limit: most bytes of private memory; None for the share of the machine's that engines may hold.
    """

    def __init__(self, limit: int | None):
        loaded, self._limit = memory.private(), memory.engine_limit() if limit is None else limit
        self._most = loaded + _GROWN * (self._limit - loaded)
        self._next = 0.0

    def excess(self) -> str:
        """Return why another process should follow, as words that complete "the process ..."; empty if none should."""
        if (now := time.monotonic()) < self._next:
            return ""
        self._next = now + _GROWTH_SECONDS
        if (held := memory.private()) <= self._most:
            return ""
        self._next = now + _RETIRE_SECONDS  # while the model is being loaded, the server does not replace it
        return (
            f"was replaced: it had grown to {held >> 20} MiB of the {int(self._limit) >> 20} MiB that it may have "
            "(--engine-memory-mb), as if the model kept memory of each request"
        )


class _Lane:
    """An engine that runs one call at a time."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.running = threading.Lock()


class _EngineCalls:
    """The engine's lanes, and the meaning of its failures. ``limit`` is the most memory in bytes, None for no limit.

    Without a limit, the memory of each call is limited once the engine is open.
    """

    def __init__(self, limit: int | None):
        self.lanes: list[_Lane] = []
        self.sweeper = Sweeper(ort_arena.give_back, lambda _: None)
        self.log: _Kept | None = None
        self.growth: _Growth | None = None
        self.over: SimpleQueue[list[int]] = SimpleQueue()  # numbers of streams
        self._callers: dict[Link, Caller] = {}
        self._limit = limit
        self._setting = "its engine process may have", "--engine-memory-mb"

    def open(self, spec: ProcessSpec) -> Engine:
        ort_arena.share(math.inf)
        engine = open_engine(spec.engine, confined=True)
        self.lanes = [*map(_Lane, lanes_of(engine, spec.lanes))]
        self.sweeper.check(time.monotonic(), idle=True)
        graph = spec.engine.format == "onnx"  # the memory of other formats is their author's decision
        if graph and spec.call_mb is not None and self._limit is None and engine.device == "cpu":
            self._limit = spec.call_mb << 20
            self._setting = "a call may take", "--max-call-mb"
            confinement.limit_calls(self._limit)
        return engine

    def logged(self, link: Link, engine: Engine, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch, whose code may call other models, and send what it logs."""
        caller = self._callers.setdefault(link, _caller(link))
        try:
            with caller.during_batch():
                return engine.run(inputs)
        finally:
            if self.growth is not None and not engine.streams and (excess := self.growth.excess()):
                link.send(Kind.RETIRE, excess.encode())
            if self.log is not None and (records := self.log.take()):
                link.send(Kind.LOG, orjson.dumps(records))

    def attempt(self, call: Any, cause: str = "this input") -> Any:
        """Return the result of a call, or its failure as an IngotError; ``cause`` is named if memory is lacking.

        Raises:
            OSError: the connection failed.
        """
        outcome = foreign.outcome(call)
        if isinstance(outcome, BrokenPipeError | ConnectionResetError):
            raise outcome
        reported = isinstance(outcome, InternalError | TooLarge | RuntimeError)
        if isinstance(outcome, MemoryError) or (reported and NO_MEMORY.search(str(outcome))):
            if self._limit is None:
                return TooLarge(f"{cause} needs more memory than there is: {outcome}")
            return TooLarge(
                f"{cause} makes the model need more memory than {self._setting[0]}, {self._limit >> 20} MiB "
                f"({self._setting[1]})"
            )
        if isinstance(outcome, Exception) and not isinstance(outcome, IngotError):
            return InternalError(f"the engine failed: {foreign.typed(outcome)}")
        return outcome

    def terminate(self, lane: int) -> None:
        """End the running call of a lane, if there is one and the engine can."""
        for each in self.lanes[lane : lane + 1]:
            each.engine.terminate()


def _caller(link: Link) -> Caller:
    """Return the caller of other models for a link."""

    def send(number: int, model: str, inputs: Mapping[str, Array], timeout: float) -> None:
        name = model.encode()
        link.send_tensors(Kind.CALL, other_models.HEAD.pack(number, timeout, len(name)) + name, inputs)

    def receive() -> tuple[int, Answer]:
        received = foreign.outcome(link.receive)
        if isinstance(received, EOFError | OSError):  # the server has closed the connection, or ended
            os._exit(0)
        if isinstance(received, Exception):
            raise received
        number, failed = other_models.NUMBER.unpack_from(received[1])
        content = received[1][other_models.NUMBER.size :]
        if failed:
            return number, decode_error(content)
        # Copies: the server uses the memory again after the batch.
        return number, {name: np.array(array) for name, array in link.tensors(content).items()}

    return Caller(send, receive)


def _obey(control: socket.socket, calls: _EngineCalls) -> None:
    """Pass on the server's requests: streams that are over, or the lanes of calls to end; end with the server."""
    while True:
        try:
            if not (lanes := control.recv(4096)):
                os._exit(0)
        except OSError:
            os._exit(0)
        if lanes.startswith(STREAMS):
            calls.over.put([number for (number,) in struct.iter_unpack("<q", lanes[1:])])
            continue
        for lane in set(lanes):  # repeated requests mean the same call
            calls.terminate(lane)


if __name__ == "__main__":
    main()
