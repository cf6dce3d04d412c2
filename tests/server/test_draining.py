"""A server that stops loses no request: every connection ends with an answer that announces it."""

from __future__ import annotations

import http.client
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hyperframe.frame import PingFrame

import ingot
from ingot.protocol import open_inference_pb2 as pb
from ingot.server.grpc import fast
from ingot.server.http import timeouts
from tests import onnx_models
from tests.server.http2_peer import ACK, PING, Peer, frame
from tests.server.outside import INFER, affine, affine_of, floats, message, row, unpacked, wait_until
from tests.server.test_lifecycle import refuses, running

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
BODY = json.dumps({"inputs": [TENSOR]}).encode()
# Answered by the connection itself, and by FastAPI.
ASKED: Sequence[tuple[str, str, bytes | None]] = (
    ("POST", "/v2/models/affine/infer", BODY),
    ("GET", "/v2/health/live", None),
    ("GET", "/v2/models/affine", None),
)


class Busy(threading.Thread):
    """Sends requests on one connection until an answer closes it."""

    def __init__(self, url: str, method: str, path: str, body: bytes | None):
        super().__init__(daemon=True)
        self.connection = http.client.HTTPConnection(url.partition("://")[2], timeout=60)
        self.asked = (method, path, body)
        self.answered = 0
        self.ended = False
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            while not self.ended:
                self.connection.request(*self.asked)
                answer = self.connection.getresponse()
                answer.read()
                assert answer.status == 200
                self.ended = answer.getheader("connection") == "close"
                self.answered += 1
        except Exception as error:  # noqa: BLE001 - the test's thread looks at it
            self.failure = error
        finally:
            self.connection.close()


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Send requests on 16 connections, each of which an answer must close."""
    clients = [Busy(url, *ASKED[number % len(ASKED)]) for number in range(16)]
    for client in clients:
        client.start()
    wait_until(lambda: all(client.answered > 2 or client.failure for client in clients))
    yield
    for client in clients:
        client.join(60)
    assert [client.failure for client in clients] == [None] * 16
    assert all(client.ended for client in clients)


@pytest.mark.matrix
def test_busy_connections_lose_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "LINGER_SECONDS", 60.0)
    server = ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0)
    with busy(server.http_url):
        server.close()


@pytest.mark.matrix
def test_nor_do_they_before_the_ports_close(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with running(model, "--ready-delay", "60s", home=folder) as (process, addresses):
        with busy(addresses["http"]):
            process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


@pytest.mark.matrix
def test_nor_do_busy_connections_of_grpc(folder: Path) -> None:
    """After a GOAWAY, a client sends no request on its connection, and a new one is refused."""
    model = str(onnx_models.affine(folder))
    answered, ends = [0] * 8, []

    def ask(number: int, address: str) -> None:
        apart: Any = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(address, apart) as channel:
            infer: Any = channel.unary_unary(INFER, None, pb.ModelInferResponse.FromString)
            try:
                while floats(infer(affine(row(number)).SerializeToString(), timeout=60)) == affine_of(row(number)):
                    answered[number] += 1
                ends.append("a wrong answer")
            except grpc.RpcError as error:
                ends.append(str(error.details()))

    with running(model, home=folder) as (process, addresses):
        address = addresses["grpc"].partition("://")[2]
        clients = [threading.Thread(target=ask, args=(number, address), daemon=True) for number in range(8)]
        for client in clients:
            client.start()
        wait_until(lambda: bool(ends) or min(answered) > 2)
        process.send_signal(signal.SIGTERM)
        for client in clients:
            client.join(60)
        assert process.wait(60) == 0
    assert len(ends) == 8
    assert [end for end in ends if "Connection refused" not in end] == []


@pytest.mark.matrix
def test_an_idle_connection_may_ask_once_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "LINGER_SECONDS", 60.0)
    server = ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0)
    clients = [Busy(server.http_url, *asked) for asked in ASKED]
    for client in clients:
        client.connection.connect()
    closing = threading.Thread(target=server.close)
    closing.start()
    wait_until(lambda: refuses(server.http_url))
    for client in clients:
        client.start()
        client.join(60)
    closing.join(60)
    assert [(client.failure, client.answered) for client in clients] == [(None, 1)] * len(ASKED)


def test_nor_is_a_connection_of_grpc_lost_that_begins_after_the_port_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some clients send their first call before they have read anything."""
    monkeypatch.setattr(fast, "_SILENT_SECONDS", 60.0)
    server = ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0)
    host, _, port = server.grpc_url.partition("://")[2].rpartition(":")
    with Peer((host, int(port)), settings=None, timeout=60) as client:
        closing = threading.Thread(target=server.close)
        closing.start()
        wait_until(lambda: refuses(server.grpc_url))
        client.begin()
        client.send(client.call(1, message(affine(row(1)))))
        assert floats(unpacked(client.answer(1)[1])) == affine_of(row(1))
        client.send(*[frame(PING, ACK, 0, each.opaque_data) for each in client.seen if isinstance(each, PingFrame)])
        closing.join(60)
        assert not closing.is_alive()


