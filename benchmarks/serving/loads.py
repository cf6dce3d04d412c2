"""Loads on a server, each from a core other than the server's, with all or many of the answers checked."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import grpc
import numpy as np

from benchmarks.serving.client import Checker
from benchmarks.serving.models import Model
from benchmarks.serving.processes import LOAD_CORE, Process, pinned
from benchmarks.serving.wires import Wire, framed

# How many of the streams of a load share a connection: a gRPC client keeps one for all of its calls.
STREAMS = 8
# Calls a second of the client that checks gRPC's answers while h2load, which cannot, loads the server.
CHECKS = 50


@dataclass(frozen=True)
class Load:
    """What a load found: requests answered rightly, and how long they took; ``cpu_us`` of the server for each."""

    requests: int
    rate: float
    p50_ms: float
    p99_ms: float
    refused: int
    cpu_us: float


class WrongAnswer(Exception):
    """A server gave an answer that does not belong to its request, or none."""


def open_loop(
    contestant: str, model: Model, form: str, port: int, build: Path, rate: float, seconds: float, seed: int = 0
) -> dict[str, Any]:
    """Send at the times of a Poisson process, those of ``seed``; return the results of
    :mod:`benchmarks.serving.client`.

    Raises:
        WrongAnswer: an answer is another request's.
    """
    return _client(contestant, model, form, port, build, seconds, "--rate", str(rate), "--seed", str(seed))


def python_load(
    contestant: str, model: Model, form: str, port: int, build: Path, server: Process, clients: int, seconds: float
) -> Load:
    """Load a server with the checking client in Python, for models whose answers depend on the batch a little.

    Raises:
        WrongAnswer: an answer is another request's, or there is none.
    """
    before = server.usage().cpu
    found = _client(contestant, model, form, port, build, seconds, "--clients", str(clients))
    cpu = server.usage().cpu - before
    times = found["latencies"]
    if found["unanswered"] or len(times) < 2:
        raise WrongAnswer(f"{contestant} on {model.name}: {found['unanswered']} requests were not answered")
    cuts = quantiles(times, n=100, method="inclusive")
    alone = len(model.samples)  # those that the client asks before it begins
    return Load(
        len(times),
        len(times) / found["seconds"],
        1e3 * cuts[49],
        1e3 * cuts[98],
        found["refused"],
        1e6 * cpu / (found["due"] + alone),
    )


class Wrk:
    """``wrk`` on a server, every answer compared to the bit.

    Args:
        requests: whole HTTP requests by number.
        marks: bytes that the answer to each must contain.
        port: the server's.
        folder: for a file of wrk's script.
    """

    def __init__(self, requests: Sequence[bytes], marks: Sequence[bytes], port: int, folder: Path):
        self._port = port
        self._samples = folder / "samples.lua"
        rows = (f'{{"{_escaped(request)}","{_escaped(mark)}"}}' for request, mark in zip(requests, marks, strict=True))
        self._samples.write_text(f"return {{{','.join(rows)}}}")

    def load(self, server: Process, clients: int, seconds: float) -> Load:
        """Load it with so many clients, each with its own connection and thread.

        Raises:
            WrongAnswer: an answer is another request's, or a connection was lost.
        """
        self._run(clients, 0.4)
        before = server.usage().cpu
        found = self._run(clients, seconds)
        cpu = server.usage().cpu - before
        good = found["requests"] - found["refused"]
        return Load(
            good,
            good / found["seconds"],
            found["p50_ms"],
            found["p99_ms"],
            found["refused"],
            1e6 * cpu / max(1, found["requests"]),
        )

    def _run(self, clients: int, seconds: float) -> dict[str, Any]:
        # wrk takes whole seconds; it reports and ends early when it is interrupted.
        command = ["wrk", f"-t{clients}", f"-c{clients}", "-d600", "--timeout", "60", "-s"]
        script = [str(Path(__file__).with_name("wrk.lua")), f"http://127.0.0.1:{self._port}", "--", str(self._samples)]
        timed = ["timeout", "--signal=INT", f"{seconds}"]
        result = subprocess.run(
            pinned([*timed, *command, *script], LOAD_CORE), capture_output=True, text=True, check=False
        )
        reported = re.search(r"^found (\{.*\})$", result.stdout, re.MULTILINE)
        if reported is None:
            raise SystemExit(f"wrk failed: {result.stdout}{result.stderr}")
        found: dict[str, Any] = json.loads(reported[1])
        if found["wrong"] or found["lost"]:
            raise WrongAnswer(f"wrk with {clients} clients: {found['wrong']} answers wrong, {found['lost']} lost")
        return found


class H2load:
    """``h2load`` on a gRPC server; meanwhile a client of grpcio checks answers, and the total of all bytes is checked.

    Args:
        model: its samples are the requests.
        wire: their encoding.
        port: the server's.
        folder: where files for h2load may lie.

    Raises:
        WrongAnswer: the answer to a single request is not right.
    """

    def __init__(self, model: Model, wire: Wire, port: int, folder: Path):
        self._model = model
        self._wire = wire
        self._port = port
        self._body = folder / "body"
        self._log = folder / "h2load.log"
        self._requests = [wire.request(model, number) for number in range(len(model.samples))]
        self._body.write_bytes(framed(self._requests[0].body))
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answers = [self._check(channel, number) for number in range(len(self._requests))]
        self._size = len(framed(answers[0]))

    def load(self, server: Process, clients: int, seconds: float) -> Load:
        """Load it with so many streams.

        Raises:
            WrongAnswer: an answer is another request's, or there is none.
        """
        path = self._requests[0].path
        start_h2load(path, self._body, self._log, self._port, clients, 0.4).communicate()
        before = server.usage().cpu
        process = start_h2load(path, self._body, self._log, self._port, clients, seconds)
        checked = 0
        with grpc.insecure_channel(f"127.0.0.1:{self._port}") as channel:
            while process.poll() is None:
                self._check(channel, checked % len(self._requests))
                checked += 1
                time.sleep(1 / CHECKS)
        load = finish_h2load(process, self._log, seconds, self._size)
        cpu = server.usage().cpu - before
        answered = load.requests + checked
        return Load(answered, answered / seconds, load.p50_ms, load.p99_ms, 0, 1e6 * cpu / answered)

    def _check(self, channel: grpc.Channel, number: int) -> bytes:
        request = self._requests[number]
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(request.path)
            answer = call(request.body, timeout=60, wait_for_ready=True)
        except grpc.RpcError as error:
            raise WrongAnswer(f"{self._model.name}: gRPC sample {number} failed: {error}") from error
        if not self._model.right(self._wire.answer(answer), number):
            raise WrongAnswer(f"{self._model.name}: the gRPC answer to sample {number} is another's")
        return answer


def start_h2load(path: str, body: Path, log: Path, port: int, clients: int, seconds: float) -> subprocess.Popen[str]:
    log.unlink(missing_ok=True)
    connections = -(-clients // STREAMS)
    headers = ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command = [
        "h2load",
        f"-c{connections}",
        f"-m{clients // connections}",
        "-t1",
        f"-D{round(1000 * seconds)}ms",
        f"-d{body}",
    ]
    url = f"http://127.0.0.1:{port}{path}"
    whole = pinned([*command, *headers, f"--log-file={log}", url], LOAD_CORE)
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish_h2load(process: subprocess.Popen[str], log: Path, seconds: float, size: int | None) -> Load:
    """Parse the output of h2load.

    Raises:
        WrongAnswer: some requests failed, or the total size of answers differs by over 0.5% from that of right ones.
    """
    text, _ = process.communicate()
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", text)
    data = re.search(r"\((\d+)\) data", text)
    rows = np.loadtxt(log, dtype=np.int64, ndmin=2) if log.exists() and log.stat().st_size else np.empty((0, 3))
    if counts is None or data is None or not len(rows):
        raise WrongAnswer(f"h2load got no answers: {text[-500:]}")
    if (rows[:, 1] != 200).any() or any(int(count) for count in counts.groups()[1:]):
        raise WrongAnswer(f"h2load: {counts[0]}")
    requests = len(rows)
    if size is not None and abs(int(data[1]) - requests * size) > (0.005 * requests + 100) * size:
        raise WrongAnswer(f"h2load: {requests} answers of {size} bytes are not {data[1]} bytes of data")
    p50, p99 = np.quantile(rows[:, 2], (0.5, 0.99)) / 1e3
    return Load(requests, requests / seconds, float(p50), float(p99), 0, 0.0)


def missing_tools() -> list[str]:
    """Return the missing load generators."""
    return [tool for tool in ("wrk", "h2load", "taskset") if shutil.which(tool) is None]


def checked_wrk(model: Model, wire: Wire, port: int, folder: Path) -> Wrk:
    """Return wrk with this server's answer to each sample alone, which must be right."""
    checker = Checker(model, wire, port)
    marks = [mark for mark in checker.marks if mark is not None]
    if len(marks) < len(checker.marks):
        raise WrongAnswer(f"{model.name}: the server refuses single requests")
    return Wrk(checker.requests, marks, port, folder)


def _client(
    contestant: str, model: Model, form: str, port: int, build: Path, seconds: float, *options: str
) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.serving.client", contestant, model.name, form, str(port)]
    command += ["--build", str(build), "--seconds", str(seconds), *options]
    with tempfile.TemporaryDirectory() as work:
        out = Path(work) / "found.json"
        result = subprocess.run(
            pinned([*command, "--out", str(out)], LOAD_CORE), capture_output=True, text=True, check=False
        )
        if result.returncode:
            raise WrongAnswer(f"{contestant} on {model.name}: {result.stderr.strip()[-1000:]}")
        found: dict[str, Any] = json.loads(out.read_text())
    if found["wrong"]:
        raise WrongAnswer(f"{contestant} on {model.name}: {found['wrong']} answers are wrong, or errors of the server")
    return found


def _escaped(data: bytes) -> str:
    return "".join(f"\\{byte:03d}" for byte in data)
