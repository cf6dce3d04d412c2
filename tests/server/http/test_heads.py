"""Request lines and headers of RFC 9110 and 9112: invalid ones are refused, unusual ones are answered."""

from __future__ import annotations

import gzip
import json
import re

import httpx
import numpy as np
import pytest

from ingot import RunningServer
from tests.server.http.test_fast_path import BODY, PATH, connect, rest_of

POST = b"POST " + PATH + b" HTTP/1.1\r\n"
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
LIVE = b"GET /v2/health/live %b\r\nHost: x\r\n\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
PACKED = gzip.compress(BODY)
RAW = np.ones(3, np.float32).tobytes()
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": len(RAW)}}
HEADER = json.dumps({"inputs": [TENSOR]}).encode()
MANY = b"".join(b"X-%d: %b\r\n" % (number, b"a" * 100) for number in range(700))


def answer(server: RunningServer, request: bytes) -> tuple[int, bytes]:
    """Send a request and a health check behind it on one connection; return the status and text of the first."""
    with connect(server.http_url) as connection:
        connection.sendall(request)
        head, _, rest = connection.recv(1 << 16).partition(b"\r\n\r\n")
        if b"connection: close" in head:
            rest += rest_of(connection)
        return int(head.split()[1]), head + rest


REFUSED: dict[str, tuple[bytes, int, bytes]] = {
    "no Host": (POST + LENGTH + BODY, 400, b"exactly one 'Host' header; it has 0"),
    "no Host, for FastAPI": (b"GET /v2 HTTP/1.1\r\n\r\n", 400, b"exactly one 'Host' header; it has 0"),
    "two Hosts": (POST + b"Host: a\r\nHost: a\r\n" + LENGTH + BODY, 400, b"exactly one 'Host' header; it has 2"),
    "an empty Host": (POST + b"Host: \r\n" + LENGTH + BODY, 400, b"'Host' is ''"),
    "a port without a host": (POST + b"Host: :80\r\n" + LENGTH + BODY, 400, b"':80'"),
    "an empty Host, for FastAPI": (b"GET /v2 HTTP/1.1\r\nHost:\r\n\r\n", 400, b"'Host' is ''"),
    "a blank in Host": (POST + b"Host: a b\r\n" + LENGTH + BODY, 400, b"'a b'"),
    "a path in Host": (POST + b"Host: a/b\r\n" + LENGTH + BODY, 400, b"'a/b'"),
    "a port that is not a number": (POST + b"Host: a:b\r\n" + LENGTH + BODY, 400, b"'a:b'"),
    "two Hosts in one": (POST + b"Host: a, b\r\n" + LENGTH + BODY, 400, b"'a, b'"),
    "two Hosts in one without a blank": (POST + b"Host: a,b\r\n" + LENGTH + BODY, 400, b"'a,b'"),
    "two lengths of JSON": (
        POST + b"Host: x\r\n" + b"Inference-Header-Content-Length: %d\r\n" % len(HEADER) * 2 + LENGTH + BODY,
        400,
        b"2 headers 'Inference-Header-Content-Length'",
    ),
    "two Content-Encodings": (
        POST + b"Host: x\r\nContent-Encoding: identity\r\ncontent-encoding: gzip\r\n" + LENGTH + BODY,
        400,
        b"2 headers 'Content-Encoding'",
    ),
    "two Content-Types": (
        POST + b"Host: x\r\n" + b"Content-Type: application/json\r\n" * 2 + LENGTH + BODY,
        400,
        b"2 headers 'Content-Type'",
    ),
    "two Content-Types, for FastAPI": (
        b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Type: a/b\r\nContent-Type: c/d\r\n\r\n",
        400,
        b"2 headers 'Content-Type'",
    ),
    "chunks in HTTP/1.0": (
        POST.replace(b"/1.1", b"/1.0") + b"Host: x\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        400,
        b"HTTP/1.0 has no 'Transfer-Encoding'",
    ),
    "packed chunks": (POST + b"Host: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS, 501, b"'gzip, chunked'"),
    "in two lines": (
        POST + b"Host: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS,
        501,
        b"'gzip, chunked'",
    ),
    "HTTP/0.9": (LIVE % b"HTTP/0.9", 505, b"not HTTP/0.9"),
    "a line without version": (b"GET /v2/health/live\r\n\r\n", 505, b"not HTTP/0.9"),
    "HTTP/1.2": (LIVE % b"HTTP/1.2", 505, b""),
    "HTTP/2.0": (LIVE % b"HTTP/2.0", 505, b"not HTTP/2.0"),
    "HTTP/3.0": (LIVE % b"HTTP/3.0", 505, b""),
    "another protocol": (LIVE % b"FTP/1.1", 400, b""),
    "one large header": (POST + b"Host: x\r\nX-A: " + b"a" * 70_000 + b"\r\n" + LENGTH + BODY, 431, b"64 KiB"),
    "many headers": (POST + b"Host: x\r\n" + MANY + LENGTH + BODY, 431, b"64 KiB"),
    "many short headers": (POST + b"Host: x\r\n" + b"a: b\r\n" * 20_000 + LENGTH + BODY, 431, b"64 KiB"),
    "lines that end without a carriage return": (b"GET /v2/health/live HTTP/1.1\nHost: x\n\n", 400, b""),
    "a long path": (b"GET /v2/" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, b"64 KiB"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_requests_are_refused_and_the_connection_ends(server: RunningServer, case: str) -> None:
    request, status, says = REFUSED[case]
    found, text = answer(server, request)
    assert found == status
    assert b"connection: close" in text
    assert says in text


HEAD = b"HEAD /v2 HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize("first", [POST + b"Host: x\r\n" + LENGTH + BODY, LIVE % b"HTTP/1.1", HEAD])
def test_a_refusal_follows_the_answers_to_earlier_requests(server: RunningServer, first: bytes) -> None:
    with connect(server.http_url) as connection:
        connection.sendall(first + POST + LENGTH)
        received = rest_of(connection)
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"400"]


ANSWERED: dict[str, bytes] = {
    "a name": POST + b"Host: localhost\r\n" + LENGTH + BODY,
    "a name and port": POST + b"Host: my_host.example:8000\r\n" + LENGTH + BODY,
    "an address": POST + b"Host: [::1]:8000\r\n" + LENGTH + BODY,
    "no Host in HTTP/1.0": POST.replace(b"/1.1", b"/1.0") + LENGTH + BODY,
    "chunks": POST + b"Host: x\r\nTransfer-Encoding: Chunked\r\n\r\n" + CHUNKS,
    "x-gzip": POST + b"Host: x\r\nContent-Encoding: x-gzip\r\nContent-Length: %d\r\n\r\n" % len(PACKED) + PACKED,
    "blanks behind a number": POST
    + b"Host: x\r\nInference-Header-Content-Length: %d \t\r\n" % len(HEADER)
    + b"Content-Length: %d\r\n\r\n" % (len(HEADER) + len(RAW))
    + HEADER
    + RAW,
    "headers of 60 KiB": POST + b"Host: x\r\nX-A: " + b"a" * 60_000 + b"\r\n" + LENGTH + BODY,
}


@pytest.mark.parametrize("case", ANSWERED)
def test_unusual_but_valid_requests_are_answered(server: RunningServer, case: str) -> None:
    found, text = answer(server, ANSWERED[case])
    assert found == 200, text
    assert b'"data":[3.0,' in text


def test_head_is_get_without_the_body(server: RunningServer) -> None:
    with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
        paths = ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models", "/v2/models/affine", "/openapi.json")
        for path in paths:
            get, head = client.get(path), client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            own = {"date": "", "x-request-id": ""}
            assert {**head.headers, **own} == {**get.headers, **own}
        assert client.head("/metrics").status_code == 200
        assert client.head("/v2/models/nope").status_code == 404
        assert client.head(PATH.decode()).status_code == 405
        assert client.put("/v2").headers["allow"] == "GET, HEAD"
