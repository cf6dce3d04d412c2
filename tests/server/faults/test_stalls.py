"""Clients that begin a request and never finish it: their memory is released, and slow clients are still served."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.server.grpc import call, fast
from ingot.server.http import timeouts
from tests import onnx_models
from tests.server.apponly import serve_app
from tests.server.faults.http1 import PATH, Answer, Connection, body_of, request
from tests.server.gates import Gate, hold
from tests.server.http2_peer import CALL, Peer
from tests.server.outside import INFER, message, request_of, wait_until
from tests.server.test_tls import make
from tests.support import matrix

MIB = 1 << 20
BODY = body_of([1, 2, 3])


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute is a fifth of a second here, and a mebibyte a kibibyte."""
    monkeypatch.setattr(timeouts, "BODY_SECONDS", 0.2)
    monkeypatch.setattr(timeouts, "BODY_BYTES", 1024)


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
    @pytest.mark.parametrize("kind", matrix(*STALLED))
    def test_unfinished_bodies_do_not_shut_others_out(self, tmp_path: Path, kind: str) -> None:
        with serving(tmp_path, max_body_mb=1, max_bodies_mb=1) as server, contextlib.ExitStack() as stack:
            address = address_of(server.http_url)
            stalled = [stack.enter_context(Connection(address)) for _ in range(2)]
            for connection in stalled:
                with contextlib.suppress(ConnectionError):  # the other has the budget, so this one may be refused
                    connection.send(STALLED[kind])
            statuses = [status_of(connection) for connection in stalled]
            assert 408 in statuses
            assert set(statuses) <= {408, 503, None}
            assert counted(server, "http")
            with Connection(address) as honest:
                honest.send(request(BODY + b" " * (MIB - len(BODY))))
                assert honest.answer().values == [3, 5, 7]

    def test_a_byte_now_and_then_does_not_hold_it(self, tmp_path: Path) -> None:
        with serving(tmp_path) as server, Connection(address_of(server.http_url), timeout=0.05) as connection:
            connection.send(head("Content-Length: 100000"))
            assert dripping(connection, b" ").status == 408

    @pytest.mark.matrix
    def test_slow_requests_that_progress_are_answered(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(timeouts, "BODY_SECONDS", 1.0)
        monkeypatch.setattr(timeouts, "BODY_BYTES", 1)
        with serving(tmp_path) as server, Connection(address_of(server.http_url)) as connection:
            for _ in range(2):  # the second while the timer that the first has left still runs
                connection.send(request(BODY)[: -len(BODY)])
                for start in range(0, len(BODY), 10):
                    connection.send(BODY[start : start + 10])
                    time.sleep(0.15)
                assert connection.answer().values == [3, 5, 7]
            time.sleep(1.5)
            connection.send(request(BODY))
            assert connection.answer().values == [3, 5, 7]

    @pytest.mark.source  # patches Timeouts._check_body
    def test_a_body_that_the_server_does_not_read_has_time(
        self, tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It follows a request that takes some of those minutes; nothing is read until that is answered."""
        monkeypatch.setattr(timeouts, "BODY_SECONDS", 0.1)
        hold(gate.path, monkeypatch.setattr)
        looks: list[Any] = []
        look = timeouts.Timeouts._check_body

        def counted_look(self: timeouts.Timeouts) -> None:
            looks.append(self)
            look(self)

        monkeypatch.setattr(timeouts.Timeouts, "_check_body", counted_look)
        first = request(body_of([1, 2, 3]), "/v2/models/held/infer")
        second = request(body_of([1]) + b" " * 500, "/v2/models/held/infer")
        with (
            ingot.serve(str(onnx_models.held(tmp_path)), http_port=0, grpc_port=0) as server,
            Connection(address_of(server.http_url)) as connection,
        ):
            with gate.closed():
                connection.send(first + second[:-100])
                wait_until(lambda: len(looks) > 3)
                connection.send(second[-100:])
            assert [connection.answer().status for _ in range(2)] == [200, 200]

    @pytest.mark.matrix
    def test_a_body_that_continues_after_its_refusal_holds_no_connection(self, tmp_path: Path) -> None:
        """FastAPI answers before the body has arrived, and keeps the connection for later requests."""
        with serving(tmp_path) as server, Connection(address_of(server.http_url)) as connection:
            connection.send(
                b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )  # FastAPI is imported for the first of these
            assert connection.answer().status == 200
            connection.send(head("Content-Length: 1000", path="/v2/health/live") + b"x")
            assert connection.answer().status == 405
            with pytest.raises((EOFError, ConnectionResetError)):
                connection.answer()

    @pytest.mark.one_case
    @pytest.mark.parametrize("path", [PATH, PATH.replace("infer", "%69nfer")], ids=["ours", "FastAPI"])
    @pytest.mark.parametrize("begin", [b"0\r\n", b"0\r\nx: ", b"1;"], ids=["trailers", "a trailer", "an extension"])
    def test_bytes_outside_of_the_body_are_bounded_too(self, tmp_path: Path, path: str, begin: bytes) -> None:
        """At any speed: the server does not count bytes that the parser buffers."""
        with serving(tmp_path) as server, Connection(address_of(server.http_url)) as connection:
            connection.send(head("Transfer-Encoding: chunked", path=path) + b"3\r\n   \r\n" + begin)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    connection.send(b"a: b\r\n" * 10_000 if begin == b"0\r\n" else b"b" * 60_000)
                pytest.fail("the server took 6 MB of it")
            assert status_of(connection) in (431, None)

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

    @pytest.mark.source  # extends Connection
    def test_of_fastapi_alone(self, tmp_path: Path) -> None:
        with serve_app([str(onnx_models.affine(tmp_path))], MIB) as url, Connection(address_of(url)) as connection:
            connection.send(STALLED["a length"])
            assert connection.answer().status == 408


def status_of(connection: Connection) -> int | None:
    """Return the answer's status; None if it was lost because the server closed while more bytes were on their way."""
    try:
        return connection.answer().status
    except (EOFError, ConnectionError):
        return None


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


SERVICE = INFER.rpartition("/")[0]
STREAM = f"{SERVICE}/ModelStreamInfer"
UNFINISHED = b"\0" + MIB.to_bytes(4, "big") + bytes(MIB - 1)
WHOLE = message(request_of(np.zeros((80_000, 3), np.float32)))
WATCH = "/grpc.health.v1.Health/Watch"


def begun(path: str, body: bytes) -> Callable[[Peer], bytes]:
    changed = [(name, path if name == ":path" else value) for name, value in CALL]
    return lambda peer: peer.call(1, body, end=False, headers=changed)


STALLED_CALLS = {
    "ModelInfer": (begun(INFER, UNFINISHED), "4"),
    "ModelInfer without its end": (begun(INFER, WHOLE), "4"),
    "ModelStreamInfer": (begun(STREAM, message(request_of(np.zeros((1, 3), np.float32))) + UNFINISHED), "4"),
    "Check": (begun("/grpc.health.v1.Health/Check", UNFINISHED), "4"),
    "Watch": (begun(WATCH, UNFINISHED), "4"),
    "Watch, twice": (begun(WATCH, bytes(5) + WHOLE), "3"),  # it takes one message
}


class TestGrpc:
    @pytest.fixture(autouse=True)
    def quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Connections are looked at so often that a minute is 0.18 s; a mebibyte is a kibibyte."""
        monkeypatch.setattr(fast, "_POLL_SECONDS", 0.03)
        monkeypatch.setattr(fast, "_END", 1 << 30)  # a client that is silent for so short a time is not closed
        monkeypatch.setattr(call, "BODY_BYTES", 1024)

    @pytest.mark.matrix
    @pytest.mark.parametrize("kind", matrix(*STALLED_CALLS))
    def test_unfinished_messages_do_not_shut_others_out(self, tmp_path: Path, kind: str) -> None:
        with serving(tmp_path, max_body_mb=1, max_bodies_mb=1) as server, contextlib.ExitStack() as stack:
            send, status = STALLED_CALLS[kind]
            stalled = [stack.enter_context(Peer(address_of(server.grpc_url), timeout=30)) for _ in range(2)]
            for peer in stalled:
                peer.started()
                peer.send(send(peer))
            statuses = {peer.answer(1)[0]["grpc-status"] for peer in stalled}
            assert status in statuses
            assert statuses <= {status, "14"}  # where the other has the budget
            x = np.ones((80_000, 3), np.float32)
            with ingot.Client(server.grpc_url) as honest:
                assert (honest.infer("affine", {"x": x})["y"] == 3).all()
            assert status == "3" or counted(server, "grpc")

    def test_a_stream_may_wait_between_messages(self, tmp_path: Path) -> None:
        with serving(tmp_path) as server, Peer(address_of(server.grpc_url)) as peer:
            peer.started()
            one = message(request_of(np.ones((1, 3), np.float32)))
            peer.send(begun(STREAM, one)(peer))
            for count in (1, 2):
                while peer.received(1) < count * len(one):  # an answer is longer than its request
                    assert peer.read() is not None
                time.sleep(0.5)
                peer.send(peer.data(1, one))
            assert not peer.ended(1)

    def test_over_tls(self, tmp_path: Path) -> None:
        cert, key = make(tmp_path)
        context = ssl.create_default_context(cafile=str(cert))
        context.set_alpn_protocols(["h2"])
        with (
            serving(tmp_path, tls_cert=cert, tls_key=key) as server,
            Peer(address_of(server.grpc_url), settings=None) as peer,
        ):
            peer.socket = context.wrap_socket(peer.socket, server_hostname="127.0.0.1")
            peer.begin()
            peer.started()
            peer.send(begun(INFER, UNFINISHED)(peer))
            assert peer.answer(1)[0]["grpc-status"] == "4"
