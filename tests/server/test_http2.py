"""HTTP/2 without I/O: bytes in, callbacks and bytes out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hpack import Encoder

from ingot.server.http2 import frames
from ingot.server.http2.abuse_budget import AbuseBudget
from ingot.server.http2.connection import Http2Connection
from ingot.server.http2.frames import ErrorCode, Fault
from ingot.server.http2.headers import HeaderDecoder, fault_of
from ingot.server.http2.stream import Stream

HEADERS = [(":method", "POST"), (":scheme", "http"), (":path", "/a"), (":authority", "x")]


class Server:
    """A handler that records its callbacks, and the connection that it serves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[tuple[Any, ...]] = []
        self.streams: dict[int, Stream] = {}
        self.http2: Http2Connection[Stream] = Http2Connection(self, lambda: self.now)
        self.encoder = Encoder()
        self.http2.receive(frames.PREFACE + frames.settings({}))
        self.output()

    def parse(self, headers: list[tuple[bytes, bytes]]) -> Any:
        return type("Head", (), {"fault": fault_of(headers, {}), "path": dict(headers).get(b":path")})

    def create(self, stream_id: int, head: Any) -> Stream:
        stream = self.streams[stream_id] = Stream(stream_id, None)
        return stream

    def begin(self, stream: Stream) -> None:
        self.events.append(("begin", stream.id))

    def data(self, stream: Stream, data: bytes) -> None:
        self.events.append(("data", stream.id, data, stream.ended))

    def ended(self, stream: Stream) -> None:
        self.events.append(("ended", stream.id))

    def sent(self, stream: Stream) -> None:
        self.events.append(("sent", stream.id))

    def stopped(self, stream: Stream) -> None:
        self.events.append(("stopped", stream.id))

    def released(self, stream: Stream) -> None:
        self.events.append(("released", stream.id))

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.http2.control.over = True
        self.events.append(("close",))

    def drained(self) -> None:
        self.events.append(("drained",))

    def not_http2(self, data: bytes) -> None:
        self.events.append(("not HTTP/2",))

    def faulted(self, code: int) -> None:
        self.events.append(("fault", ErrorCode(code)))

    def output(self) -> list[tuple[int, int, int, bytes]]:
        """Return the frames to write: kind, flags, stream and payload."""
        data, found = self.http2.sender.take(), []
        while data:
            size, flags, stream_id = frames.HEAD.unpack_from(data)
            found.append((size & 0xFF, flags, stream_id, data[9 : 9 + (size >> 8)]))
            data = data[9 + (size >> 8) :]
        return found

    def open(self, stream_id: int, flags: int = frames.END_HEADERS) -> None:
        self.http2.receive(frames.frame(frames.HEADERS, flags, stream_id, self.encoder.encode(HEADERS)))


def test_the_library_imports_no_room_of_grpc() -> None:
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import ingot.server.http2.connection\n"
        "print([name for name in set(sys.modules) - before if name.startswith('ingot.server.grpc')])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "[]"


def test_a_request_byte_by_byte() -> None:
    server = Server()
    server.open(1)
    for byte in frames.frame(frames.DATA, frames.END_STREAM, 1, b"abc"):
        server.http2.receive(bytes((byte,)))
    assert server.events == [("begin", 1), ("data", 1, b"abc", True)]


def test_an_answer_waits_for_the_window_of_its_stream() -> None:
    server = Server()
    server.http2.receive(frames.settings({frames.INITIAL_WINDOW_SIZE: 4}))
    server.open(1, frames.END_HEADERS | frames.END_STREAM)
    server.output()
    server.http2.sender.send(server.streams[1], b"\x88", b"abcdef")
    server.http2.sender.end(server.streams[1], b"\x88")
    assert [(kind, payload) for kind, _, _, payload in server.output()] == [
        (frames.HEADERS, b"\x88"),
        (frames.DATA, b"abcd"),
    ]
    assert server.http2.sender.queued == 2
    server.http2.receive(frames.window_update(1, 10))
    assert [(kind, payload) for kind, _, _, payload in server.output()] == [
        (frames.DATA, b"ef"),
        (frames.HEADERS, b"\x88"),
    ]
    assert server.events[-2:] == [("released", 1), ("sent", 1)]


@pytest.mark.parametrize(
    ("malformed", "code"),
    [
        (frames.frame(frames.PING, 0, 0, bytes(7)), ErrorCode.FRAME_SIZE_ERROR),
        (frames.frame(frames.DATA, 0, 1, b"x"), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, 4, 2, b"\x83"), ErrorCode.PROTOCOL_ERROR),
        (frames.frame(frames.HEADERS, 4, 1, b"\xff\xff\xff\xff\xff"), ErrorCode.COMPRESSION_ERROR),
        (frames.HEAD.pack((frames.DEFAULT_FRAME + 1) << 8 | frames.DATA, 0, 1), ErrorCode.FRAME_SIZE_ERROR),
        (frames.window_update(0, frames.LARGEST_WINDOW), ErrorCode.FLOW_CONTROL_ERROR),
    ],
)
def test_a_malformed_frame_ends_the_connection(malformed: bytes, code: ErrorCode) -> None:
    server = Server()
    server.http2.receive(malformed)
    assert server.events == [("fault", code), ("close",)]
    assert [(kind, payload[4:8]) for kind, _, _, payload in server.output()] == [(frames.GOAWAY, code.to_bytes(4))]


def test_a_reset_stops_and_releases_the_stream() -> None:
    server = Server()
    server.open(1)
    server.http2.receive(frames.reset(1, ErrorCode.CANCEL))
    assert server.events == [("begin", 1), ("stopped", 1), ("released", 1)]


def test_the_allowance_refills_with_time() -> None:
    server = Server()
    abuse_budget = AbuseBudget(server.http2.sender, lambda: server.now)
    abuse_budget.spend(1000)
    with pytest.raises(Fault):
        abuse_budget.spend(1)
    server.now = 1.0
    abuse_budget.spend(99)
    with pytest.raises(Fault):
        abuse_budget.spend(1)


def test_the_messages_of_a_stream_earn_allowance_even_if_they_share_a_frame() -> None:
    """gRPC's core opens both windows after each message that it reads."""
    server = Server()
    server.open(1)
    opened = frames.window_update(0, 50) + frames.window_update(1, 50)
    for _ in range(100):
        for _ in range(64):
            server.http2.sender.send(server.streams[1], b"\x88", bytes(50))
        assert sum(kind == frames.DATA for kind, *_ in server.output()) == 1
        for _ in range(64):
            server.http2.receive(opened)
    assert ("close",) not in server.events
    for _ in range(2000):  # updates that no message earned
        server.http2.receive(opened)
    assert server.events[-2:] == [("fault", ErrorCode.ENHANCE_YOUR_CALM), ("close",)]


@pytest.mark.matrix
def test_header_blocks_are_bounded_and_cached() -> None:
    decoder = HeaderDecoder(dict)
    block = b"\x83\x86\x84"  # of the static table alone
    assert decoder(block) is decoder(block)
    with pytest.raises(Fault, match="too large"):
        decoder(Encoder().encode([("x", "v" * (65 << 10))]))


def test_draining_waits_for_the_acknowledged_ping() -> None:
    server = Server()
    server.http2.control.leave()
    [away, ping] = server.output()
    assert (away[0], away[3][:4]) == (frames.GOAWAY, frames.LARGEST_WINDOW.to_bytes(4))
    server.http2.receive(frames.frame(frames.PING, frames.ACK, 0, ping[3]))
    assert server.events == [("drained",)]
    assert server.output()[0][3][:4] == bytes(4)
