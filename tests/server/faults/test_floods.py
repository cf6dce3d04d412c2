"""Clients of gRPC that flood, stall or vanish, on raw sockets: other clients are served, and memory stays bounded."""

from __future__ import annotations

import contextlib
import gzip
import socket
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.server.http2_peer import (
    CALL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    Peer,
    frame,
    setting,
    window,
)
from tests.server.outside import (
    Service,
    affine,
    affine_of,
    floats,
    large,
    message,
    request_of,
    row,
    unpacked,
    wait_until,
)
from tests.support import matrix

pytestmark = pytest.mark.usefixtures("bounded_memory", "still_answers", "others")

BODY = message(affine([1, 2, 3]))
CANCEL = (8).to_bytes(4, "big")


def chunks(make: Callable[[int], bytes], count: int, at_once: int = 500) -> Iterator[bytes]:
    for start in range(0, count, at_once):
        yield b"".join(make(number) for number in range(start, min(start + at_once, count)))


def pour(peer: Peer, parts: Iterator[bytes], seconds: float = 3) -> None:
    """Send for some seconds without reading, until all is sent or the server closes or stops reading."""
    until = time.monotonic() + seconds
    peer.socket.settimeout(0.5)
    with contextlib.suppress(OSError):
        for part in parts:
            if time.monotonic() > until:
                return
            peer.socket.sendall(part)


FLOODS: dict[str, Callable[[Peer], Iterator[bytes]]] = {
    "SETTINGS": lambda peer: chunks(lambda number: frame(SETTINGS, 0, 0, setting(3, number + 1)), 50_000),
    "PING": lambda peer: chunks(lambda number: frame(PING, 0, 0, number.to_bytes(8, "big")), 100_000),
    "PRIORITY": lambda peer: chunks(lambda number: frame(PRIORITY, 0, 2 * number + 1, bytes(5)), 50_000),
    "WINDOW_UPDATE": lambda peer: chunks(lambda number: window(1), 100_000),
    "unknown frames": lambda peer: chunks(lambda number: frame(0xF0, 0, 0, bytes(100)), 50_000),
    "empty DATA": lambda peer: iter([peer.call(1, end=False), *chunks(lambda number: frame(DATA, 0, 1), 100_000)]),
    "CONTINUATION": lambda peer: iter(
        [frame(HEADERS, 0, 1, peer.block()), *chunks(lambda number: frame(CONTINUATION, 0, 1, header(number)), 50_000)]
    ),
    "empty CONTINUATION": lambda peer: iter(
        [frame(HEADERS, 0, 1, peer.block()), *chunks(lambda number: frame(CONTINUATION, 0, 1), 100_000)]
    ),
    "RST_STREAM of calls": lambda peer: chunks(lambda number: reset(peer, 2 * number + 1, BODY), 20_000),
    "RST_STREAM of calls that have not begun": lambda peer: chunks(lambda number: reset(peer, 2 * number + 1), 20_000),
    "streams that never end": lambda peer: chunks(lambda number: peer.call(2 * number + 1, BODY, end=False), 20_000),
    "trailers": lambda peer: chunks(
        lambda number: peer.call(2 * number + 1, end=False) + frame(HEADERS, 5, 2 * number + 1, peer.block()), 10_000
    ),
    "calls whose answers are not read": lambda peer: chunks(lambda number: peer.call(2 * number + 1, BODY), 20_000),
    "unknown methods": lambda peer: chunks(
        lambda number: peer.call(2 * number + 1, BODY, headers=[*CALL[:2], (":path", f"/{number}"), *CALL[3:]]), 20_000
    ),
}


def header(number: int) -> bytes:
    """Return a literal header that is not to be indexed, of some 100 bytes."""
    return b"\x00\x08x-%06d\x58" % (number % 1_000_000) + b"v" * 88


def reset(peer: Peer, stream: int, body: bytes = b"") -> bytes:
    return peer.call(stream, body, end=bool(body)) + frame(RST_STREAM, 0, stream, CANCEL)


@pytest.mark.matrix
@pytest.mark.parametrize("flood", matrix(*FLOODS))
def test_a_flood(service: Service, flood: str) -> None:
    with Peer(service.grpc_address) as peer:
        pour(peer, FLOODS[flood](peer))


@pytest.mark.matrix
def test_many_connections_flood_with_resets_at_once(service: Service) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            peer = stack.enter_context(Peer(service.grpc_address))
            pour(peer, chunks(lambda number, peer=peer: reset(peer, 2 * number + 1, BODY), 1000), 0.5)  # type: ignore[misc]


def test_a_small_block_that_stands_for_very_many_headers(service: Service) -> None:
    """The bomb of HPACK: 4 KiB in the table, named by one byte each, 16,000 times in one block."""
    with Peer(service.grpc_address) as peer:
        large_header = peer.encode([*CALL, ("x-bomb", "v" * 4000)])
        peer.send(frame(HEADERS, END_HEADERS | END_STREAM, 1, large_header))
        peer.ping()
        for number in range(20):
            if not peer.try_to_send(frame(HEADERS, END_HEADERS | END_STREAM, 3 + 2 * number, b"\xbe" * 16_000)):
                break
        with contextlib.suppress(TimeoutError):
            peer.ping()


@pytest.mark.matrix
def test_a_window_of_one_byte(service: Service) -> None:
    with Peer(service.grpc_address, settings=setting(4, 1)) as peer:
        streams = range(1, 11, 2)  # with many more, this would be a flood of tiny WINDOW_UPDATEs
        peer.send(*(peer.call(stream, message(affine(row(stream)))) for stream in streams))
        for stream in streams:
            headers, data = peer.answer(stream)  # which opens the window by the bytes received, one at a time
            assert headers["grpc-status"] == "0"
            assert floats(unpacked(data)) == affine_of(row(stream))


