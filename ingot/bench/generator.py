"""One process of the load generator: ``python -m ingot.bench.generator``, which ``ingot bench`` starts.

It is a separate program, so that it shares an interpreter lock with nothing else, and one loop over sockets, since
client libraries cost more time than the server. It reads a pickled :class:`~ingot.bench.plan.Start` and then the time
to begin (a line) from its standard input, and writes a line of JSON for each window to its standard output. Any further
input, or its end, stops it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import json
import os
import pickle
import select
import ssl
import sys
import time
from array import array
from collections import Counter, deque
from typing import IO, Any

from ingot.bench import sockets
from ingot.bench.grpc import GrpcConnection, Place
from ingot.bench.http1 import HttpConnection
from ingot.bench.plan import Plan, Start

Connection = HttpConnection | GrpcConnection
AnyPlace = HttpConnection | Place

# Seconds until a lost connection is opened again.
_RETRY = 0.1
# Seconds before a request is due in which epoll is too coarse to wait for it.
_COARSE = 0.003
# Calls in flight on a gRPC connection of an open loop.
_CALLS = 100
_PR_SET_TIMERSLACK = 29


class Load:
    """The requests of a plan, with their times.

    Args:
        plan: what to send.
        file: where the times of answered requests are written: due, sent and answered, as three blocks of doubles for
            each window, in seconds of the monotonic clock. Two more are of streams: the first piece, and the number of
            tokens.
        output: where a line for each window is written.
        stop: a file descriptor that becomes readable when the load is to end.

    Raises:
        OSError: the server cannot be reached.
        ValueError: it speaks another protocol.
    """

    def __init__(self, plan: Plan, file: IO[bytes], output: IO[str], stop: int):
        self._plan = plan
        self._file = file
        self._output = output
        self._stop = stop
        self._security = None if plan.tls is None else sockets.context(plan.tls, http2=plan.wire != "http")
        self._epoll = select.epoll()
        self._connections: dict[int, Connection] = {}
        self._requests = itertools.cycle(plan.requests)
        self._due, self._sent, self._answered = array("d"), array("d"), array("d")
        self._first, self._tokens = array("d"), array("d")
        self._errors: Counter[str] = Counter()
        self._free: list[AnyPlace] = []
        self._waiting: deque[float] = deque()
        self._waited = 0
        self._lost: deque[tuple[float, int]] = deque()
        self._closed = plan.clients > 0
        for number in range(plan.connections):
            self._open(_share(plan, number))
        self._epoll.register(stop, select.EPOLLIN)

    def _open(self, size: int) -> None:
        made: Connection
        if self._plan.wire == "http":
            made = HttpConnection(self._plan, self._security, self._finish)
        else:
            made = GrpcConnection(self._plan, self._security, self._finish, size)
        descriptor = made.socket.ready()
        self._connections[descriptor] = made
        self._epoll.register(descriptor, select.EPOLLIN)
        self._free += reversed(made.places)

    def run(self, start: float) -> None:
        """Send requests from a time of the monotonic clock on, until it is to stop."""
        clock, poll = time.perf_counter, self._epoll.poll
        due = map(start.__add__, self._plan.due()) if not self._closed else iter(())
        upcoming = next(due, float("inf"))
        report = start + self._plan.window
        time.sleep(max(0.0, start - clock()))
        if self._closed:
            places, self._free = self._free, []
            for place in places:
                self._begin(place, clock())
            self._flush(list(self._connections))
        while True:
            now = clock()
            if now >= report:
                self._report(now)
                report += self._plan.window
            if self._lost and self._lost[0][0] <= now:
                self._reopen()
            if upcoming <= now:
                while upcoming <= now:
                    self._arrive(upcoming)
                    upcoming = next(due, float("inf"))
                self._flush(list(self._connections) if self._plan.wire != "http" else ())
            wait = min(upcoming, report) - clock()
            # The timeout of epoll is in milliseconds and rounded up, so the last ones are left to select.
            events = poll(max(wait - _COARSE, 0.0))
            if not events and 0 < wait <= _COARSE:
                select.select([self._epoll], (), (), wait)
            for descriptor, kind in events:
                if descriptor == self._stop:
                    return
                self._handle(descriptor, kind)

    def _handle(self, descriptor: int, kind: int) -> None:
        connection = self._connections.get(descriptor)
        if connection is None:
            return
        try:
            if kind & select.EPOLLOUT:
                connection.flush()
                if not connection.socket.unsent:
                    self._epoll.modify(descriptor, select.EPOLLIN)
            if kind & ~select.EPOLLOUT:
                connection.readable()
            connection.flush()
        except (OSError, ValueError, ssl.SSLError) as error:
            self._lose(descriptor, str(error))
            return
        if connection.socket.unsent:
            self._epoll.modify(descriptor, select.EPOLLIN | select.EPOLLOUT)
        if not connection.usable and all(place.due == 0.0 for place in connection.places):
            self._lose(descriptor, "")

    def _flush(self, descriptors: Any) -> None:
        for descriptor in descriptors:
            self._handle(descriptor, 0)

    def _arrive(self, due: float) -> None:
        """Send a request of the open loop, or let it wait for a place."""
        if self._free:
            self._begin(self._free.pop(), due)
        else:
            self._waiting.append(due)
            self._waited += 1

    def _begin(self, place: AnyPlace, due: float) -> None:
        place.due, place.sent = due, time.perf_counter()
        try:
            place.begin(next(self._requests))
        except OSError as error:
            self._lose_place(place, str(error))

    def _finish(self, place: AnyPlace, error: str) -> None:
        """Count a response, and send the next request in its place."""
        now = time.perf_counter()
        if error:
            self._errors[error] += 1
        else:
            self._due.append(place.due)
            self._sent.append(place.sent)
            self._answered.append(now)
            if self._plan.streams and isinstance(place, HttpConnection):
                self._first.append(place.first)
                self._tokens.append(place.tokens)
        place.due = 0.0
        if not (place if isinstance(place, HttpConnection) else place.connection).usable:
            return
        if self._closed:
            self._begin(place, now)
        elif self._waiting:
            self._begin(place, self._waiting.popleft())
        else:
            self._free.append(place)

    def _lose_place(self, place: AnyPlace, error: str) -> None:
        connection = place if isinstance(place, HttpConnection) else place.connection
        for descriptor, found in list(self._connections.items()):
            if found is connection:
                self._lose(descriptor, error)

    def _lose(self, descriptor: int, error: str) -> None:
        """Close a connection, count its requests as failures, and open it again: soon if it ended with an error."""
        connection = self._connections.pop(descriptor)
        for place in connection.places:
            if place.due:
                self._errors[f"connection lost: {error}" if error else "connection closed"] += 1
        gone = set(map(id, connection.places))
        self._free = [place for place in self._free if id(place) not in gone]
        with contextlib.suppress(OSError):
            self._epoll.unregister(descriptor)
        connection.socket.close()
        self._lost.append((time.perf_counter() + (_RETRY if error else 0.0), len(connection.places)))

    def _reopen(self) -> None:
        _, size = self._lost.popleft()
        before = len(self._free)
        try:
            self._open(size)
        except (OSError, ValueError) as error:
            self._errors[f"cannot connect: {error}"] += 1
            self._lost.append((time.perf_counter() + _RETRY, size))
            return
        if self._closed or self._waiting:
            places, self._free = self._free[before:], self._free[:before]
            for place in places:
                if self._closed:
                    self._begin(place, time.perf_counter())
                elif self._waiting:
                    self._begin(place, self._waiting.popleft())
                else:
                    self._free.append(place)
        self._flush(list(self._connections))

    def _report(self, now: float) -> None:
        """Write what happened in a window."""
        for descriptor, connection in list(self._connections.items()):
            if any(place.due and now - place.sent > self._plan.timeout for place in connection.places):
                self._lose(descriptor, f"no response in {self._plan.timeout:g} s")
        arrays = self._due, self._sent, self._answered, self._first, self._tokens
        for times in arrays:
            times.tofile(self._file)
        self._file.flush()
        open_since = [
            place.due for connection in self._connections.values() for place in connection.places if place.due
        ]
        open_since += self._waiting
        line = {
            "end": now,
            "answered": len(self._due),
            "errors": self._errors,
            "cpu": time.process_time(),
            "waited": self._waited,
            "open": len(open_since),
            "overdue": sum(now - due > self._plan.limit for due in open_since),
        }
        print(json.dumps(line), file=self._output, flush=True)
        for times in arrays:
            del times[:]
        self._errors = Counter()
        self._waited = 0


def _share(plan: Plan, number: int) -> int:
    """Return how many requests a connection can have in flight."""
    if plan.clients:
        return plan.clients // plan.connections + (number < plan.clients % plan.connections)
    return 1 if plan.wire == "http" else _CALLS


def main() -> None:
    """Run from the command line."""
    start: Start = pickle.load(sys.stdin.buffer)
    with contextlib.suppress(OSError, AttributeError):  # timers of Linux may be late by 50 us otherwise
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
    with start.file.open("wb") as file:
        try:
            load = Load(start.plan, file, sys.stdout, sys.stdin.fileno())
        except (OSError, ValueError) as error:
            print(json.dumps({"failed": str(error)}), flush=True)
            return
        print(json.dumps({"ready": os.getpid()}), flush=True)
        begin = sys.stdin.buffer.readline()
        if not begin:
            return
        gc.disable()  # nothing that the loop creates refers to itself
        load.run(float(begin))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        main()
