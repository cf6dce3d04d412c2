"""Engines that fail and engines that hang, and clients that leave during a call: other clients are not affected."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingot
from ingot import RunningServer
from ingot.tensors import Array, DType
from tests import onnx_models
from tests.runtime.fake_engines import FunctionEngine
from tests.server.faults.http1 import Connection, body_of, request
from tests.server.http2_peer import CALL, Peer
from tests.server.outside import GRPC_SERVERS, affine, floats, message, unpacked, wait_until

CLIENTS = 32
POISON = 666.0
PATH = "/v2/models/m/infer"


def double(inputs: Mapping[str, Array]) -> dict[str, Array]:
    time.sleep(0.002)  # longer than calls that the server runs in its own loop
    if (inputs["x"] == POISON).any():
        raise RuntimeError("what an engine may say of its insides")
    return {"y": inputs["x"] * 2}


@dataclass
class Gated:
    """A server whose only engine waits while the gate is shut."""

    server: RunningServer
    gate: threading.Event
    engine: FunctionEngine

    @property
    def http(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.server.http_url.rpartition(":")[2])

    @property
    def grpc(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.server.grpc_url.rpartition(":")[2])

    def waiting(self, count: int) -> None:
        """Wait until so many requests have been accepted."""
        line = f'ingot_in_flight_requests{{model="m",version="1"}} {count:.1f}'
        url = f"{self.server.http_url}/metrics"
        wait_until(lambda: line in httpx.get(url, trust_env=False, timeout=10).text)


@pytest.fixture(params=GRPC_SERVERS)
def gated(request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    gate = threading.Event()
    gate.set()
    engine = FunctionEngine(double, gate=gate)
    monkeypatch.setattr("ingot.runtime.loading.load_spec.load_engine", lambda *_: engine)
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "grpc_server": request.param, "drain_timeout": 5}
    with ingot.serve(f"m={onnx_models.identity(folder, DType.FP32)}", **settings) as server:
        gate.clear()
        yield Gated(server, gate, engine)
        gate.set()


class Clients:
    """As many clients as are asked for, the even ones of HTTP and the odd ones of gRPC, with a request each."""

    def __init__(self, gated: Gated, values: Sequence[Sequence[float]], stack: contextlib.ExitStack):
        self.values = values
        self._connections: list[Connection | Peer] = []
        for number, row in enumerate(values):
            if number % 2:
                peer = stack.enter_context(Peer(gated.grpc, timeout=30))
                peer.send(peer.call(1, message(affine(row, model="m"))))
                self._connections.append(peer)
            else:
                connection = stack.enter_context(Connection(gated.http, timeout=30))
                connection.send(request(body_of(row), PATH))
                self._connections.append(connection)

    def leave(self, number: int) -> None:
        self._connections[number].socket.close()

    def answer(self, number: int) -> tuple[str, list[float]]:
        """Return a client's status and values."""
        connection = self._connections[number]
        if isinstance(connection, Peer):
            headers, data = connection.answer(1)
            return headers["grpc-status"], floats(unpacked(data)) if data else []
        answer = connection.answer()
        return str(answer.status), answer.values if answer.status == 200 else []

    def check(self, number: int) -> None:
        status, values = self.answer(number)
        assert status == ("0" if number % 2 else "200")
        assert values == [2 * value for value in self.values[number]]


def rows(count: int) -> list[list[float]]:
    return [[number, -number - 0.5] for number in range(count)]


@pytest.mark.matrix
def test_a_client_that_leaves_in_mid_batch_does_not_affect_others(gated: Gated) -> None:
    leaving = (4, 7, 20)
    with contextlib.ExitStack() as stack:
        first = Clients(gated, [[1, 1]], stack)
        gated.waiting(1)
        clients = Clients(gated, rows(CLIENTS), stack)
        gated.waiting(1 + CLIENTS)
        for number in leaving:
            clients.leave(number)
        gated.waiting(1 + CLIENTS - len(leaving))
        gated.gate.set()
        first.check(0)
        for number in range(CLIENTS):
            if number not in leaving:
                clients.check(number)
    assert max(gated.engine.calls) > 1  # they shared a batch


