"""Invalid, and unusual but valid, frames, streams and headers of RFC 9113, as h2spec tests them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.server.http2_peer import (
    ACK,
    CALL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    Peer,
    frame,
    setting,
    window,
)
from tests.server.outside import Service, affine, affine_of, floats, message, row, unpacked

PROTOCOL, FLOW_CONTROL, STREAM_CLOSED, FRAME_SIZE, REFUSED, COMPRESSION, CALM = 1, 3, 5, 6, 7, 9, 11
BODY = message(affine([1, 2, 3]))
MOST_WINDOW = (1 << 31) - 1


# gRPC's core accepts most invalid cases here, and refuses some unusual ones, as it is made for gRPC's own clients.
# These tests only require that it keeps serving others.
REFUSED_BY_GRPCIO = {
    "4.1 flags that mean nothing",
    "4.3 headers in many frames",
    "6.1 padded DATA",
    "6.2 padded HEADERS",
    "8.3.1 no :authority",
}


@pytest.fixture(autouse=True)
def others_are_served(service: Service) -> Iterator[None]:
    yield
    with Peer(service.grpc_address) as peer:
        peer.send(peer.call(1, BODY))
        headers, data = peer.answer(1)
    assert headers["grpc-status"] == "0"
    assert floats(unpacked(data)) == [3, 5, 7]


@dataclass(frozen=True)
class Wrong:
    """Invalid bytes and the error codes that fit. One stream's fault may also end the connection."""

    section: str
    title: str
    send: Callable[[Peer], bytes]
    codes: tuple[int, ...]
    stream: bool = False

    def __str__(self) -> str:
        return f"{self.section} {self.title}"


def opened(peer: Peer, *more: bytes) -> bytes:
    """Return a call on stream 1 that is not ended, with more bytes."""
    return peer.call(1, end=False) + b"".join(more)


def ended(peer: Peer, *more: bytes) -> bytes:
    return peer.call(1, BODY) + b"".join(more)


def head(peer: Peer, *changes: tuple[str, str]) -> bytes:
    return frame(HEADERS, END_HEADERS, 1, peer.block(*changes)) + frame(DATA, END_STREAM, 1, BODY)


def without(peer: Peer, name: str) -> bytes:
    return peer.call(1, BODY, headers=[(key, value) for key, value in CALL if key != name])


def trailers(peer: Peer, *headers: tuple[str, str], flags: int = END_HEADERS | END_STREAM) -> bytes:
    return opened(peer, frame(DATA, 0, 1, BODY), frame(HEADERS, flags, 1, peer.encode(headers)))


def split(peer: Peer) -> tuple[bytes, bytes]:
    block = peer.block()
    return block[:10], block[10:]