def test_an_idle_connection_that_asks_nothing_is_closed(folder: Path) -> None:
    server = ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0)
    client = Busy(server.http_url, *ASKED[0])
    client.connection.connect()
    server.close()
    assert client.connection.sock.recv(1) == b""
    client.connection.close()


@pytest.mark.matrix
def test_a_closed_terminal_stops_the_server(folder: Path) -> None:
    """Its server would otherwise run on, since SIGHUP reloads."""
    model = str(onnx_models.affine(folder))
    command = [sys.executable, "-m", "ingot", "serve", model, "--http-port", "0", "--grpc-port", "0", "--json"]
    terminal, end = pty.openpty()
    # Not pty.fork: gRPC's fork handlers, of other tests' clients, can abort the forked process.
    process = subprocess.Popen(
        ["setsid", "--ctty", *command],
        stdin=end,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "INGOT_HOME": str(folder)},
    )
    os.close(end)
    try:
        assert process.stdout is not None
        with ingot.Client(json.loads(process.stdout.readline())["http"]) as client:
            process.send_signal(signal.SIGHUP)
            assert client.ready()
        os.close(terminal)
        process.wait(60)
    finally:
        process.kill()
        process.communicate()


HUNG_UP = """
import os, signal, sys
from ingot.server import main as server
from ingot.server.http.asgi import LazyApp
create, warm = server.create, LazyApp.warm

async def warm_and_say(self):
    await warm(self)
    print("warmed:", sorted(self._app.openapi_schema), file=sys.stderr, flush=True)

LazyApp.warm = warm_and_say

def hang_up(*arguments, **options):
    os.kill(os.getpid(), signal.SIGHUP)
    return create(*arguments, **options)

server.create = hang_up
from ingot.__main__ import main
main()
"""


@pytest.mark.matrix
def test_a_hangup_before_the_server_runs_reloads_its_models_later(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    command = [sys.executable, "-c", HUNG_UP, "serve", model, "--http-port", "0", "--grpc-port", "0", "--json"]
    process = subprocess.Popen(
        [*command, "--log-level", "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "INGOT_HOME": str(folder)},
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["models"]
        # Also without a request, what the first one would wait for is prepared.
        wanted = {"SIGHUP: reloading", "warmed: ['components', 'info', 'openapi', 'paths']"}
        while wanted:
            line = process.stderr.readline()
            assert line
            wanted -= {text for text in wanted if text in line}
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.matrix
def test_a_hangup_that_is_ignored_stays_so(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    command = ["nohup", sys.executable, "-m", "ingot", "serve", model, "--http-port", "0", "--grpc-port", "0", "--json"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "INGOT_HOME": str(folder)},
    )
    try:
        assert process.stdout is not None
        addresses = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGHUP)
        with ingot.Client(addresses["http"]) as client:
            assert client.ready()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()
