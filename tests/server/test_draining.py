"""A server that stops loses no request: every connection ends with an answer that announces it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import ingot
from ingot.server.http import timeouts
from tests import onnx_models
from tests.server.gates import Gate
from tests.server.outside import wait_until
from tests.server.test_lifecycle import one_held, refuses, running

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


def test_busy_connections_lose_no_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "LINGER_SECONDS", 60.0)
    server = ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0)
    with busy(server.http_url):
        server.close()


@pytest.mark.parametrize("options", [(), ("--frontends", "2")], ids=["one process", "fronts"])
@pytest.mark.one_case
def test_nor_do_they_before_the_ports_close(folder: Path, options: tuple[str, ...]) -> None:
    model = str(onnx_models.affine(folder))
    with running(model, "--ready-delay", "60s", *options, home=folder) as (process, addresses):
        with busy(addresses["http"]):
            process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM


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


def test_an_idle_connection_that_asks_nothing_is_closed(folder: Path) -> None:
    server = ingot.serve(onnx_models.affine(folder), http_port=0, grpc_port=0)
    client = Busy(server.http_url, *ASKED[0])
    client.connection.connect()
    server.close()
    assert client.connection.sock.recv(1) == b""
    client.connection.close()


@pytest.mark.parametrize("options", [(), ("--frontends", "2")], ids=["one process", "fronts"])
@pytest.mark.one_case
def test_a_hangup_drains_and_never_kills(folder: Path, gate: Gate, options: tuple[str, ...]) -> None:
    model = str(onnx_models.held(folder))
    with (
        running(model, "--drain-timeout", "1", *options, home=folder, gate=gate) as (process, addresses),
        one_held(addresses, gate),
    ):
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: refuses(addresses["http"]))
        assert process.wait(60) == 0


def test_a_hangup_that_is_ignored_stays_so(folder: Path) -> None:
    """As ``nohup`` has it."""
    model = str(onnx_models.affine(folder))
    command = [sys.executable, "-m", "ingot", "serve", model, "--http-port", "0", "--grpc-port", "0", "--json"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "INGOT_HOME": str(folder)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
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
