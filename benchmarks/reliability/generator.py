"""The load generator in C (``load.c``): its compilation, its samples and its results."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.serving.client import Checker
from benchmarks.serving.loads import WrongAnswer
from benchmarks.serving.models import Model
from benchmarks.serving.processes import LOAD_CORE, pinned
from benchmarks.serving.wires import OpenGrpc, Wire, framed

SOURCE = Path(__file__).with_name("load.c")
PATH = b"/inference.GRPCInferenceService/ModelInfer"
# Literals that do not enter the table of headers, so that the block is the same for all calls.
HEADERS = b"\x83\x86\x04" + bytes((len(PATH),)) + PATH + b"\x01\x01x\x0f\x10\x10application/grpc\x00\x02te\x08trailers"


@dataclass(frozen=True)
class Shape:
    """How requests are sent: in a closed loop, or at ``rate`` a second (open loop, Poisson).

    Attributes:
        connections: how many.
        depth: requests in flight on each, in a closed loop.
        deadline_ms: right answers within it are ``good``.
        cancel: the share that the client gives up.
    """

    connections: int
    depth: int = 1
    rate: float = 0.0
    deadline_ms: float = 1e9
    cancel: float = 0.0
    seed: int = 0


def compiled(build: Path) -> Path:
    """Return the program; compile it if its source has changed.

    Raises:
        SystemExit: there is no C compiler.
    """
    program = build / f"load-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    if not program.exists():
        if shutil.which("cc") is None:
            raise SystemExit("the load generator needs a C compiler called cc")
        build.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O2", "-Wall", "-o", str(program), str(SOURCE), "-lm"], check=True)
    return program


def http_samples(path: Path, model: Model, wire: Wire, port: int, bad: Sequence[bytes] = ()) -> None:
    """Write the requests of all samples, with the answers that the server gives to each alone, which must be right.

    Raises:
        SystemExit: an answer is wrong.
    """
    checker = Checker(model, wire, port)
    rows = [(b"g", request, mark) for request, mark in zip(checker.requests, checker.marks, strict=True) if mark]
    _write(path, [*rows, *((b"b", request, b"") for request in bad)])


def grpc_samples(path: Path, model: Model, port: int, bad: Sequence[bytes] = ()) -> None:
    """Write the calls of all samples; see :func:`http_samples`. ``bad`` are messages without their prefix.

    Raises:
        WrongAnswer: an answer is wrong.
    """
    wire, rows = OpenGrpc(), []
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask: Any = channel.unary_unary(PATH.decode(), None, None)
        for number in range(len(model.samples)):
            body = wire.request(model, number).body
            answer: bytes = ask(body, timeout=60, wait_for_ready=True)
            if not model.right(wire.answer(answer), number):
                raise WrongAnswer(f"{model.name}: the gRPC answer to sample {number} alone is wrong")
            rows.append((b"g", framed(body), wire.mark(answer)))
    _write(path, [(b"h", HEADERS, b""), *rows, *((b"b", framed(message), b"") for message in bad)])


def start(
    program: Path, port: int, protocol: str, samples: Path, seconds: float, shape: Shape
) -> subprocess.Popen[str]:
    """Begin a load on the core of loads."""
    numbers = (shape.connections, shape.depth, shape.rate, shape.deadline_ms, shape.cancel, shape.seed)
    command = [str(program), str(port), protocol, str(samples), str(seconds), *map(str, numbers)]
    return subprocess.Popen(pinned(command, LOAD_CORE), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for a load; return its results, which :mod:`load.c` describes.

    Raises:
        WrongAnswer: it ended without results, or its counts do not add up.
    """
    out, errors = process.communicate()
    if process.returncode:
        raise WrongAnswer(f"the load generator failed with {process.returncode}: {errors[-500:]}")
    found: dict[str, Any] = json.loads(out)
    ends = ("right", "wrong", "refused", "denied", "rejected", "cut", "silent", "abandoned")
    if sum(found[end] for end in ends) != found["sent"]:
        raise WrongAnswer(f"the load generator lost count: {found}")
    return found


def _write(path: Path, rows: Sequence[tuple[bytes, bytes, bytes]]) -> None:
    parts = [
        kind + struct.pack("=I", len(data)) + data + struct.pack("=I", len(mark)) + mark for kind, data, mark in rows
    ]
    path.write_bytes(b"".join(parts))
