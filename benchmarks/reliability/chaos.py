"""Cause faults under a server while it is loaded; each request must end in one right answer or one clear error.

``python -m benchmarks.reliability.chaos --seconds 60`` runs each fault for so long, on a new server with two clients
over HTTP and one over gRPC. The exit status is 0 only if no answer was wrong, no request stayed unanswered, only faults
of connections or of processes that hold them cut connections, and the server answered rightly after the fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reliability.generator import Shape, compiled, finish, grpc_samples, http_samples, start
from benchmarks.reliability.proxy import Proxy
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import Process, ask, free_ports
from benchmarks.serving.wires import OpenBinary, OpenJson

BUILD = Path("build/serving")
ENGINE = "ingot.runtime.engines.isolation.child"


@dataclass(frozen=True)
class Target:
    """A loaded server: its process, its store and folder, the event that ends the fault, and what it did so far."""

    server: Process
    store: Path
    folder: Path
    port: int
    over: threading.Event
    done: list[str]

    def children(self, module: str) -> list[int]:
        """Return the processes that run a module for the server."""
        threads = Path(f"/proc/{self.server.pid}/task").glob("*/children")  # listed by the thread that started them
        found = [int(pid) for thread in threads for pid in thread.read_text().split()]
        return [pid for pid in found if module in _command(pid)]

    def signal(self, pid: int, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.done.append(number.name)

    def every(self, seconds: float) -> Iterator[None]:
        """Return once after each pause, until the fault is over."""
        while not self.over.wait(seconds):
            yield


@dataclass(frozen=True)
class Fault:
    """A fault, and what it may cost.

    Attributes:
        cause: causes it until ``over`` is set, and repairs it.
        options: of the server.
        cuts: whether connections may end.
        refuses: whether requests may be refused.
        denies: whether requests may be refused for longer, as the server holds them for the cause.
        ends: whether the server ends with it, so that nothing is answered afterwards.
        proxied: whether clients connect through a proxy that delays and cuts.
    """

    cause: Callable[[Target], None]
    options: tuple[str, ...] = ()
    cuts: bool = False
    refuses: bool = False
    denies: bool = False
    ends: bool = False
    proxied: bool = False


def kill(module: str) -> Callable[[Target], None]:
    def cause(target: Target) -> None:
        for _ in target.every(1.5):
            for pid in target.children(module)[:1]:
                target.signal(pid, signal.SIGKILL)

    return cause


def stop_for(module: str, seconds: float) -> Callable[[Target], None]:
    """Stop the server's own process (no module) or its children for a while, again and again."""

    def cause(target: Target) -> None:
        for _ in target.every(1.0):
            pids = target.children(module) if module else [target.server.pid]
            for pid in pids:
                target.signal(pid, signal.SIGSTOP)
            target.over.wait(seconds)
            for pid in pids:
                target.signal(pid, signal.SIGCONT)

    return cause


def kill_main(target: Target) -> None:
    target.over.wait(1.5)
    target.signal(target.server.pid, signal.SIGKILL)


