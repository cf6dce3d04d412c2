"""Count the instructions that a server executes for a request: ``python -m benchmarks.serving.instructions COMMIT``.

Valgrind's callgrind counts them in user space, whatever else the machine runs. Several clients form other batches in
each run, so only one client shows small differences. Instructions are not time: they say nothing about the kernel,
caches and waiting. Calls are slow under Valgrind, so that they run in the worker's thread and not in the event loop.
Each given commit, wheel or folder is compared with the first one; ``.`` is this tree. A compiled wheel counts twice,
compiled and as source.
"""

from __future__ import annotations

import argparse
import re
import shutil
import socket
import subprocess
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.serving.contestants import Start
from benchmarks.serving.models import Model, model
from benchmarks.serving.pairs import build_folder
from benchmarks.serving.processes import ANSWER_SECONDS, Process, body_of
from benchmarks.serving.rounds import serving
from benchmarks.serving.versions import Version, checkout
from benchmarks.serving.wires import Request

MODEL = "tiny"
FORMATS = ("json", "binary", "grpc")
CLIENTS = (1, 32)
# As many before are not counted: the server learns the latency of batches, and its caches fill.
REQUESTS = 640


@dataclass(frozen=True)
class Counted(Version):
    """A version that runs under callgrind, whose counter is off until it is asked for."""

    pure: bool = False
    counts: Path = Path()

    @property
    def variables(self) -> dict[str, str]:
        return {**super().variables, **({"INGOT_PURE": "1"} if self.pure else {})}

    def command(self, start: Start) -> list[str]:
        # Without fair turns, threads that wait for Valgrind's lock starve on one core.
        options = ["--fair-sched=yes", "--instr-atstart=no", f"--callgrind-out-file={self.counts}"]
        return ["valgrind", "--tool=callgrind", *options, *super().command(start)]


def main() -> None:
    """Count, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.instructions")
    parser.add_argument("versions", nargs="+", help="commits, wheels or folders; the first is compared with")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)))
    parsed = parser.parse_args()
    if shutil.which("valgrind") is None:
        raise SystemExit("install valgrind")
    build = build_folder()
    served = model(MODEL, build)
    versions = [version for name in parsed.versions for version in versions_of(name, build)]
    for version in versions:
        version.check()
    print(f"| format | clients | {' | '.join(version.name for version in versions)} |")
    print(f"|---|---|{'---|' * len(versions)}", flush=True)
    for form in parsed.formats.split(","):
        for clients in map(int, parsed.clients.split(",")):
            counts = [count(version, served, form, clients) for version in versions]
            first, *others = counts
            cells = [f"{first:,.0f}", *(f"{each:,.0f} ({each / first:.2f})" for each in others)]
            print(f"| {form} | {clients} | {' | '.join(cells)} |", flush=True)


def versions_of(name: str, build: Path) -> Iterator[Counted]:
    """Yield the versions of a commit, a wheel or a folder."""
    counts = build / "callgrind.out"
    if name.endswith(".whl"):
        wheel = Path(name)
        folder = build / "wheels" / wheel.stem
        shutil.rmtree(folder, ignore_errors=True)
        with zipfile.ZipFile(wheel) as file:
            file.extractall(folder)
        yield Counted("wheel", folder=str(folder), counts=counts)
        if any(folder.glob("ingot/*.so")):
            yield Counted("wheel's source", folder=str(folder), counts=counts, pure=True)
    elif Path(name, "ingot").is_dir():
        yield Counted(name, folder=str(Path(name).absolute()), counts=counts)
    else:
        yield Counted(name, folder=str(checkout(name, build)), counts=counts)


def count(version: Counted, served: Model, form: str, clients: int) -> float:
    """Return the instructions of one request, in the mean, while so many clients each wait for their answers."""
    wire, rounds = version.wires[form], max(1, REQUESTS // clients)
    requests = [wire.request(served, number % len(served.samples)) for number in range(2 * clients)]
    with serving(version, served, form, build_folder()) as server:
        exchange = _grpc if form == "grpc" else _http
        with exchange(server.start, requests, clients) as ask_all:
            for number in range(rounds):
                ask_all(number)
            _control(server.process, "--instr=on")
            for number in range(rounds):
                ask_all(number)
            _control(server.process, "--instr=off")
        _control(server.process, "--dump")
    dump = version.counts.with_name(f"{version.counts.name}.1")
    found = re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)
    dump.unlink()
    if found is None:
        raise SystemExit(f"{dump} has no total")
    return int(found[1]) / (rounds * clients)


def _control(process: Process, option: str) -> None:
    subprocess.run(["callgrind_control", option, str(process.pid)], check=True, capture_output=True)


@contextmanager
def _http(start: Start, requests: Sequence[Request], clients: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that sends a request on each connection, then reads all answers."""
    sent = [request.http() for request in requests]
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", start.port), timeout=ANSWER_SECONDS))
            for _ in range(clients)
        ]

        def ask_all(number: int) -> None:
            for index, connection in enumerate(connections):
                connection.sendall(sent[(number + index) % len(sent)])
            for connection in connections:
                received = b""
                while body_of(received) is None:
                    chunk = connection.recv(1 << 20)
                    if not chunk:
                        raise SystemExit("the server ended a connection")
                    received += chunk
                if not received.startswith(b"HTTP/1.1 200"):
                    raise SystemExit(f"the server answered {received[:200]!r}")

        yield ask_all


@contextmanager
def _grpc(start: Start, requests: Sequence[Request], clients: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that starts a call on each channel, then waits for all answers."""
    sent = [request.body for request in requests]
    with ExitStack() as stack:
        # Channels of equal options would share one connection.
        channels = [
            stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{start.grpc_port}", [("ingot.number", number)]))
            for number in range(clients)
        ]
        calls: list[grpc.UnaryUnaryMultiCallable[bytes, bytes]] = [
            channel.unary_unary(requests[0].path) for channel in channels
        ]

        def ask_all(number: int) -> None:
            pending = [
                call.future(sent[(number + index) % len(sent)], timeout=ANSWER_SECONDS)
                for index, call in enumerate(calls)
            ]
            for each in pending:
                each.result()

        yield ask_all


if __name__ == "__main__":
    main()