def test_clients_that_leave_while_their_batch_runs_do_not_affect_others(gated: Gated) -> None:
    with contextlib.ExitStack() as stack:
        first = Clients(gated, [[1, 1]], stack)
        gated.waiting(1)
        clients = Clients(gated, rows(CLIENTS), stack)
        gated.waiting(1 + CLIENTS)
        gated.gate.set()
        # At some point between the batch's start and its answers; the others must get theirs in any case.
        for number in range(0, CLIENTS, 3):
            clients.leave(number)
        first.check(0)
        for number in range(CLIENTS):
            if number % 3:
                clients.check(number)


@pytest.mark.matrix
def test_a_request_on_which_the_engine_fails_fails_alone(gated: Gated) -> None:
    poisoned = {6, 13}
    values = [[POISON, 0] if number in poisoned else row for number, row in enumerate(rows(CLIENTS))]
    with contextlib.ExitStack() as stack:
        first = Clients(gated, [[1, 1]], stack)
        gated.waiting(1)
        clients = Clients(gated, values, stack)
        gated.waiting(1 + CLIENTS)
        gated.gate.set()
        first.check(0)
        for number in range(CLIENTS):
            if number in poisoned:
                assert clients.answer(number) == (("13" if number % 2 else "500"), [])
            else:
                clients.check(number)


@pytest.mark.matrix
def test_an_engine_that_hangs_is_answered_for_in_time(gated: Gated) -> None:
    with contextlib.ExitStack() as stack:
        Clients(gated, [[1, 1]], stack)
        gated.waiting(1)
        connection = stack.enter_context(Connection(gated.http))
        connection.send(request(body_of([1, 2], parameters={"timeout": 1_000_000}), PATH))
        # Refused at once if a busy machine makes the model look slow; otherwise when the time is up.
        assert connection.answer().status in (503, 504)
        peer = stack.enter_context(Peer(gated.grpc))
        peer.send(peer.call(1, message(affine([1, 2], model="m")), headers=[*CALL, ("grpc-timeout", "1S")]))
        headers, _ = peer.answer(1)
        assert headers.get("grpc-status", "4") in ("4", "14")  # gRPC's core resets the stream instead
        # Other requests are answered at once, and all requests once the engine continues.
        assert httpx.get(f"{gated.server.http_url}/v2/health/live", trust_env=False, timeout=10).status_code == 200
        gated.gate.set()
        gated.waiting(0)
        later = Clients(gated, rows(4), stack)
        for number in range(4):
            later.check(number)


@pytest.mark.matrix
def test_requests_whose_time_is_up_while_they_wait_never_run(gated: Gated) -> None:
    with contextlib.ExitStack() as stack:
        first = Clients(gated, [[1, 1]], stack)
        gated.waiting(1)
        connections = [stack.enter_context(Connection(gated.http)) for _ in range(10)]
        for connection in connections:
            connection.send(request(body_of([POISON, 2], parameters={"timeout": 1_000_000}), PATH))
        assert {connection.answer().status for connection in connections} <= {503, 504}
        ran = len(gated.engine.calls)
        gated.gate.set()
        first.check(0)
        gated.waiting(0)
        assert len(gated.engine.calls) == ran


@pytest.mark.matrix
def test_a_request_of_more_parts_than_may_wait_leaves_room_for_others(gated: Gated) -> None:
    """300,000 rows are 4,688 parts, and 4,096 requests may wait."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [300_000, 2], "parameters": {"binary_data_size": 2_400_000}}
    header = json.dumps({"inputs": [tensor]}).encode()
    more = f"Inference-Header-Content-Length: {len(header)}"
    with contextlib.ExitStack() as stack:
        large = stack.enter_context(Connection(gated.http))
        large.send(request(header + bytes(2_400_000), PATH, "POST", more))
        gated.waiting(1)
        metrics = httpx.get(f"{gated.server.http_url}/metrics", trust_env=False, timeout=10).text
        assert 'ingot_queued_requests{model="m",version="1"} 1.0' in metrics
        clients = Clients(gated, rows(CLIENTS), stack)
        gated.waiting(1 + CLIENTS)
        gated.gate.set()
        for number in range(CLIENTS):
            clients.check(number)
        assert len(gated.engine.calls) < 1000