CONNECTION = [
    Wrong("4.2", "a HEADERS frame over the largest size", lambda p: frame(HEADERS, 5, 1, too_large(p)), (FRAME_SIZE,)),
    Wrong("4.3", "a malformed header block", lambda p: frame(HEADERS, 5, 1, b"\xff" * 20), (COMPRESSION,)),
    Wrong(
        "4.3",
        "another kind of frame inside a header block",
        lambda p: frame(HEADERS, 1, 1, split(p)[0]) + frame(PRIORITY, 0, 1, bytes(4) + b"\x10"),
        (PROTOCOL,),
    ),
    Wrong(
        "4.3",
        "another stream inside a header block",
        lambda p: frame(HEADERS, 1, 1, split(p)[0]) + frame(HEADERS, 5, 3, p.block()),
        (PROTOCOL,),
    ),
    Wrong("5.1", "DATA on an idle stream", lambda p: frame(DATA, 1, 1, b"x"), (PROTOCOL, STREAM_CLOSED)),
    Wrong("5.1", "RST_STREAM on an idle stream", lambda p: frame(RST_STREAM, 0, 1, bytes(4)), (PROTOCOL,)),
    Wrong("5.1", "WINDOW_UPDATE on an idle stream", lambda p: window(9, 1), (PROTOCOL,)),
    Wrong("5.1", "CONTINUATION on an idle stream", lambda p: frame(CONTINUATION, 4, 1, p.block()), (PROTOCOL,)),
    Wrong("5.1.1", "a stream of an even number", lambda p: p.call(2, BODY), (PROTOCOL,)),
    Wrong(
        "5.1.1",
        "a stream of a lower number than before",
        lambda p: p.call(5, BODY) + p.call(3, BODY),
        (PROTOCOL, STREAM_CLOSED),
    ),
    Wrong("6.1", "DATA on stream 0", lambda p: opened(p, frame(DATA, 0, 0, b"x")), (PROTOCOL,)),
    Wrong("6.1", "more padding than DATA", lambda p: opened(p, frame(DATA, PADDED, 1, b"\x09abc")), (PROTOCOL,)),
    Wrong("6.2", "HEADERS on stream 0", lambda p: frame(HEADERS, 5, 0, p.block()), (PROTOCOL,)),
    Wrong(
        "6.2", "more padding than HEADERS", lambda p: frame(HEADERS, PADDED | 5, 1, b"\xff" + p.block()), (PROTOCOL,)
    ),
    Wrong("6.3", "PRIORITY on stream 0", lambda p: frame(PRIORITY, 0, 0, bytes(5)), (PROTOCOL,)),
    Wrong("6.4", "RST_STREAM on stream 0", lambda p: frame(RST_STREAM, 0, 0, bytes(4)), (PROTOCOL,)),
    Wrong("6.4", "RST_STREAM of 3 bytes", lambda p: opened(p, frame(RST_STREAM, 0, 1, bytes(3))), (FRAME_SIZE,)),
    Wrong("6.5", "an acknowledgement with settings", lambda p: frame(SETTINGS, ACK, 0, setting(3, 1)), (FRAME_SIZE,)),
    Wrong("6.5", "SETTINGS on a stream", lambda p: frame(SETTINGS, 0, 1, setting(3, 1)), (PROTOCOL,)),
    Wrong("6.5", "SETTINGS of 5 bytes", lambda p: frame(SETTINGS, 0, 0, bytes(5)), (FRAME_SIZE,)),
    Wrong("6.5.2", "ENABLE_PUSH of 2", lambda p: frame(SETTINGS, 0, 0, setting(2, 2)), (PROTOCOL,)),
    Wrong("6.5.2", "a window of 2^31", lambda p: frame(SETTINGS, 0, 0, setting(4, 1 << 31)), (FLOW_CONTROL,)),
    Wrong("6.5.2", "MAX_FRAME_SIZE of 16383", lambda p: frame(SETTINGS, 0, 0, setting(5, 16383)), (PROTOCOL,)),
    Wrong("6.5.2", "MAX_FRAME_SIZE of 2^24", lambda p: frame(SETTINGS, 0, 0, setting(5, 1 << 24)), (PROTOCOL,)),
    Wrong("6.6", "PUSH_PROMISE", lambda p: opened(p, frame(PUSH_PROMISE, 4, 1, b"\0\0\0\2" + p.block())), (PROTOCOL,)),
    Wrong("6.7", "PING on a stream", lambda p: frame(PING, 0, 1, bytes(8)), (PROTOCOL,)),
    Wrong("6.7", "PING of 6 bytes", lambda p: frame(PING, 0, 0, bytes(6)), (FRAME_SIZE,)),
    Wrong("6.8", "GOAWAY on a stream", lambda p: frame(GOAWAY, 0, 1, bytes(8)), (PROTOCOL,)),
    Wrong("6.9", "WINDOW_UPDATE of 0", lambda p: window(0), (PROTOCOL,)),
    Wrong("6.9", "WINDOW_UPDATE of 3 bytes", lambda p: frame(WINDOW_UPDATE, 0, 0, bytes(3)), (FRAME_SIZE,)),
    Wrong("6.9.1", "a window over 2^31 - 1", lambda p: window(MOST_WINDOW) + window(MOST_WINDOW), (FLOW_CONTROL,)),
    Wrong("6.10", "CONTINUATION on stream 0", lambda p: part(p) + frame(CONTINUATION, 4, 0, split(p)[1]), (PROTOCOL,)),
    Wrong("6.10", "CONTINUATION of a whole block", lambda p: opened(p, frame(CONTINUATION, 4, 1, b"")), (PROTOCOL,)),
]

