"""Servers as the benchmark runs them: pinned to one core, waited for, measured with all their children, and ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import timeit
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER_CORE = 0
LOAD_CORE = 1
_TOKEN = "BENCHMARK_TOKEN"  # not INGOT_..., as the server refuses unknown ones
# The longest that a server may take to its first answer, and one of its answers.
DEADLINE = 120.0
ANSWER_SECONDS = 60.0
_CALLS = 10_000
# How servers say that they have too much to do, or cannot answer in time.
REFUSED = (429, 503, 504)


class NoAnswer(Exception):
    """A server cannot be started here."""


@dataclass(frozen=True)
class Usage:
    """What a server's processes have used: seconds of CPU so far, and the bytes that they hold now (PSS)."""

    cpu: float
    memory: int


class Process:
    """A running server: the process that was started and all that it started in turn, daemons too.

    They are known by a variable in their environment, which their children need not have.

    Args:
        command: what to run.
        environment: variables in addition to those of this process.
        log: the file that its output goes to.
        core: which core all of them are bound to, with one thread of OpenMP; None for all cores.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, core: int | None = SERVER_CORE
    ):
        self._token = uuid.uuid4().hex
        self._log = log
        command = command if core is None else pinned(command, core)
        threads = {} if core is None else {"OMP_NUM_THREADS": "1"}
        variables = {**os.environ, **threads, **environment, _TOKEN: self._token}
        self.started = time.perf_counter()
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command, env=variables, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def usage(self) -> Usage:
        """Return the usage of all its processes."""
        cpu, memory = 0.0, 0
        for folder in self._folders():
            with contextlib.suppress(OSError):
                cpu += _seconds(folder)
                memory += _pss((folder / "smaps_rollup").read_text())
        return Usage(cpu, memory)

    def wait(self, port: int, request: bytes, *, refusals: bool = False) -> tuple[float, bytes]:
        """Ask until it answers 200; return the seconds since it was started, and the body.

        With ``refusals`` it may also refuse (not by 503, which is said while a model loads).

        Raises:
            NoAnswer: it ended, or took too long; the message has the end of its log.
        """
        last = "no answer"
        while True:
            with contextlib.suppress(OSError):
                status, body = ask(port, request)
                if status == 200 or (refusals and status in (429, 504)):
                    return time.perf_counter() - self.started, body
                last = f"{status} {body[:300]!r}"
            self._pause(last)

    def listens(self, port: int) -> None:
        """Wait until it takes connections.

        Raises:
            NoAnswer: it ended, or took too long; the message has the end of its log.
        """
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS):
                return
            self._pause("no connection")

    def _pause(self, last: str) -> None:
        """Wait a little, if there still is something to wait for."""
        took = time.perf_counter() - self.started
        if self._process.poll() is not None or took > DEADLINE:
            end = self._log.read_text(errors="replace")[-2000:]
            raise NoAnswer(f"a server gave {last} in {took:.0f} s; the end of its log:\n{end}")
        time.sleep(0.005)

    def close(self) -> None:
        """Ask it to end, then kill its remaining processes."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        while folders := list(self._folders()):
            for folder in folders:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(folder.name), signal.SIGKILL)
            self._process.poll()
            time.sleep(0.02)
        self._process.wait()

    def _folders(self) -> Iterator[Path]:
        token = f"{_TOKEN}={self._token}".encode()
        found: set[str] = set()
        parents: dict[str, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                parents[folder.name] = (folder / "stat").read_text().rpartition(") ")[2].split()[1]
                if token in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(folder.name)
        while children := {name for name, parent in parents.items() if parent in found} - found:
            found |= children
        return (Path("/proc", name) for name in found)


def pinned(command: Sequence[str], core: int) -> list[str]:
    """Return a command that runs on one core only."""
    return ["taskset", "-c", str(core), *command]


@contextlib.contextmanager
def started(command: Sequence[str], cores: Sequence[int] = ()) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Run a server on some cores, by default on all; yield its first line, and its process.

    Raises:
        NoAnswer: it ended before that.
    """
    command = ["taskset", "-c", ",".join(map(str, cores)), *command] if cores else command
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else b""
            if not line:
                raise NoAnswer(f"this ended early: {shlex.join(command)}")
            yield line.decode(), process
        finally:
            process.terminate()
            try:
                process.wait(ANSWER_SECONDS)
            finally:
                process.kill()


@contextlib.contextmanager
def served(
    arguments: Sequence[str], cores: Sequence[int] = ()
) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    """Run ``ingot serve`` with free ports on the CPU; yield what it prints with ``--json``, and its process."""
    command = [sys.executable, "-m", "ingot", "serve", *arguments, "--http-port", "0", "--grpc-port", "0", "--json"]
    with started([*command, "--device", "cpu"], cores) as (line, process):
        yield json.loads(line), process


def ask(port: int, request: bytes) -> tuple[int, bytes]:
    """Send one HTTP request over a new connection; return the status and the body of the answer.

    Raises:
        OSError: nothing listens, or the connection ended early.
    """
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_SECONDS) as connection:
        connection.sendall(request)
        received = b""
        while (body := body_of(received)) is None:
            chunk = connection.recv(1 << 20)
            if not chunk:
                raise ConnectionError("the connection ended before the answer")
            received += chunk
    return int(received[9:12]), body


def body_of(received: bytes) -> bytes | None:
    """Return the body of an HTTP/1.1 answer, by its length or in chunks; None while it is not all there."""
    end = received.find(b"\r\n\r\n")
    if end < 0:
        return None
    head, rest = received[:end].lower(), received[end + 4 :]
    length = re.search(rb"\r\ncontent-length: *(\d+)", head)
    if length is not None:
        return rest if len(rest) >= int(length[1]) else None
    body = b""
    while (line := rest.find(b"\r\n")) >= 0:
        size = int(rest[:line], 16)
        if len(rest) < line + size + 4:
            return None
        if not size:
            return body
        body, rest = body + rest[line + 2 : line + 2 + size], rest[line + size + 4 :]
    return None


def system_call_us() -> float:
    """Return the microseconds of a system call that does nothing, without those of a call from Python."""

    def least(function: Callable[[], int]) -> float:
        return min(timeit.repeat(function, number=_CALLS, repeat=9)) / _CALLS

    return 1e6 * (least(os.getppid) - least(sys.getrecursionlimit))


def free_ports(count: int) -> tuple[int, ...]:
    """Return different ports that nothing listens on.

    All are held until the last is found: one that was released may be found again.
    """
    with contextlib.ExitStack() as held:
        listeners = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return tuple(listener.getsockname()[1] for listener in listeners)


def _seconds(folder: Path) -> float:
    """Return the CPU time of a process, by its folder in /proc: exact, unless threads have ended.

    ``schedstat`` has nanoseconds, of threads that live; ``stat`` has ticks, and counts the others too.
    """
    living = sum(int(task.read_text().split()[0]) for task in folder.glob("task/*/schedstat")) / 1e9
    user, system = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
    return max(living, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK"))


def _pss(text: str) -> int:
    return 1024 * int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0])
