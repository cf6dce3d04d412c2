"""What a process of the load generator sends, and when."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Wire = Literal["http", "grpc", "grpc-stream"]
Arrivals = Literal["poisson", "fixed"]


@dataclass(frozen=True, kw_only=True)
class Tls:
    """How a server is verified, and the client's own certificate; see :class:`ingot.Client`."""

    ca_file: str | None = None
    cert_file: str | None = None
    cert_key_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The load of one process: a closed loop of ``clients``, or an open loop at a ``rate`` or at recorded ``times``.

    Attributes:
        host: the server's host.
        port: its port.
        tls: None for a connection without TLS.
        wire: how requests are sent.
        requests: what is sent, in turn: whole HTTP requests, or gRPC messages.
        streams: whether each answer is a stream of OpenAI's API, whose first piece and tokens are counted.
        header: of gRPC: the encoded header block of each call.
        clients: requests in flight in a closed loop; 0 for an open loop.
        connections: connections to the server.
        rate: requests per second of an open loop.
        arrivals: the distribution of the time between two requests of an open loop.
        times: seconds from the start at which requests are due, in place of a rate.
        seed: of random arrivals.
        timeout: seconds after which a request without a response is a failure.
        limit: seconds after which a request without a response is reported as overdue.
        window: seconds between two reports.
    """

    host: str
    port: int
    tls: Tls | None
    wire: Wire
    requests: tuple[bytes, ...]
    streams: bool = False
    header: bytes = b""
    clients: int = 0
    connections: int = 1
    rate: float = 0.0
    arrivals: Arrivals = "poisson"
    times: tuple[float, ...] = ()
    seed: int = 1
    timeout: float = 60.0
    limit: float = math.inf
    window: float = 1.0

    def due(self) -> Iterator[float]:
        """Return the times at which the requests of an open loop are due, in seconds from the start."""
        if self.times:
            return iter(self.times)
        if self.arrivals == "fixed":
            return (number / self.rate for number in itertools.count(1))
        choose = random.Random(self.seed)
        return itertools.accumulate(choose.expovariate(self.rate) for _ in itertools.count())


@dataclass(frozen=True, kw_only=True)
class Start:
    """How a process begins: its plan, and the file to which it writes the times of requests."""

    plan: Plan
    file: Path