STREAM = [
    Wrong("4.2", "DATA over the largest size", lambda p: opened(p, frame(DATA, 0, 1, too_large(p))), (FRAME_SIZE,)),
    Wrong("5.1", "DATA after the end", lambda p: ended(p, frame(DATA, 1, 1, b"x")), (STREAM_CLOSED,)),
    Wrong(
        "5.1", "HEADERS after the end", lambda p: ended(p, frame(HEADERS, 5, 1, p.block())), (STREAM_CLOSED, PROTOCOL)
    ),
    Wrong("6.3", "PRIORITY of 4 bytes", lambda p: opened(p, frame(PRIORITY, 0, 1, bytes(4))), (FRAME_SIZE,)),
    Wrong("6.9", "WINDOW_UPDATE of 0", lambda p: opened(p, window(0, 1)), (PROTOCOL,)),
    Wrong("6.9.1", "a window over 2^31 - 1", lambda p: opened(p, window(MOST_WINDOW, 1)), (FLOW_CONTROL,)),
    Wrong("8.1.1", "a content-length too small", lambda p: head(p, ("content-length", "1")), (PROTOCOL,)),
    Wrong("8.1.1", "a content-length too large", lambda p: head(p, ("content-length", "999")), (PROTOCOL,)),
    Wrong("8.1", "trailers that do not end", lambda p: trailers(p, ("x-a", "1"), flags=END_HEADERS), (PROTOCOL,)),
    Wrong("8.1", "a pseudo-header in trailers", lambda p: trailers(p, (":method", "POST")), (PROTOCOL,)),
    Wrong("8.2", "a name in capitals", lambda p: head(p, ("X-Trace", "1")), (PROTOCOL,)),
    Wrong("8.2", "a line break in a value", lambda p: head(p, ("x-trace", "1\r\nx-other: 2")), (PROTOCOL,)),
    Wrong("8.2.2", "a header of the connection", lambda p: head(p, ("connection", "keep-alive")), (PROTOCOL,)),
    Wrong("8.2.2", "TE other than trailers", lambda p: head(p, ("te", "trailers, deflate")), (PROTOCOL,)),
    Wrong("8.3", "an unknown pseudo-header", lambda p: p.call(1, BODY, headers=[(":odd", "1"), *CALL]), (PROTOCOL,)),
    Wrong("8.3", "a pseudo-header after others", lambda p: p.call(1, BODY, headers=[CALL[4], *CALL]), (PROTOCOL,)),
    Wrong(
        "8.3", "a pseudo-header of answers", lambda p: p.call(1, BODY, headers=[(":status", "200"), *CALL]), (PROTOCOL,)
    ),
    Wrong("8.3.1", "no :method", lambda p: without(p, ":method"), (PROTOCOL,)),
    Wrong("8.3.1", "no :scheme", lambda p: without(p, ":scheme"), (PROTOCOL,)),
    Wrong("8.3.1", "no :path", lambda p: without(p, ":path"), (PROTOCOL,)),
    Wrong("8.3.1", "an empty :path", lambda p: head(p, (":path", "")), (PROTOCOL,)),
    Wrong("8.3.1", ":method twice", lambda p: p.call(1, BODY, headers=[CALL[0], *CALL]), (PROTOCOL,)),
]

ODD: dict[str, Callable[[Peer], bytes]] = {
    "4.1 an unknown kind of frame": lambda p: frame(0xBE, 0xFF, 0, b"anything") + p.call(1, BODY),
    "4.1 flags that mean nothing": lambda p: frame(PING, 0x16, 0, bytes(8)) + p.call(1, BODY),
    "4.1 the reserved bit": lambda p: frame(PING, 0, 1 << 31, bytes(8)) + p.call(1, BODY),
    "4.3 headers in many frames": lambda p: piecewise(p) + frame(DATA, END_STREAM, 1, BODY),
    "5.1 PRIORITY on an idle stream": lambda p: frame(PRIORITY, 0, 7, bytes(5)) + p.call(1, BODY),
    "5.3 HEADERS with a priority": lambda p: frame(HEADERS, 0x24, 1, bytes(4) + b"\xff" + p.block()) + last(),
    "6.1 padded DATA": lambda p: opened(p, frame(DATA, PADDED | END_STREAM, 1, b"\x07" + BODY + bytes(7))),
    "6.1 empty DATA": lambda p: opened(p, frame(DATA, 0, 1), frame(DATA, 0, 1, BODY), frame(DATA, END_STREAM, 1)),
    "6.2 padded HEADERS": lambda p: frame(HEADERS, PADDED | 4, 1, b"\x05" + p.block() + bytes(5)) + last(),
    "6.5 unknown settings": lambda p: frame(SETTINGS, 0, 0, setting(0xFF, 7)) + p.call(1, BODY),
    "6.5 a setting twice": lambda p: frame(SETTINGS, 0, 0, setting(4, 1) + setting(4, 65535)) + p.call(1, BODY),
    "6.7 an answer to no PING": lambda p: frame(PING, ACK, 0, b"deadbeef") + p.call(1, BODY),
    "6.9 the largest window": lambda p: window(MOST_WINDOW - 65535) + p.call(1, BODY),
    "8.1 trailers": lambda p: trailers(p, ("x-checksum", "1")),
    "8.2.3 cookies in crumbs": lambda p: p.call(1, BODY, headers=[*CALL, ("cookie", "a=1"), ("cookie", "b=2")]),
    "8.3.1 no :authority": lambda p: without(p, ":authority"),
    "9.1 stream numbers far apart": lambda p: p.call(1, BODY) + p.call((1 << 31) - 1, BODY),
    "gRPC a message in pieces": lambda p: (
        opened(p, *(frame(DATA, 0, 1, BODY[i : i + 1]) for i in range(len(BODY)))) + end()
    ),
    "gRPC a content type with a suffix": lambda p: head(p, ("content-type", "application/grpc+proto")),
}


def part(peer: Peer) -> bytes:
    return frame(HEADERS, END_STREAM, 1, split(peer)[0])


