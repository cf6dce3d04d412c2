"""Pitfalls of connections that answer inference directly: similar heads, order of answers, and disconnects."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.server.http import timeouts
from ingot.server.http.exchange import HttpState, PendingBody
from ingot.server.http.parser import InferHead, RequestHead
from ingot.server.plane.dataplane import DataPlane
from ingot.serving import Repository
from tests import onnx_models
from tests.server.gates import Gate, hold
from tests.server.outside import wait_until
from tests.support import run_python

PATH = b"/v2/models/affine/infer"


def body(*values: float) -> bytes:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": values}
    return json.dumps({"inputs": [tensor]}).encode()


BODY = body(1, 2, 3)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
PLAIN = b"POST " + PATH + b" HTTP/1.1\r\nHost: x\r\n" + LENGTH + b"\r\n"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def ends_of(connection: socket.socket) -> list[str]:
    """Return the ports of a connection as Linux's table writes them, the server's first."""
    return [f":{end[1]:04X}" for end in (connection.getpeername(), connection.getsockname())]


def server_end(ends: list[str]) -> list[str] | None:
    """Return the entry of the server's end of a connection in Linux's table; None if that is not open."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if [fields[1][-5:], fields[2][-5:], fields[3]] == [*ends, "01"]:  # ESTABLISHED
            return fields
    return None


def unread_by_server(ends: list[str]) -> bool:
    """Return whether the server's end of a connection has bytes that its process has not read."""
    found = server_end(ends)
    return found is not None and int(found[4].partition(":")[2], 16) > 0


def exchange(url: str, *parts: bytes) -> bytes:
    """Send parts, each of which the server reads separately, and return all bytes until the server closes."""
    with connect(url) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ends = ends_of(connection)
        with contextlib.suppress(ConnectionError):  # refused, and closed
            for number, part in enumerate(parts):
                if number:  # a pause would not suffice for a server that waits for a core
                    wait_until(lambda: not unread_by_server(ends))
                connection.sendall(part)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    return received


def statuses(received: bytes) -> list[bytes]:
    return re.findall(rb"HTTP/1\.1 (\d+)", received)


LAST = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.fixture
def known(server: RunningServer) -> Iterator[str]:
    """A server that has seen the plain head, and answers requests with it without parsing."""
    assert statuses(exchange(server.http_url, PLAIN + BODY, PLAIN + BODY, LAST)) == [b"200"] * 3
    yield server.http_url
    assert b'"data":[3.0,5.0,7.0]' in exchange(server.http_url, PLAIN + BODY, LAST)


def test_a_known_head_does_not_imply_the_body(known: str) -> None:
    bodies = [body(n, 0, 0) for n in range(1, 9)]
    assert {len(each) for each in bodies} == {len(BODY)}
    received = exchange(known, *(PLAIN + each for each in bodies), PLAIN + b"{" * len(BODY), PLAIN + BODY, LAST)
    assert re.findall(rb'"y",[^\[]*\[1,3\],"data":\[([\d.]+)', received) == [
        b"%.1f" % (2 * n + 1) for n in (*range(1, 9), 1)
    ]
    assert statuses(received) == [b"200"] * 8 + [b"400", b"200", b"200"]


@pytest.mark.parametrize(
    "cut", [1, 20, len(PLAIN) - 3, len(PLAIN) - 1, len(PLAIN), len(PLAIN) + 1, len(PLAIN + BODY) - 1]
)
def test_a_known_request_in_two_packets(known: str, cut: int) -> None:
    request = PLAIN + BODY
    assert statuses(exchange(known, request[:cut], request[cut:], request, LAST)) == [b"200"] * 3


