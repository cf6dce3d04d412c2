"""Clients that begin a request and never finish it: what they hold is given back, and those who are slow are served."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.server.http import protocol
from ingot.server.main import RunningServer
from tests import onnx_models
from tests.server.apponly import serve_app
from tests.server.faults.http1 import PATH, Answer, Connection, body_of, request
from tests.server.outside import wait_until
from tests.server.test_tls import make

MIB = 1 << 20
BODY = body_of([1, 2, 3])


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is a fifth of a second here, and a mebibyte a kibibyte."""
    monkeypatch.setattr(protocol, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(protocol, "BODY_BYTES", 1024)


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[RunningServer]:
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0, **settings) as server:
        yield server


def address_of(url: str) -> tuple[str, int]:
    host, _, port = url.rpartition("/")[2].rpartition(":")
    return host, int(port)


def counted(server: RunningServer, protocol: str) -> bool:
    with ingot.Client(server.http_url) as client:
        return f'ingot_errors_total{{code="deadline_exceeded",protocol="{protocol}"}}' in client.metrics()


def head(*headers: str, path: str = PATH, method: str = "POST") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


STALLED = {
    "a length": head(f"Content-Length: {MIB}") + b" " * (MIB - 1),
    "chunks": head("Transfer-Encoding: chunked") + b"%x\r\n" % MIB + b" " * (MIB - 1),
    "after the last chunk": head("Transfer-Encoding: chunked") + b"%x\r\n%b\r\n0\r\n" % (MIB, b" " * MIB),
    "for FastAPI": head(f"Content-Length: {MIB}", path=PATH.replace("infer", "%69nfer")) + b" " * (MIB - 1),
}


@pytest.mark.usefixtures("quickly")
class TestHttp:
    @pytest.mark.parametrize("kind", STALLED)
    def test_bodies_that_are_never_finished_shut_nobody_out(self, tmp_path: Path, kind: str) -> None:
        with serving(tmp_path, max_body_mb=1, max_bodies_mb=1) as server, contextlib.ExitStack() as stack:
            address = address_of(server.http_url)
            stalled = [stack.enter_context(Connection(address)) for _ in range(2)]
            for connection in stalled:
                connection.send(STALLED[kind])
            answers = [connection.answers() for connection in stalled]
            # One has the budget, and the other, which is refused for it, may be cut off before it has read so.
            assert 408 in [answer.status for each in answers for answer in each]
            assert all(answer.status in (408, 503) for each in answers for answer in each)
            assert counted(server, "http")
            with Connection(address) as honest:
                honest.send(request(BODY + b" " * (MIB - len(BODY))))
                assert honest.answer().values == [3, 5, 7]

    def test_a_byte_now_and_then_does_not_hold_it(self, tmp_path: Path) -> None:
        with serving(tmp_path) as server, Connection(address_of(server.http_url), timeout=0.05) as connection:
            connection.send(head("Content-Length: 100000"))
            assert dripping(connection, b" ").status == 408

    def test_what_is_slow_but_comes_is_answered(self, tmp_path: Path) -> None:
        """Far slower than a minute in all, and each minute as much as must come."""
        body = BODY + b" " * 20_000
        with serving(tmp_path) as server, Connection(address_of(server.http_url)) as connection:
            for _ in range(2):  # the second with a timer that the first has left
                connection.send(request(body)[: -len(body)])
                for start in range(0, len(body), 1000):
                    connection.send(body[start : start + 1000])
                    time.sleep(0.04)
                assert connection.answer().values == [3, 5, 7]

    def test_a_body_that_the_server_does_not_read_has_time(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It comes behind a request that takes some of those minutes, until whose answer nothing is read."""
        monkeypatch.setattr(protocol, "BODY_SECONDS", 0.02)
        model = onnx_models.slow(tmp_path, repeats=200)
        slow = {"name": "x", "datatype": "FP32", "shape": [64, 1024], "data": [1.0] * 65536}
        first = request(json.dumps({"inputs": [slow]}).encode(), "/v2/models/slow/infer")
        second = request(body_of([1]) + b" " * 500, "/v2/models/slow/infer")
        with (
            ingot.serve(str(model), http_port=0, grpc_port=0, max_batch=64) as server,
            Connection(address_of(server.http_url)) as connection,
        ):
            connection.send(first + second[:-100])
            connection.send(second[-100:])
            assert [connection.answer().status for _ in range(2)] == [200, 400]

    def test_a_connection_that_is_idle_after_a_body_in_parts_is_kept(self, tmp_path: Path) -> None:
        with serving(tmp_path) as server, Connection(address_of(server.http_url)) as connection:
            for _ in range(2):
                connection.send(request(BODY)[:-5])
                time.sleep(0.02)
                connection.send(BODY[-5:])
                assert connection.answer().values == [3, 5, 7]
                time.sleep(0.5)

    def test_a_body_that_goes_on_after_its_refusal_holds_no_connection(self, tmp_path: Path) -> None:
        """FastAPI answers before the body is there, and keeps the connection for what follows it."""
        with serving(tmp_path) as server, Connection(address_of(server.http_url)) as connection:
            connection.send(head("Content-Length: 1000", path="/v2/health/live") + b"x")
            assert connection.answer().status == 405
            with pytest.raises((EOFError, ConnectionResetError)):
                connection.answer()

    def test_over_tls(self, tmp_path: Path) -> None:
        cert, key = make(tmp_path)
        context = ssl.create_default_context(cafile=str(cert))
        with (
            serving(tmp_path, tls_cert=cert, tls_key=key) as server,
            Connection(address_of(server.http_url)) as connection,
        ):
            connection.socket = context.wrap_socket(connection.socket, server_hostname="127.0.0.1")
            connection.send(STALLED["a length"])
            assert connection.answer().status == 408

    def test_of_fastapi_alone(self, tmp_path: Path) -> None:
        with serve_app([str(onnx_models.affine(tmp_path))], MIB) as url, Connection(address_of(url)) as connection:
            connection.send(STALLED["a length"])
            assert connection.answer().status == 408


def dripping(connection: Connection, drop: bytes) -> Answer:
    """Send a little again and again until there is an answer."""
    found: list[Answer] = []

    def answered() -> bool:
        connection.send(drop)
        with contextlib.suppress(TimeoutError):
            found.append(connection.answer())
        return bool(found)

    wait_until(answered)
    return found[0]