def last() -> bytes:
    return frame(DATA, END_STREAM, 1, BODY)


def end() -> bytes:
    return frame(DATA, END_STREAM, 1)


def piecewise(peer: Peer) -> bytes:
    block = peer.block()
    pieces = [block[start : start + 16] for start in range(0, len(block), 16)]
    middle = [frame(CONTINUATION, 0, 1, piece) for piece in pieces[1:-1]]
    return frame(HEADERS, 0, 1, pieces[0]) + b"".join(middle) + frame(CONTINUATION, END_HEADERS, 1, pieces[-1])


def too_large(peer: Peer) -> bytes:
    peer.started()
    return bytes(peer.settings.get(5, 16384) + 1)


@pytest.mark.parametrize("wrong", CONNECTION, ids=str)
def test_a_wrong_frame_ends_its_connection_alone(service: Service, wrong: Wrong) -> None:
    with Peer(service.grpc_address) as peer:
        verdict = peer.verdict(wrong.send(peer))
    if service.kind != "grpcio":
        assert verdict & {"closed", *(f"goaway {code}" for code in wrong.codes)}, verdict


@pytest.mark.parametrize("wrong", STREAM, ids=str)
def test_a_wrong_stream_ends_alone_or_with_its_connection(service: Service, wrong: Wrong) -> None:
    with Peer(service.grpc_address) as peer:
        verdict = peer.verdict(wrong.send(peer))
    if service.kind != "grpcio":
        fitting = {f"{how} {code}" for how in ("reset", "goaway") for code in wrong.codes}
        assert verdict & {"closed", *fitting}, verdict


@pytest.mark.parametrize("title", ODD)
def test_unusual_but_valid_requests_are_answered(service: Service, title: str) -> None:
    if service.kind == "grpcio" and title in REFUSED_BY_GRPCIO:
        pytest.skip("gRPC's core refuses this")
    with Peer(service.grpc_address) as peer:
        peer.send(ODD[title](peer))
        headers, data = peer.answer(1)
    assert headers["grpc-status"] == "0", headers
    assert floats(unpacked(data)) == [3, 5, 7]


def test_the_preface_must_be_right(service: Service) -> None:
    for sent in (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\rX" + bytes(64), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + bytes(508)):
        with Peer(service.grpc_address, settings=None) as peer:
            assert peer.verdict(sent) & {"closed", "goaway 1"}


def test_settings_are_acknowledged_once_each(service: Service) -> None:
    with Peer(service.grpc_address) as peer:
        peer.send(*(frame(SETTINGS, 0, 0, setting(3, 100)) for _ in range(5)))
        for _ in range(6):  # the first came with the preface
            assert peer.until(lambda found: found.type == SETTINGS and "ACK" in found.flags)
        assert not [found for found in peer.ping() if found.type == SETTINGS]


def test_calls_on_one_connection_are_answered_each_on_its_stream(service: Service) -> None:
    with Peer(service.grpc_address) as peer:
        streams = range(1, 101, 2)
        peer.send(*(peer.call(stream, message(affine(row(stream)))) for stream in streams))
        waiting = set(streams)
        while waiting:
            stream = min(waiting)
            headers, data = peer.answer(stream)
            waiting.discard(stream)
            assert headers["grpc-status"] == "0"
            assert floats(unpacked(data)) == affine_of(row(stream))
            waiting -= {number for number in waiting if peer.ended(number)}


def test_a_window_that_opens_later_lets_the_answer_through(service: Service) -> None:
    """RFC 9113, 6.9.2: a change of the first window applies to streams that are open, and may make one negative."""
    with Peer(service.grpc_address, settings=setting(4, 0)) as peer:
        peer.send(peer.call(1, BODY))
        assert not [found for found in peer.ping() if found.type == DATA]
        peer.send(frame(SETTINGS, 0, 0, setting(4, 3)))
        peer.until(lambda found: found.type == DATA)
        assert peer.received(1) == 3
        peer.send(frame(SETTINGS, 0, 0, setting(4, 0)))  # the stream's window is -3 now
        peer.send(window(2, 1))
        peer.ping()
        assert peer.received(1) == 3
        peer.send(window(2, 1))
        peer.until(lambda found: found.type == DATA)
        assert peer.received(1) == 4
        peer.send(window(1000, 1))
        headers, data = peer.answer(1)
    assert headers["grpc-status"] == "0"
    assert floats(unpacked(data)) == [3, 5, 7]


def test_a_deadline_ends_the_call_although_its_client_does_nothing(service: Service) -> None:
    with Peer(service.grpc_address) as peer:
        peer.send(peer.call(1, b"", end=False, headers=[*CALL, ("grpc-timeout", "100m")]))
        headers, _ = peer.answer(1)
    assert headers.get("grpc-status", "4") == "4"