def test_known_unknown_and_bad_requests_in_one_packet_are_answered_in_order(known: str) -> None:
    nope = PLAIN.replace(b"affine", b"nope") + BODY
    other = b"GET /v2/models/affine HTTP/1.1\r\nHost: x\r\n\r\n"
    bad = PLAIN + b"x" * len(BODY)
    requests = [PLAIN + BODY, nope, other, PLAIN + BODY, bad, bad, other, PLAIN + BODY]
    wanted = [b"200", b"404", b"200", b"200", b"400", b"400", b"200", b"200"]
    received = exchange(known, b"".join(requests * 20) + LAST)
    assert statuses(received) == [*(wanted * 20), b"200"]


ODD = {
    "two lengths": PLAIN.replace(LENGTH, LENGTH + b"Content-Length: 5\r\n"),
    "the same length twice": PLAIN.replace(LENGTH, LENGTH + LENGTH),
    "length and chunks": PLAIN.replace(LENGTH, LENGTH + b"Transfer-Encoding: chunked\r\n"),
    "chunks and length": PLAIN.replace(LENGTH, b"Transfer-Encoding: chunked\r\n" + LENGTH),
    "a signed length": PLAIN.replace(b"Length: ", b"Length: +"),
    "a length of letters": PLAIN.replace(LENGTH, b"Content-Length: x\r\n"),
    "a space before the colon": PLAIN.replace(b"Length:", b"Length :"),
    "a folded header": PLAIN.replace(b"Host: x\r\n", b"Host: x\r\n y\r\n"),
    "ends of lines without CR": PLAIN.replace(b"\r\n", b"\n"),
    "an empty line first": b"\r\n" + PLAIN,
    "two empty lines first": b"\r\n\r\n" + PLAIN,
    "lower case": PLAIN.replace(b"Content-Length", b"content-length"),
    "a lower-case method": PLAIN.replace(b"POST", b"post"),
    "an escaped name": PLAIN.replace(b"affine", b"%61ffine"),
    "an escaped slash": PLAIN.replace(b"affine", b"a%2fffine"),
    "a query": PLAIN.replace(b"/infer", b"/infer?version=9"),
    "a whole address": PLAIN.replace(PATH, b"http://other" + PATH),
    "a slash too many": PLAIN.replace(b"/infer", b"/infer/"),
    "bytes that are not ASCII": PLAIN.replace(b"affine", b"aff\xffine"),
    "HTTP/1.0": PLAIN.replace(b"1.1", b"1.0"),
    "HTTP/1.2": PLAIN.replace(b"1.1", b"1.2"),
    "an expectation": PLAIN.replace(LENGTH, LENGTH + b"Expect: 100-continue\r\n"),
    "a version": PLAIN.replace(b"/infer", b"/versions/1/infer"),
    "another version": PLAIN.replace(b"/infer", b"/versions/7/infer"),
    "the wrong method": PLAIN.replace(b"POST", b"PUT"),
    "HEAD": PLAIN.replace(b"POST", b"HEAD"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("head", ODD.values(), ids=ODD)
def test_odd_heads_are_answered_as_fastapi_answers_them(known: str, app_url: str, head: bytes) -> None:
    """Each twice on one connection, so that the second one finds the remembered head."""

    def told(url: str) -> list[bytes]:
        return statuses(exchange(url, head + BODY, head + BODY, PLAIN + BODY, LAST))

    assert told(known) == told(app_url)


def test_an_upgrade_to_another_protocol_is_ignored(known: str) -> None:
    """Java's client makes one with its first request."""
    head = PLAIN.replace(
        LENGTH, LENGTH + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AA\r\n"
    )
    for _ in range(2):  # one after the other: it cannot be ignored behind a request that is unanswered
        assert statuses(exchange(known, head + BODY, LAST)) == [b"200"] * 2


UPGRADE = PLAIN.replace(LENGTH, b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n" % len(PLAIN + BODY))
CHUNKS = UPGRADE.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nX-Length")
SPLIT = {
    "head in two packets": (UPGRADE[:40], UPGRADE[40:], PLAIN + BODY),
    "head in two, body with the second": (UPGRADE[:40], UPGRADE[40:] + PLAIN + BODY, LAST),
    "head over 4 KiB": (UPGRADE.replace(b"Host", b"X-Pad: %b\r\nHost" % (b"a" * 5000)), PLAIN + BODY),
    "chunks": (CHUNKS[:40], CHUNKS[40:], PLAIN + BODY),
    "for FastAPI": (UPGRADE[:9] + b"/metrics HTTP/1.1\r\nHost: x\r\n", UPGRADE[UPGRADE.index(b"Conn") :], PLAIN + BODY),
}


@pytest.mark.parametrize("parts", SPLIT.values(), ids=SPLIT)
def test_an_upgrade_that_cannot_be_ignored_ends_the_connection(known: str, parts: tuple[bytes, ...]) -> None:
    """The parser does not accept a body after it, so the body would become the next request."""
    received = exchange(known, *parts)
    assert statuses(received) == [b"400"]
    assert b"Upgrade" in received


@pytest.mark.matrix
def test_such_an_offer_behind_a_request_in_work(held: tuple[RunningServer, bytes], gate: Gate) -> None:
    server, request = held
    health = LAST.replace(b"Connection: close\r\n", b"")
    offer = UPGRADE.replace(b"Content-Length: %d" % len(PLAIN + BODY), b"Content-Length: %d" % len(health))
    with connect(server.http_url) as connection:
        with gate.closed():
            connection.sendall(request + offer)
            in_work(server)
            connection.sendall(health)
        received = rest_of(connection)
    # The last can be lost: a connection that is closed while something unread is left in it is reset.
    assert statuses(received) in ([b"200"], [b"200", b"400"])
    assert b'"live"' not in received


@pytest.mark.matrix
def test_http_1_0_gets_no_interim_answers(held: tuple[RunningServer, bytes], gate: Gate) -> None:
    server, request = held
    old = request.replace(b"HTTP/1.1\r\n", b"HTTP/1.0\r\nExpect: 100-continue\r\n", 1)
    with connect(server.http_url) as connection:
        with gate.closed():
            connection.sendall(old[:200])
            for _ in range(3):  # meanwhile the server has read the head, and would have asked for the body
                assert httpx.get(server.http_url + "/v2/health/live", trust_env=False).status_code == 200
            connection.sendall(old[200:])
            connection.shutdown(socket.SHUT_WR)
            in_work(server)
        received = rest_of(connection)
    assert statuses(received) == [b"200"]


def in_work(server: RunningServer) -> None:
    """Wait until the held model has a request."""
    line = 'ingot_in_flight_requests{model="held",version="1"} 1.0'
    wait_until(lambda: line in httpx.get(server.http_url + "/metrics", trust_env=False).text)


def rest_of(connection: socket.socket) -> bytes:
    """Return the bytes until the server closes the connection."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 20):
            received += part
    return received


def test_a_client_that_sends_the_body_at_once_gets_no_100_continue(known: str) -> None:
    head = PLAIN.replace(LENGTH, LENGTH + b"Expect: 100-continue\r\n")
    assert statuses(exchange(known, head + BODY, LAST)) == [b"200", b"200"]
    assert statuses(exchange(known, head, BODY, LAST)) == [b"100", b"200", b"200"]


def test_a_client_that_reads_nothing_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "UNREAD_SECONDS", 0.1)
    rows = 200_000
    size = 12 * rows  # the answer is twice as long, more than the systems of both sides keep
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 3], "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n" % (PATH, len(header))
    with (
        ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0) as server,
        socket.socket() as connection,
    ):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(("127.0.0.1", int(server.http_url.rpartition(":")[2])))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % (len(header) + size) + header + bytes(size))
        ends = ends_of(connection)
        wait_until(lambda: server_end(ends) is None)
        received = 0
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                received += len(part)
    assert 0 < received < 2 * size


@pytest.mark.source
@pytest.mark.matrix
def test_a_body_in_tiny_chunks_needs_little_more_memory_than_its_length() -> None:
    connection = SimpleNamespace(shared=HttpState(DataPlane(Repository()), 1 << 24, 1 << 24))
    head = RequestHead(b"POST", PATH, "1.1", (), True, None, infer=InferHead("affine", "", None, "", None))
    arriving = PendingBody(cast(Any, connection), head)
    tracemalloc.start()
    for number in range(50_000):
        arriving.take(struct.pack("<H", number % 65536))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 500_000


@pytest.mark.matrix
def test_thousands_of_bad_requests_in_one_packet(known: str) -> None:
    """Each is answered at once, which must not nest."""
    bad = b"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx"
    count = 3000
    assert statuses(exchange(known, bad, bad * count + LAST)) == [b"400"] * (count + 1) + [b"200"]


def test_a_request_hidden_in_the_body_of_a_known_one_is_not_answered(known: str) -> None:
    hidden = PLAIN + BODY
    head = PLAIN.replace(LENGTH, b"Content-Length: %d\r\n" % len(hidden))
    received = exchange(known, head + hidden, head + hidden, LAST)
    assert statuses(received) == [b"400", b"400", b"200"]


@pytest.fixture
def held(folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunningServer, bytes]]:
    """A server, and a request whose answer waits for the gate."""
    hold(gate.path, monkeypatch.setattr)
    x = np.ones((64, 1024), np.float32).tobytes()
    tensor = {"name": "x", "datatype": "FP32", "shape": [64, 1024], "parameters": {"binary_data_size": len(x)}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = b"POST /v2/models/held/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %d\r\n" % len(header)
    with ingot.serve(str(onnx_models.held(folder)), http_port=0, grpc_port=0) as server:
        yield server, head + b"Content-Length: %d\r\n\r\n" % (len(header) + len(x)) + header + x


class TestDepartures:
    def test_a_client_that_only_shuts_its_own_side_gets_its_answer(
        self, held: tuple[RunningServer, bytes], gate: Gate
    ) -> None:
        server, request = held
        with connect(server.http_url) as connection:
            with gate.closed():
                connection.sendall(request)
                connection.shutdown(socket.SHUT_WR)
                received = connection.recv(1 << 20)  # by which the server finds out whether the client is there
            assert statuses(received) == [b"100"]
            received = rest_of(connection)
        assert statuses(received)[-1] == b"200"
        assert len(received) > 64 * 1024 * 4

    def test_and_so_it_does_for_every_request_that_it_sent(self, server: RunningServer) -> None:
        with connect(server.http_url) as connection:
            connection.sendall((PLAIN + BODY) * 5)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while part := connection.recv(65536):
                received += part
        assert [status for status in statuses(received) if status != b"100"] == [b"200"] * 5


def test_refusals_say_when_to_ask_again(folder: Path) -> None:
    model = str(onnx_models.affine(folder))
    with (
        ingot.serve(model, http_port=0, grpc_port=0, max_bodies_mb=1) as server,
        connect(server.http_url) as first,
    ):
        first.sendall(PLAIN.replace(LENGTH, b"Content-Length: 900000\r\n") + bytes(800_000))
        for _ in range(200):  # until the server has read the first one's bytes
            answer = httpx.post(server.http_url + PATH.decode(), content=BODY + b" " * 500_000, trust_env=False)
            if answer.status_code == 503:
                break
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.matrix
def test_inference_and_health_checks_need_no_fastapi(folder: Path) -> None:
    model = onnx_models.affine(folder)
    code = f"""
import sys, httpx, ingot
with ingot.serve({str(model)!r}, http_port=0, grpc_port=0) as server:
    ask = httpx.Client(base_url=server.http_url, trust_env=False)
    answers = [ask.get("/v2/health/ready"), ask.post("/v2/models/affine/infer", content={BODY!r})]
    print([answer.status_code for answer in answers], "fastapi" in sys.modules)
    print(ask.get("/v2/models/affine").status_code, "fastapi" in sys.modules)
"""
    assert run_python(code).splitlines() == ["[200, 200] False", "200 True"]