def full_disk(target: Target) -> None:
    """Let files grow no further: the recorder, the audit log and the cache of packed weights cannot write."""
    target.over.wait(1.0)
    _, hard = resource.prlimit(target.server.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(target.server.pid, resource.RLIMIT_FSIZE, (0, hard))
    target.done.append("no file may grow")
    target.over.wait()
    resource.prlimit(target.server.pid, resource.RLIMIT_FSIZE, (hard, hard))


def no_files(target: Target) -> None:
    """Open idle connections until the server has no file descriptors left, and close them again."""
    pid = target.server.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    for _ in target.every(1.0):
        most = max(int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (most + 20, hard))
        with contextlib.ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(socket.create_connection(("127.0.0.1", target.port), 5))
            target.over.wait(0.5)
        target.done.append("no descriptors")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def corrupt_blobs(target: Target) -> None:
    """Overwrite bytes of every blob of the store, while it is served."""
    for _ in target.every(0.5):
        for blob in (target.store / "blobs" / "sha256").iterdir():
            blob.chmod(0o644)
            with blob.open("r+b") as file:
                file.seek(random.randrange(max(blob.stat().st_size - 8, 1)))
                file.write(random.randbytes(8))
            target.done.append("a blob")


def network(target: Target) -> None:
    """Do nothing but wait: the proxy between the clients and the server causes the fault."""
    target.done.append("a proxy")
    target.over.wait()


ISOLATED = ("--isolate", "all")
FAULTS: dict[str, Fault] = {
    "kill-engine": Fault(kill(ENGINE), ISOLATED, refuses=True, denies=True),
    "stop-engine": Fault(stop_for(ENGINE, 30.0), (*ISOLATED, "--engine-timeout", "1s"), refuses=True),
    "stop-main": Fault(stop_for("", 0.7), refuses=True),
    "kill-main": Fault(kill_main, ISOLATED, cuts=True, refuses=True, ends=True),
    "full-disk": Fault(full_disk),
    "no-files": Fault(no_files, cuts=True),  # connections that cannot be accepted
    "network": Fault(network, cuts=True, proxied=True),
    "corrupt-blobs": Fault(corrupt_blobs),
}


def run(name: str, served: Model, build: Path, seconds: float) -> dict[str, Any]:
    """Run a fault for so long on a new server under load; return the counts of all clients."""
    fault, program = FAULTS[name], compiled(build)
    port, grpc_port = free_ports(2)
    with tempfile.TemporaryDirectory() as work, contextlib.ExitStack() as stack:
        folder = Path(work)
        store = Path(shutil.copytree(served.store, folder / "store"))
        command = [sys.executable, "-m", "ingot", "serve", f"{served.name}:1", "--store", str(store), "--device", "cpu"]
        command += ["--http-port", str(port), "--grpc-port", str(grpc_port), *fault.options]
        if name == "full-disk":
            command += [
                "--record",
                str(folder / "record"),
                "--record-limit",
                "1000000",
                "--audit-log",
                str(folder / "audit.log"),
            ]
        server = Process(command, {"INGOT_HOME": str(folder)}, folder / "log")
        stack.callback(server.close)
        server.wait(port, OpenJson().request(served, 0).http())
        http_samples(folder / "json", served, OpenJson(), port)
        http_samples(folder / "binary", served, OpenBinary(), port)
        grpc_samples(folder / "grpc", served, grpc_port)
        to, grpc_to = port, grpc_port
        if fault.proxied:
            to, grpc_to = (stack.enter_context(Proxy(each)).port for each in (port, grpc_port))
        target = Target(server, store, folder, port, threading.Event(), [])
        loads = [
            start(program, to, "http", folder / "json", seconds + 2, Shape(8, 2, cancel=0.001, seed=1)),
            start(program, to, "http", folder / "binary", seconds + 2, Shape(8, 2, seed=2)),
            start(program, grpc_to, "grpc", folder / "grpc", seconds + 2, Shape(2, 8, cancel=0.001, seed=3)),
        ]
        cause = threading.Thread(target=fault.cause, args=(target,))
        cause.start()
        time.sleep(seconds)
        target.over.set()
        cause.join()
        found = [finish(load) for load in loads]
        recovered = fault.ends or _answers(server, port, served)
        ended = not fault.ends or _all_ended(server)
        log = (folder / "log").read_text(errors="replace")
    counts = ("right", "wrong", "refused", "denied", "cut", "silent", "abandoned")
    result = {"fault": name, "seconds": seconds, **{key: sum(each[key] for each in found) for key in counts}}
    example = next((each["example"] for each in found if each["example"]), "")
    return {**result, "done": len(target.done), "recovered": recovered and ended, "example": example, "log": log[-300:]}


def broken(result: dict[str, Any]) -> list[str]:
    """Return the promises that a result does not keep."""
    fault, name = FAULTS[result["fault"]], result["fault"]
    found = [f"{name}: {result[end]} {end}: {result['example']}" for end in ("wrong", "silent") if result[end]]
    if not result["done"]:
        found.append(f"{name}: the fault was not caused")
    if not result["right"]:
        found.append(f"{name}: nothing was answered; the log ends with {result['log']}")
    if result["cut"] and not fault.cuts:
        found.append(f"{name}: {result['cut']} requests were cut off")
    if result["refused"] and not fault.refuses:
        found.append(f"{name}: {result['refused']} requests were refused")
    if result["denied"] and not fault.denies:
        found.append(f"{name}: {result['denied']} good requests were denied")
    if not result["recovered"]:
        found.append(f"{name}: the server did not recover; the log ends with {result['log']}")
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the results as a table."""
    rows = [
        "| fault | s | times | right answers | wrong | unanswered | refused | denied | cut | recovered |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for each in found:
        cells = [
            each["fault"],
            f"{each['seconds']:g}",
            each["done"],
            f"{each['right']:,}",
            each["wrong"],
            each["silent"],
        ]
        cells += [
            f"{each['refused']:,}",
            f"{each['denied']:,}",
            f"{each['cut']:,}",
            "yes" if each["recovered"] else "no",
        ]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main() -> None:
    """Run all faults; print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each fault")
    parser.add_argument("--faults", default=",".join(FAULTS), help="comma-separated")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--out", type=Path, help="a file for the results as JSON")
    options = parser.parse_args()
    names = options.faults.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise SystemExit(f"unknown faults: {', '.join(unknown)}; known are {', '.join(FAULTS)}")
    build = options.build.absolute()
    served = model(options.model, build)
    found = []
    for name in names:
        found.append(run(name, served, build, options.seconds))
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))
    if wrong := [fault for result in found for fault in broken(result)]:
        raise SystemExit("\n".join(wrong))


def _answers(server: Process, port: int, served: Model) -> bool:
    """Whether the server answers rightly within 30 s. Samples take turns, as some may be denied after a crash."""
    wire, until, number = OpenJson(), time.monotonic() + 30, 0
    while time.monotonic() < until:
        number = (number + 1) % len(served.samples)
        with contextlib.suppress(OSError):
            status, body = ask(port, wire.request(served, number).http())
            if status == 200:
                return served.right(wire.answer(body), number)
        time.sleep(0.1)
    return False


def _all_ended(server: Process) -> bool:
    """Whether all processes of a server end within 30 s."""
    until = time.monotonic() + 30
    while server.usage().memory and time.monotonic() < until:
        time.sleep(0.2)
    return not server.usage().memory


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


if __name__ == "__main__":
    main()
