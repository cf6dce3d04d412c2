"""Closed loops: clients that each send a request, wait for its answer, and send the next."""

from __future__ import annotations

import http.client
import itertools
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from threading import Event, Thread

from benchmarks.serving.processes import ANSWER_SECONDS


@dataclass
class Client(Thread):
    """One client, with its own connection; ``times`` are the seconds of its answers."""

    port: int
    path: str
    bodies: Sequence[bytes]
    stop: Event
    times: list[float] = field(default_factory=list)
    fault: str = ""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS)) as connection:
            self._ask(connection)

    def _ask(self, connection: http.client.HTTPConnection) -> None:
        for body in itertools.cycle(self.bodies):
            if self.stop.is_set():
                return
            began = time.perf_counter()
            connection.request("POST", self.path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            content = response.read()
            if response.status != 200:
                self.fault = f"{response.status} {content[:300]!r}"
                self.stop.set()
            self.times.append(time.perf_counter() - began)


@dataclass(frozen=True)
class Mix:
    """Clients of one kind: their number, and the bodies of their requests of ``each`` texts."""

    clients: int
    bodies: Sequence[bytes]
    each: int


@dataclass(frozen=True)
class Measured:
    """Texts that were answered, and the seconds of each kind's answers; ``seconds`` is the length of the run."""

    seconds: float
    texts: int
    times: tuple[list[float], ...]


def run(port: int, path: str, mixes: Sequence[Mix], seconds: float) -> Measured:
    """Run clients that send requests for some seconds, until all are answered.

    Raises:
        SystemExit: an answer is not 200.
    """
    stop = Event()
    kinds = [[Client(port, path, [*mix.bodies[at :: mix.clients]], stop) for at in range(mix.clients)] for mix in mixes]
    clients = list(itertools.chain(*kinds))
    began = time.perf_counter()
    for client in clients:
        client.start()
    stop.wait(seconds)
    stop.set()
    for client in clients:
        client.join(ANSWER_SECONDS)
        if client.fault:
            raise SystemExit(f"an answer was {client.fault}")
    times = tuple(list(itertools.chain(*(client.times for client in kind))) for kind in kinds)
    texts = sum(mix.each * len(each) for mix, each in zip(mixes, times, strict=True))
    return Measured(time.perf_counter() - began, texts, times)
