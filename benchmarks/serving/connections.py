"""Pass requests to a server's connections in this process; the program that ``in_process.py`` starts.

It imports only Ingot, which may be that of another commit. Standard input has two pickled lists, of one message for
each client: those that are sent first, and those that are measured. The least CPU time of a request is printed, in
microseconds.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import struct
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import uvloop
from hpack import Encoder

from ingot.model_store import Store
from ingot.runtime.settings.settings import Settings
from ingot.server.grpc.connection import Connection as GrpcConnection
from ingot.server.grpc.fast import FastListener
from ingot.server.http.connection import Connection, Connections
from ingot.server.http.exchange import HttpState
from ingot.server.plane.dataplane import DataPlane
from ingot.serving import Repository

# Rounds before the measurements: the server learns the latency of batches, and its caches fill.
FIRST = 300
# Measurements, and the rounds of each.
TIMES, ROUNDS = 150, 15
# Ticks of the event loop that a round may take.
MOST = 100_000
# Bytes that a request and the memory for all bodies may have.
BODY, BODIES = 1 << 26, 1 << 30
CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/inference.GRPCInferenceService/ModelInfer"),
    (":authority", "127.0.0.1"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
# Calls after which the headers of the next are the same bytes, as all are in the table of the connection.
SAME = 4
HEADER = struct.Struct(">IBI")
DATA, HEADERS, SETTINGS, WINDOW_UPDATE = 0, 1, 4, 8
END_STREAM, END_HEADERS = 1, 4


class Transport(asyncio.Transport):
    """Collects what a connection writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def writelines(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        self.written += map(bytes, parts)

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    abort = close

    def pause_reading(self) -> None:
        """Have no effect."""

    resume_reading = pause_reading


class HttpClient:
    """One connection of a client that sends HTTP/1.1."""

    def __init__(self, shared: HttpState, connections: Connections, status: bytes):
        self.transport = Transport()
        self._connection: Any = Connection(shared, connections)
        self._connection.connection_made(self.transport)
        self._status = status

    def send(self, message: bytes) -> None:
        self._connection.data_received(message)

    def answered(self) -> bool:
        written = self.transport.written
        if written and not written[0].startswith((b"HTTP/1.1 200", self._status)):
            raise SystemExit(f"the server answered {written!r}")
        return bool(written)


class GrpcClient:
    """One connection of a client that sends gRPC, and its calls one after the other."""

    def __init__(self, calls: Any):
        self.transport = Transport()
        self._connection: Any = GrpcConnection(asyncio.get_running_loop(), calls, set())
        self._connection.connection_made(self.transport)
        self._connection.data_received(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, 0, 0, b""))
        self._encoder = Encoder()
        self._head = b""
        self._number = -1

    def send(self, message: bytes) -> None:
        self._number = number = self._number + 2
        if number < 2 * SAME:
            self._head = self._encoder.encode(CALL)
        head = _frame(HEADERS, END_HEADERS, number, self._head)
        packet = head + _frame(DATA, END_STREAM, number, message)
        self._connection.data_received(packet if number % 64 > 1 else packet + WINDOW)

    def answered(self) -> bool:
        written = self.transport.written
        if written and b"grpc-message" in written[-1]:
            raise SystemExit(f"the server answered {written!r}")
        return bool(written) and b"grpc-status" in written[-1]


Client = HttpClient | GrpcClient


async def main() -> None:
    """Load the model, measure, and print the time."""
    store, reference, form = sys.argv[1:]
    first, messages = pickle.load(sys.stdin.buffer)
    repository = Repository(Store(store), Settings())
    loaded: Any = repository.add(reference)
    await asyncio.get_running_loop().run_in_executor(None, loaded.load)
    while not loaded.ready:
        await asyncio.sleep(0.01)
    clients = _clients(DataPlane(repository), form, len(messages))
    for _ in range(FIRST):
        await _ask(clients, first)
    least = float("inf")
    for _ in range(TIMES):
        began = time.process_time_ns()
        for _ in range(ROUNDS):
            await _ask(clients, messages)
        least = min(least, time.process_time_ns() - began)
    print(least / 1e3 / ROUNDS / len(messages), flush=True)
    os._exit(0)  # engines and threads need not end


def _clients(plane: DataPlane, form: str, count: int) -> list[Client]:
    if form == "grpc":
        calls = FastListener(plane, BODY, BODIES)._calls
        return [GrpcClient(calls) for _ in range(count)]
    shared, connections = HttpState(plane, BODY, BODIES), Connections()
    status = b"HTTP/1.1 50" if form == "refused" else b"HTTP/1.1 200"
    return [HttpClient(shared, connections, status) for _ in range(count)]


async def _ask(clients: Sequence[Client], messages: Sequence[bytes]) -> None:
    """Send a message of each client, and wait for all answers."""
    for client, message in zip(clients, messages, strict=True):
        client.send(message)
    for _ in range(MOST):
        if all(client.answered() for client in clients):
            break
        await asyncio.sleep(0)
    else:
        raise SystemExit(f"no answer: {[client.transport.written for client in clients][:2]}")
    for client in clients:
        client.transport.written.clear()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return HEADER.pack(len(payload) << 8 | kind, flags, stream) + payload


WINDOW = _frame(WINDOW_UPDATE, 0, 0, (1 << 14).to_bytes(4, "big"))

if __name__ == "__main__":
    uvloop.run(main())
