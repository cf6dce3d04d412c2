"""An HTTP load generator that checks every answer: ``python -m benchmarks.serving.client``.

It does what ``wrk`` cannot: send at scheduled times whether answers have arrived or not (open loop, with the latency of
each answer from the moment when its request was due), and compare numbers within a tolerance. In Python it sustains
some 10,000 requests a second on its core; beyond that use ``wrk``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import uvloop

from benchmarks.serving.contestants import contestants
from benchmarks.serving.models import Model, model
from benchmarks.serving.processes import REFUSED, ask, body_of
from benchmarks.serving.wires import Wire

# Connections of an open loop; requests that find none free wait in the generator, and their time runs.
CONNECTIONS = 1024
# Seconds to wait for answers after the last request was due.
ANSWER_TIMEOUT = 2.0


@dataclass
class Found:
    """The results of a run: seconds of right answers, and the largest delay of sending (``late``)."""

    seconds: float = 0.0
    due: int = 0
    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    unanswered: int = 0
    wrong: int = 0
    late: float = 0.0


class Checker:
    """Checks that an answer belongs to its request, by the bytes that the server answered to it alone before.

    Args:
        model: its samples are the requests.
        wire: how the server is spoken to.
        port: the server's. One that holds a deadline may refuse a sample; its answers are then compared as numbers.

    Raises:
        SystemExit: the server's answer to a single request is not right.
    """

    def __init__(self, model: Model, wire: Wire, port: int):
        self._model = model
        self._wire = wire
        self.requests = [wire.request(model, number).http() for number in range(len(model.samples))]
        self.marks: list[bytes | None] = []
        for number, request in enumerate(self.requests):
            status, body = ask(port, request)
            if status not in REFUSED and (status != 200 or not self._right(body, number)):
                raise SystemExit(f"{model.name}: the answer to sample {number} alone is wrong: {status} {body[:300]!r}")
            self.marks.append(wire.mark(body) if status == 200 else None)

    def right(self, body: bytes, number: int) -> bool:
        """Whether an answer is that to a sample."""
        mark = self.marks[number]
        return (mark is not None and mark in body) or self._right(body, number)

    def _right(self, body: bytes, number: int) -> bool:
        try:
            return self._model.right(self._wire.answer(body), number)
        except (ValueError, KeyError):
            return False


class _Load:
    """State shared by connections: the next request, and the results. A connection that is lost is replaced."""

    def __init__(self, checker: Checker, port: int):
        self.checker = checker
        self.found = Found()
        self._port = port
        self._opening: set[asyncio.Task[None]] = set()
        self._done = False
        self.idle: deque[_Connection] = deque()
        self.waiting: deque[float] = deque()
        self._number = 0

    def number(self) -> int:
        self._number = (self._number + 1) % len(self.checker.requests)
        return self._number

    async def connect(self) -> None:
        """Open a connection, and let it begin."""
        with contextlib.suppress(OSError):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: _Connection(self), "127.0.0.1", self._port)
            self.freed(connection)

    def lost(self, connection: _Connection) -> None:
        if self._done:
            return
        with contextlib.suppress(ValueError):
            self.idle.remove(connection)
        task = asyncio.ensure_future(self.connect())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def rest(self, connections: int, patience: float) -> Found:
        """Wait until every answer is there, or for so many seconds."""
        end = time.perf_counter() + patience
        while len(self.idle) < connections and time.perf_counter() < end:
            await asyncio.sleep(0.005)
        self._done = True
        found = self.found
        found.unanswered = found.due - found.refused - found.wrong - len(found.latencies)
        return found

    def freed(self, connection: _Connection) -> None:
        """Reuse the connection: an open loop sends a waiting request, or keeps the connection for later."""
        if self.waiting:
            connection.send(self.waiting.popleft())
        else:
            self.idle.append(connection)

    def answered(self, number: int, due: float, status: bytes, body: bytes) -> None:
        found = self.found
        if int(status) in REFUSED:
            found.refused += 1
        elif status == b"200" and self.checker.right(body, number):
            found.latencies.append(time.perf_counter() - due)
        else:
            found.wrong += 1


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, load: _Load):
        self._load = load
        self._received = b""
        self._number = 0
        self._due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._load.lost(self)

    def send(self, due: float) -> None:
        self._number = self._load.number()
        self._due = due
        self._load.found.late = max(self._load.found.late, time.perf_counter() - due)
        self._transport.write(self._load.checker.requests[self._number])

    def data_received(self, data: bytes) -> None:
        self._received += data
        body = body_of(self._received)
        if body is not None:
            status = self._received[9:12]
            self._received = b""
            self._load.answered(self._number, self._due, status, body)
            self._load.freed(self)


class _Closed(_Load):
    """So many clients, each sending its next request when the last is answered."""

    end = math.inf

    def freed(self, connection: _Connection) -> None:
        now = time.perf_counter()
        if now < self.end:
            self.found.due += 1
            connection.send(now)
        else:
            self.idle.append(connection)


async def closed(checker: Checker, port: int, clients: int, seconds: float) -> Found:
    """Send as fast as so many clients get answers."""
    load = _Closed(checker, port)
    start = time.perf_counter()
    load.end = start + seconds
    for _ in range(clients):
        await load.connect()
    await asyncio.sleep(seconds)
    found = await load.rest(clients, 10 + 10 * seconds)
    found.seconds = time.perf_counter() - start
    return found


async def opened(checker: Checker, port: int, rate: float, seconds: float, seed: int) -> Found:
    """Send at the times of a Poisson process, whether answers come or not."""
    load = _Load(checker, port)
    for _ in range(CONNECTIONS):
        await load.connect()
    gaps = np.random.default_rng(seed).exponential(1 / rate, round(rate * seconds))
    start = time.perf_counter()
    times = deque((start + np.cumsum(gaps)).tolist())
    load.found.due = len(times)
    while times:
        await asyncio.sleep(max(0.0, times[0] - time.perf_counter()))
        now = time.perf_counter()
        while times and times[0] <= now:
            due = times.popleft()
            if load.idle:
                load.idle.popleft().send(due)
            else:
                load.waiting.append(due)
    load.found.seconds = time.perf_counter() - start
    return await load.rest(CONNECTIONS, ANSWER_TIMEOUT)


def main() -> None:
    """Run one load and write its results as JSON to a file, as pipes of some virtual machines lose data."""
    parser = argparse.ArgumentParser()
    parser.add_argument("contestant")
    parser.add_argument("model")
    parser.add_argument("format")
    parser.add_argument("port", type=int)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wire = contestants()[options.contestant].wires[options.format]
    checker = Checker(model(options.model, options.build), wire, options.port)
    if options.rate is None:
        load = closed(checker, options.port, options.clients, options.seconds)
    else:
        load = opened(checker, options.port, options.rate, options.seconds, options.seed)
    options.out.write_text(json.dumps(asdict(uvloop.run(load))))


if __name__ == "__main__":
    main()
