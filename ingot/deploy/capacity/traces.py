"""Arrivals of requests: at random, in bursts, as recorded, or from clients that wait for their answers.

A recorded trace is a text file with one request per line: seconds since the first, rows, and the seconds that it allows
(``inf`` for no limit), separated by blanks. Lines that begin with ``#`` are comments.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingot.errors import InvalidArgument


@dataclass(frozen=True)
class Arrival:
    """A request.

    ``known`` is whether the policy learns its client, ``length`` the tokens of its rows if these differ.
    """

    time: float
    rows: int = 1
    timeout: float = math.inf
    client: str = ""
    known: bool = False
    length: int = 0


def poisson(rate: float, count: int, timeout: float, seed: int = 1) -> list[Arrival]:
    """Return ``count`` independent requests, ``rate`` a second on average."""
    choose = random.Random(seed)
    now, found = 0.0, []
    for _ in range(count):
        now += choose.expovariate(rate)
        found.append(Arrival(now, 1, timeout))
    return found


def bursts(rate: float, count: int, timeout: float, seed: int = 1) -> list[Arrival]:
    """Return requests of a Poisson process with two rates in turn: 1.8 times and 0.2 times ``rate``.

    The times of either last ten ``timeout`` on average, exponentially distributed: a Markov-modulated process.
    """
    choose = random.Random(seed)
    found: list[Arrival] = []
    now, busy, end = 0.0, True, choose.expovariate(1 / (10 * timeout))
    while len(found) < count:
        step = choose.expovariate(rate * (1.8 if busy else 0.2))
        if now + step > end:
            now, busy = end, not busy
            end += choose.expovariate(1 / (10 * timeout))
            continue
        now += step
        found.append(Arrival(now, 1, timeout))
    return found


def read(path: Path) -> list[Arrival]:
    """Read a recorded trace.

    Raises:
        InvalidArgument: a line is not of three numbers.
    """
    found: list[Arrival] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            time, rows, timeout = line.split()
            found.append(Arrival(float(time), int(rows), float(timeout)))
        except ValueError as error:
            raise InvalidArgument(f"{path}, line {number}: '{line}' is not: seconds, rows, seconds allowed") from error
    return sorted(found, key=lambda item: item.time)


def write(path: Path, arrivals: Iterable[Arrival]) -> None:
    """Write a trace that :func:`read` reads."""
    path.write_text("".join(f"{item.time:.6f} {item.rows} {item.timeout}\n" for item in arrivals))


def span(arrivals: Sequence[Arrival]) -> float:
    """Return the seconds from the first request to the last."""
    return arrivals[-1].time - arrivals[0].time
