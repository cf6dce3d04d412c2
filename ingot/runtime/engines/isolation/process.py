"""One engine process, as the server sees it: its start, calls, and end."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from ingot import foreign
from ingot.errors import DeadlineExceeded, EngineTimeout, IngotError, SamplesFailed, write_error
from ingot.faults import rate_limited_logger
from ingot.model_store.blobs.folder import remove_with
from ingot.runtime.engines.ipc import arena
from ingot.runtime.engines.ipc.arena import Incoming, Outgoing
from ingot.runtime.engines.ipc.records import decode_error
from ingot.runtime.engines.isolation import confinement
from ingot.runtime.engines.isolation.calls import Ask, BatchCalls
from ingot.runtime.engines.isolation.description import Description
from ingot.runtime.engines.isolation.link import HEALTH, STREAMS, Kind, Link, arena_size
from ingot.runtime.engines.isolation.spec import ProcessSpec
from ingot.tensors import Array

log = rate_limited_logger(__name__)

# Seconds in which a process that has closed its connection must end, before it is killed.
_END_SECONDS = 2.0
# Seconds between two checks of whether a process that does not answer is stopped.
_STOPPED_SECONDS = 1.0
# Limits of texts that a process sends, which its model may have written: in bytes, characters and records of its log.
_MOST_STDERR = 1 << 16
_MOST_ERROR = 4096
_MOST_TEXT = 1000
_MOST_RECORDS = 20


class Ended(Exception):
    """The process ended, or was killed because it did not behave. The text completes "the engine process ... "."""


class _Channel:
    """One of the calls that a process can run at a time: its connection, and an arena for each direction.

    Args:
        connection: a connected stream socket.
        inputs: the arena that the server writes.
        outputs: the file descriptor of the one that the process writes.
    """

    def __init__(self, connection: socket.socket, inputs: Outgoing, outputs: int):
        self.freed: deque[int] = deque()
        self.link = Link(connection, inputs, Incoming(outputs, self.freed.append))
        self.calling = threading.Lock()
        self.timed = False


class EngineProcess:
    """A running engine process.

    The kernel ends it with the thread that started it, so start it in a thread that lives as long as the engine.

    Args:
        spec: the engine, and the limits of the process.
        inputs: an arena for the inputs of each call that may run at a time, which the server writes.
        handles: the file descriptors of these arenas.

    Attributes:
        ending: how it ended; empty until :meth:`wait` has returned.
        retiring: why another process should follow it; empty if none should.
        ask: asks another model for the process's code; by default calls are invalid.
        unhealthy: called by :meth:`wait` with why its engine is unfit for requests, or with nothing once it is fit.
    """

    def __init__(self, spec: ProcessSpec, inputs: Sequence[Outgoing], handles: Sequence[int]):
        self._spec = spec
        self._killed = ""
        self._reports = False
        self.retiring = ""
        self.unhealthy: Callable[[str], None] = lambda why: None
        self.ask: Ask | None = None
        self._channels: list[_Channel] = []
        self._reaping = threading.Lock()
        self.ending = ""
        self._folder = _temporary_folder() if spec.unpacks else None
        self._control, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # two messages stay two
        self._errors, errors = os.pipe()
        for end in (self._errors, errors):
            os.set_blocking(end, False)  # a full pipe loses text instead of blocking
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as passed:
            on_error.callback(self._control.close)
            on_error.callback(os.close, self._errors)
            on_error.callback(self._remove_folder)
            passed.callback(control.close)
            passed.callback(os.close, errors)
            given: list[int] = []
            for written, handle in zip(inputs, handles, strict=True):
                ours, theirs = socket.socketpair()
                on_error.callback(ours.close)
                passed.callback(theirs.close)
                outputs = arena.create(arena_size())
                passed.callback(os.close, outputs)
                self._channels.append(_Channel(ours, written, outputs))
                given += (theirs.fileno(), outputs, handle)
            if (shards := spec.engine.shards) > 1:
                socket.send_fds(self._control, [b"h"], given)
                written_spec = os.memfd_create("ingot-engine")  # an argument has at most 128 KiB
                passed.callback(os.close, written_spec)
                with open(written_spec, "wb", closefd=False) as file:
                    file.write(spec.dumps())
                arguments = ["group", os.getpid(), shards, written_spec]
                self._process = self._start(arguments, errors, stdin=control.fileno(), pass_fds=[written_spec])
            else:
                given.append(control.fileno())
                self._process = self._start(["child", os.getpid(), *given], errors, pass_fds=given)
            if self._folder is not None:  # the server may end while it waits for this process
                remove_with(self, _end_and_remove, self._process, self._folder)
            on_error.pop_all()

    def open(self, timeout: float | None) -> Description:
        """Open the engine, within ``timeout`` seconds.

        Raises:
            Ended: the process ended, or took longer.
            IngotError: the engine cannot be opened.
        """
        first = self._channels[0]
        kind, body = self._exchange(first, lambda: first.link.send(Kind.OPEN, self._spec.dumps()), timeout)
        if kind != Kind.OPENED:
            raise self._error(body)
        try:
            found = Description.model_validate_json(bytes(body))
        except (ValueError, IngotError) as error:
            raise self._invalid(error) from error
        self._log(found.log)
        self._reports = found.capabilities.reports_health
        return found

    def run(self, inputs: Mapping[str, Array], timeout: float | None, lane: int = 0) -> dict[str, Array]:
        """Run one batch; lanes run one each at a time.

        Raises:
            Ended: the process ended, or took longer than ``timeout`` seconds.
            IngotError: that of the engine.
        """
        channel = self._channels[lane]
        link, released = channel.link, channel.freed
        freed = [released.popleft() for _ in range(len(released))]
        head = struct.pack(f"<I{len(freed)}Q", len(freed), *freed)
        taken: list[int] = []
        try:
            send = lambda: taken.extend(link.send_tensors(Kind.RUN, head, inputs))  # noqa: E731
            kind, body = self._exchange(channel, send, timeout)
        finally:
            link.free(taken)
        if kind not in (Kind.OUTPUTS, Kind.PARTIAL):
            raise self._error(body)
        found = foreign.outcome(lambda: (link.tensors(body), {}) if kind == Kind.OUTPUTS else link.partial(body))
        if isinstance(found, Exception):
            raise self._invalid(found)
        outputs, errors = found
        if errors:
            raise SamplesFailed(outputs, errors)
        return outputs

    def terminate(self, lane: int = 0) -> None:
        """Ask the engine to end its call in a lane."""
        with contextlib.suppress(OSError):  # a process that does not read has been asked before
            self._control.send(bytes([lane]), socket.MSG_DONTWAIT)

    def end_streams(self, numbers: Sequence[int]) -> bool:
        """Let the engine forget streams; return False if the process does not read."""
        try:
            self._control.send(STREAMS + struct.pack(f"<{len(numbers)}q", *numbers), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:  # it has ended, and its streams with it
            pass
        return True

    def kill(self, why: str) -> None:
        """End the process at once."""
        self._killed = self._killed or why
        # Processes of a group end with torchrun, but not if they are stopped before they have asked for that.
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
            for child in children if self._process.poll() is None else ():
                os.kill(int(child), signal.SIGKILL)
        self._process.kill()

    def close(self) -> None:
        """Let the process end; :meth:`wait` kills it if it does not."""
        self._killed = "was closed"
        self._disconnect()

    def wait(self) -> str:
        """Wait for the end, in any thread; return how it ended, in a form that completes "the engine process ..."."""
        with self._reaping:
            if not self.ending:
                self._await_end()
                with contextlib.suppress(ProcessLookupError):  # its children, if it has any
                    os.killpg(self._process.pid, signal.SIGKILL)
                code = self._process.wait()
                reported = self._reported()
                self._disconnect()  # in case another process also holds the other end
                self._remove_folder()
                text = _read(self._errors)
                if text and self._killed != "was closed":
                    log.error("an engine process wrote before its end: %s", text)
                self.ending = self._killed or _printable(reported.decode(errors="replace")) or _described(code)
        return self.ending

    def release(self) -> None:
        """Close the connections to a process that has ended."""
        for channel in self._channels:
            with channel.calling:
                channel.link.connection.close()
        self._control.close()
        os.close(self._errors)

    def _start(
        self, arguments: Sequence[Any], errors: int, *, stdin: int = subprocess.DEVNULL, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        module, *others = map(str, arguments)
        variables = confinement.environment(os.environ)
        if (packages := self._spec.engine.packages) is not None:
            variables["PYTHONPATH"] = os.pathsep.join((str(packages), variables["PYTHONPATH"]))
        return subprocess.Popen(
            [sys.executable, "-P", "-m", f"ingot.runtime.engines.isolation.{module}", *others],
            pass_fds=pass_fds,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=variables if self._folder is None else {**variables, "TMPDIR": self._folder},
            start_new_session=True,  # Ctrl-C is for the server
        )

    def _log(self, records: Sequence[tuple[int, str, str]]) -> None:
        for level, name, text in records[:_MOST_RECORDS]:
            log.log(level, "%s: %s", _printable(name), _printable(text))

    def _receive(self, link: Link) -> tuple[int, memoryview]:
        """Wait for an answer; log what precedes it, and let other models answer the calls of the process's code."""
        with contextlib.ExitStack() as ended:
            receive, calls = link.receive, None
            while True:
                kind, body = receive()
                if kind == Kind.RETIRE:
                    self.retiring = _printable(bytes(body[:_MOST_ERROR]).decode(errors="replace"))
                elif kind == Kind.LOG:
                    self._log([(int(level), str(name), str(text)) for level, name, text in orjson.loads(body)])
                elif kind == Kind.CALL and self.ask is not None:
                    if calls is None:
                        calls = ended.enter_context(contextlib.closing(BatchCalls(link, self.ask)))
                        receive = calls.receive
                    calls.begin(body)
                else:
                    return kind, body

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _disconnect(self) -> None:
        for connection in (*(channel.link.connection for channel in self._channels), self._control):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _reported(self) -> bytes:
        """Return the text on the socket of control, if there is one."""
        found = foreign.attempt(lambda: self._control.recv(_MOST_ERROR, socket.MSG_DONTWAIT)) or b""
        if not found.startswith(HEALTH):
            return found
        self.unhealthy(_printable(found[1:].decode(errors="replace")))
        return b""

    def _await_end(self) -> None:
        """Wait until the process ends, or until some time after it closed its connection."""
        try:
            handle = os.pidfd_open(self._process.pid)
        except ProcessLookupError:  # kill() has noticed that it ended
            return
        connection = self._channels[0].link.connection  # the process closes all when it ends
        with contextlib.closing(_Handle(handle)) as process:
            poll = select.poll()
            poll.register(process.fileno(), select.POLLIN)
            poll.register(connection.fileno(), 0)  # POLLHUP, which is always reported
            if self._reports:
                poll.register(self._control.fileno(), select.POLLIN)
            ready = dict(poll.poll())
            while ready == {self._control.fileno(): select.POLLIN}:
                self._reported()
                ready = dict(poll.poll())
            if self._reports:
                poll.unregister(self._control.fileno())
            if process.fileno() in ready:
                return
            poll.unregister(connection.fileno())
            if not poll.poll(_END_SECONDS * 1000):
                self.kill("closed its connection and was killed")
                poll.poll()

    def _exchange(self, channel: _Channel, send: Any, timeout: float | None) -> tuple[int, memoryview]:
        with channel.calling:
            try:
                if timeout is not None or channel.timed:  # setting it costs a system call
                    channel.link.connection.settimeout(timeout)
                    channel.timed = timeout is not None
                send()
                if timeout is not None:
                    self._await_answer(channel.link.connection, timeout)
                received = foreign.outcome(lambda: self._receive(channel.link))
                if not isinstance(received, Exception):
                    return received
                if not isinstance(received, EOFError | OSError):
                    raise self._invalid(received)
                raise received
            except TimeoutError:
                self.kill(f"was killed: it did not answer within {timeout or 0:.1f} s")
            except (EOFError, OSError):
                pass  # it has ended, or will be killed for closing its connection
        raise Ended(self.wait())

    def _await_answer(self, connection: socket.socket, timeout: float) -> None:
        """Wait until an answer arrives; end a process that is stopped (SIGSTOP), which would use up the time.

        Raises:
            TimeoutError: it takes longer than ``timeout`` seconds.
        """
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        end = time.monotonic() + timeout
        while not poll.poll(min(_STOPPED_SECONDS, timeout) * 1000):
            if _is_stopped(self._process.pid):
                self.kill("was stopped, and killed")
                return
            if time.monotonic() >= end:
                raise TimeoutError

    def _error(self, body: memoryview) -> Exception:
        error = foreign.outcome(lambda: decode_error(body[:_MOST_ERROR]))
        if isinstance(error, DeadlineExceeded):
            return EngineTimeout(str(error))
        return error if isinstance(error, IngotError) else self._invalid(error)

    def _invalid(self, error: Exception) -> Ended:
        log.error("an engine process sent an invalid answer: %s", foreign.typed(error))
        self.kill("was killed: it sent an invalid answer")
        return Ended(self.wait())


