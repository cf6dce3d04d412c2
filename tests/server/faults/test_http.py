"""HTTP clients that stall, vanish, pipeline or lie, on raw sockets."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time

import pytest

from tests.server.faults.http1 import PATH, Connection, body_of, chunked, request
from tests.server.outside import FOUR_MIB, Service, affine_of, row, wait_until

pytestmark = pytest.mark.usefixtures("bounded_memory", "still_answers", "others")

BAD = body_of([1, 2])
UNKNOWN = "/v2/models/nope/infer"


def raw(values: int, model: str = "increment") -> bytes:
    """Return a request whose tensor of zeros is behind its JSON header."""
    size = 4 * values
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, values], "parameters": {"binary_data_size": size}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = f"Inference-Header-Content-Length: {len(header)}"
    return request(header + bytes(size), f"/v2/models/{model}/infer", "POST", length)


class TestPipelining:
    @pytest.mark.matrix
    def test_answers_arrive_in_order_regardless_of_their_duration(self, service: Service) -> None:
        sent, wanted = b"", []
        for number in range(60):
            if number % 10 == 3:
                sent, status = sent + request(body_of([1, 2, 3]), "/v2/models/held/infer"), 200
            elif number % 10 == 5:
                sent, status = sent + request(BAD), 400
            elif number % 10 == 7:
                sent, status = sent + request(body_of(row(number)), UNKNOWN), 404
            elif number % 10 == 9:
                sent, status = sent + request(b"", "/v2/health/live", "GET"), 200
            else:
                sent, status = sent + request(body_of(row(number), id=str(number))), 200
            wanted.append(status)
        with Connection(service.http_address) as connection:
            with service.gate.closed():
                connection.send(sent)
                wait_until(lambda: service.count("ingot_in_flight_requests", model="held") == 1)
            for number, status in enumerate(wanted):
                answer = connection.answer()
                assert answer.status == status, number
                if status == 200 and number % 10 not in (3, 9):
                    assert answer.values == affine_of(row(number))
                    assert json.loads(answer.body)["id"] == str(number)

    @pytest.mark.matrix
    def test_thousands_in_one_go(self, service: Service) -> None:
        count = 1000
        with Connection(service.http_address) as connection:
            sending = threading.Thread(
                target=connection.send, args=(b"".join(request(body_of(row(number))) for number in range(count)),)
            )
            sending.start()
            for number in range(count):
                assert connection.answer().values == affine_of(row(number))
            sending.join(120)

    @pytest.mark.matrix
    def test_a_client_that_reads_none_of_its_answers(self, service: Service) -> None:
        """Each answer is 4 MiB: the server must stop reading its requests, not keep the answers."""
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                connection = stack.enter_context(Connection(service.http_address, timeout=0.3))
                with contextlib.suppress(OSError):
                    for _ in range(20):
                        connection.send(raw(FOUR_MIB))
            service.check()


class TestSlowly:
    def test_one_byte_at_a_time(self, service: Service) -> None:
        with Connection(service.http_address) as connection:
            for number in range(2):
                for byte in request(body_of(row(number))):
                    connection.send(bytes([byte]))
                assert connection.answer().values == affine_of(row(number))

    @pytest.mark.parametrize("size", [1, 7, 4096])
    def test_chunks(self, service: Service, size: int) -> None:
        with Connection(service.http_address) as connection:
            for number in range(3):
                connection.send(chunked(body_of(row(number)), size))
                assert connection.answer().values == affine_of(row(number))
            connection.send(request(body_of([1, 2, 3])))
            assert connection.answer().values == [3, 5, 7]

    @pytest.mark.matrix
    def test_a_body_of_4_mib_in_small_chunks(self, service: Service) -> None:
        whole = raw(FOUR_MIB)
        head, _, body = whole.partition(b"\r\n\r\n")
        kept = [line for line in head.split(b"\r\n") if not line.startswith(b"Content-Length")]
        parts = [body[start : start + 100] for start in range(0, len(body), 100)]
        with Connection(service.http_address) as connection:
            connection.send(b"\r\n".join([*kept, b"Transfer-Encoding: chunked", b"", b""]))
            connection.send(b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n")
            answer = connection.answer()
        assert answer.status == 200
        assert answer.body.endswith(struct.pack("<4f", 1, 1, 1, 1))

    @pytest.mark.matrix
    @pytest.mark.parametrize("upto", [1, 20, 60, 100, 150])
    def test_clients_that_stop_in_the_middle_and_stay(self, service: Service, upto: int) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(50):
                connection = stack.enter_context(Connection(service.http_address))
                connection.send(request(body_of([1, 2, 3]))[:upto])
            service.check()

    @pytest.mark.matrix
    def test_an_answer_is_read_slowly(self, service: Service) -> None:
        with Connection(service.http_address) as connection:
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            connection.send(raw(FOUR_MIB))
            time.sleep(0.2)
            answer = connection.answer()
        assert answer.status == 200
        assert answer.body.endswith(struct.pack("<f", 1) * 1000)


class TestVanishing:
    def test_a_client_that_shuts_its_own_side_gets_its_answer(self, service: Service) -> None:
        with Connection(service.http_address) as connection:
            connection.send(request(body_of([1, 2, 3])))
            connection.socket.shutdown(socket.SHUT_WR)
            assert connection.answer().values == [3, 5, 7]  # of any duration: answers() waits for a second
            assert connection.answers() == []

    @pytest.mark.one_case
    @pytest.mark.parametrize("upto", [30, 100, 150, None])
    def test_clients_that_reset_their_connection(self, service: Service, upto: int | None) -> None:
        for _ in range(100):
            with Connection(service.http_address) as connection:
                connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.send(request(body_of([1, 2, 3]))[:upto])

    @pytest.mark.matrix
    def test_clients_that_leave_while_a_long_batch_runs(self, service: Service) -> None:
        before = service.count("ingot_requests_total", model="held", code="cancelled")
        with service.gate.closed():
            with contextlib.ExitStack() as stack:
                for _ in range(20):
                    connection = stack.enter_context(Connection(service.http_address))
                    connection.send(raw(1024, "held"))
                wait_until(lambda: service.count("ingot_in_flight_requests", model="held") == 20)
            wait_until(lambda: service.count("ingot_requests_total", model="held", code="cancelled") == before + 20)
        wait_until(lambda: service.count("ingot_in_flight_requests", model="held") == 0)


# One request that hides another in its body, by lengths that two readers may read in two ways: RFC 9112, 6.3 and 11.2.
INNER = request(body_of([7, 7, 7]), PATH)
HEAD = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n".encode()
JSON_BODY = body_of([1, 2, 3])
SMUGGLED = {
    "a length and chunks": HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + INNER,
    "chunks and a length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + INNER,
    "two lengths": HEAD + b"Content-Length: 0\r\nContent-Length: %d\r\n\r\n" % len(INNER) + INNER,
    "two lengths in one": HEAD + b"Content-Length: 0, %d\r\n\r\n" % len(INNER) + INNER,
    "a length with a sign": HEAD + b"Content-Length: +%d\r\n\r\n" % len(JSON_BODY) + JSON_BODY,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + INNER,
    "a length in hex": HEAD + b"Content-Length: 0x10\r\n\r\n" + INNER,
    "a length that overflows": HEAD + b"Content-Length: 18446744073709551617\r\n\r\n" + INNER,
    "a length and a space": HEAD + b"Content-Length : 0\r\n\r\n" + INNER,
    "chunks not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n" + INNER,
    "chunks misspelt": HEAD + b"Transfer-Encoding: xchunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + INNER,
    "a chunk size that overflows": HEAD + b"Transfer-Encoding: chunked\r\n\r\n10000000000000005\r\nabcde\r\n0\r\n\r\n",
    "a chunk size with a sign": HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\nabcde\r\n0\r\n\r\n",
    "a chunk without its end": HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nabcdeX0\r\n\r\n" + INNER,
    "a folded header": HEAD + b"Content-Length: 0\r\n Transfer-Encoding: chunked\r\n\r\n" + INNER,
    "a NUL in a header": HEAD + b"X-A: \x00\r\nContent-Length: 0\r\n\r\n" + INNER,
    "a bare line feed in a header": HEAD + b"X-A: b\nContent-Length: 0\r\n\r\n" + INNER,
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", SMUGGLED)
def test_ambiguous_framing_ends_the_connection(service: Service, kind: str) -> None:
    with Connection(service.http_address) as connection:
        connection.send(SMUGGLED[kind])
        answers = connection.answers()
    assert all(answer.status >= 400 or answer.values != [15, 15, 15] for answer in answers), answers


@pytest.mark.one_case
@pytest.mark.parametrize("first", SMUGGLED)
def test_it_is_so_after_requests_of_the_same_kind_that_were_right(service: Service, first: str) -> None:
    """A server may recognize a head that it has seen, but must still check it."""
    with Connection(service.http_address) as connection:
        for _ in range(3):
            connection.send(request(body_of([1, 2, 3])))
            assert connection.answer().values == [3, 5, 7]
        connection.send(SMUGGLED[first])
        answers = connection.answers()
    assert all(answer.status >= 400 or answer.values != [15, 15, 15] for answer in answers), answers


@pytest.mark.matrix
def test_the_same_head_with_other_bodies(service: Service) -> None:
    with Connection(service.http_address) as connection:
        for number in range(100, 200):
            connection.send(request(body_of(row(number))))
            assert connection.answer().values == affine_of(row(number))


GARBAGE = {
    "zeros": bytes(200_000),
    "a line that never ends": b"GET /" + b"a" * 1_000_000,
    "headers that never end": HEAD + b"".join(b"X-%d: y\r\n" % number for number in range(100_000)),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(1000),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 4,
    "a version of the future": b"GET /v2/health/live HTTP/3.0\r\nHost: x\r\n\r\n",
    "a request after nonsense": b"\r\n\r\nnonsense\r\n\r\n" + request(body_of([1, 2, 3])),
}


@pytest.mark.one_case
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage(service: Service, kind: str) -> None:
    for _ in range(5):
        with Connection(service.http_address) as connection:
            with contextlib.suppress(OSError):
                connection.send(GARBAGE[kind])
            assert all(answer.status >= 400 for answer in connection.answers())