@pytest.mark.matrix
def test_windows_that_stay_shut_hold_only_their_own_answers(service: Service) -> None:
    body = message(request_of(large(1), "increment"))
    with Peer(service.grpc_address, settings=setting(4, 0), timeout=30) as peer:
        for stream in range(1, 41, 2):
            # As the server opens its own windows, the body goes out; nothing of an answer may come back.
            if not send_body(peer, stream, body):
                break
        assert not peer.received(1)


def send_body(peer: Peer, stream: int, body: bytes) -> bool:
    """Send a call as far as the server's windows allow, for at most a second; return whether all of it was sent."""
    parts = [body[start : start + 16384] for start in range(0, len(body), 16384)]
    if not peer.try_to_send(frame(HEADERS, END_HEADERS, stream, peer.block())):
        return False
    until = time.monotonic() + 1
    for part in parts:
        while peer.room(stream) < len(part):
            peer.socket.settimeout(max(0.05, until - time.monotonic()))
            try:
                if time.monotonic() > until or peer.read() is None:
                    return False
            except TimeoutError:
                return False
        if not peer.try_to_send(peer.data(stream, part)):
            return False
    return peer.try_to_send(frame(DATA, END_STREAM, stream))


@pytest.mark.matrix
def test_answers_that_are_not_read(service: Service) -> None:
    """The windows are open, but the socket is not read: the server must not pile up what it cannot send."""
    body = message(request_of(large(1), "increment"))
    wide = setting(4, (1 << 31) - 1)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            peer = stack.enter_context(Peer(service.grpc_address, settings=wide))
            peer.send(window((1 << 31) - 1 - 65535))
            pour(peer, iter([peer.call(stream, body) for stream in range(1, 9, 2)]), 1)
        service.check()


def test_a_goaway_of_the_client_lets_its_calls_finish(service: Service) -> None:
    with Peer(service.grpc_address) as peer:
        streams = range(1, 41, 2)
        peer.send(
            *(peer.call(stream, message(affine(row(stream)))) for stream in streams), frame(GOAWAY, 0, 0, bytes(8))
        )
        for stream in streams:
            headers, data = peer.answer(stream)
            assert headers["grpc-status"] == "0"
            assert floats(unpacked(data)) == affine_of(row(stream))


@pytest.mark.matrix
def test_a_client_that_shuts_its_own_side_has_left(service: Service) -> None:
    """As for gRPC's core: a killed client looks the same, and its calls must not continue."""
    before = service.count("ingot_requests_total", model="held", code="cancelled")
    with service.gate.closed(), Peer(service.grpc_address) as peer:
        one = message(request_of(np.ones((1, 3), np.float32), "held"))
        peer.send(*(peer.call(stream, one) for stream in (1, 3, 5, 7)))
        peer.send(frame(HEADERS, END_HEADERS, 9, peer.block()))
        peer.ping()
        wait_until(lambda: service.count("ingot_in_flight_requests", model="held") == 4)
        peer.socket.shutdown(socket.SHUT_WR)
        while peer.read() is not None:
            pass
        wait_until(lambda: service.count("ingot_requests_total", model="held", code="cancelled") == before + 4)
    wait_until(lambda: service.count("ingot_in_flight_requests", model="held") == 0)


def test_one_byte_at_a_time(service: Service) -> None:
    with Peer(service.grpc_address, settings=None) as peer:
        for byte in PREFACE + frame(SETTINGS) + peer.call(1, BODY):
            peer.send(bytes([byte]))
        headers, data = peer.answer(1)
    assert headers["grpc-status"] == "0"
    assert floats(unpacked(data)) == [3, 5, 7]


@pytest.mark.one_case
@pytest.mark.parametrize("upto", [1, 10, 24, 30, 40, 100, 150])
def test_clients_that_stop_in_the_middle_and_stay(service: Service, upto: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            peer = stack.enter_context(Peer(service.grpc_address, settings=None))
            peer.send((PREFACE + frame(SETTINGS) + peer.call(1, BODY))[:upto])
        service.check()


GARBAGE = {
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "HTTP/1.1": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc" * 1000,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) * 4,
    "frames without a preface": frame(SETTINGS) * 100,
    "frames of 16 MiB that never come": PREFACE
    + frame(SETTINGS)
    + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"
    + bytes(4096),
}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage(service: Service, kind: str) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            peer = stack.enter_context(Peer(service.grpc_address, settings=None))
            pour(peer, iter([GARBAGE[kind]]), 1)
        service.check()


def test_a_message_of_huge_declared_size_is_refused_before_it_arrives(service: Service) -> None:
    with Peer(service.grpc_address) as peer:
        peer.send(peer.call(1, b"\x00\xff\xff\xff\xff" + bytes(1000), end=False))
        headers, _ = peer.answer(1)
        assert headers["grpc-status"] == "8"


@pytest.mark.matrix
def test_a_small_message_that_unpacks_to_a_huge_one_is_refused(service: Service) -> None:
    packed = gzip.compress(bytes(32 << 20))
    body = b"\x01" + len(packed).to_bytes(4, "big") + packed
    with Peer(service.grpc_address) as peer:
        peer.started()
        peer.send(peer.call(1, body, headers=[*CALL, ("grpc-encoding", "gzip")]))
        headers, _ = peer.answer(1)
    assert headers["grpc-status"] in ("8", "13", "3")