class _Handle:
    def __init__(self, number: int):
        self._number = number

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        os.close(self._number)


def _temporary_folder() -> str:
    """Create the folder of a process's temporary files; it may write to no other.

    Raises:
        InvalidArgument: it cannot be created.
        StorageFull: the disk is full.
    """
    try:
        return tempfile.mkdtemp(prefix="ingot-engine-")
    except OSError as error:
        remedy = "; set TMPDIR to a writable folder with free space"
        raise write_error("cannot create a temporary folder for an engine process", error, remedy) from error


def _end_and_remove(process: subprocess.Popen[bytes], folder: str) -> None:
    """Remove the temporary folder of a process, after the end of the process, which may be writing to it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(_END_SECONDS)
    shutil.rmtree(folder, ignore_errors=True)


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal; not whether a debugger stopped it."""
    stat = foreign.attempt(lambda: Path(f"/proc/{process}/stat").read_text()) or ""
    return stat.rpartition(")")[2].split()[:1] == ["T"]


def _described(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"ended by {name}" + (", perhaps as the system ran out of memory" if name == "SIGKILL" else "")


def _read(handle: int) -> str:
    """Return the end of what can be read at once, as one line."""
    try:
        return _printable(os.read(handle, _MOST_STDERR).decode(errors="replace"))
    except OSError:
        return ""


def _printable(text: str) -> str:
    """Return the end of a text, without line breaks and what terminals would obey."""
    return "".join(item if item.isprintable() else " " for item in " ".join(text[-_MOST_TEXT:].split()))
