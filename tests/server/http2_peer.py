"""An HTTP/2 peer that sends any bytes, right or wrong, and records the answers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import hpack
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from tests.server.outside import INFER

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 0x1, 0x1, 0x4, 0x8

CALL = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", INFER),
    (":authority", "127.0.0.1"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
)

Headers = Sequence[tuple[str, str]]


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """Return a frame's bytes, whether or not the frame is valid."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def setting(identifier: int, value: int) -> bytes:
    return struct.pack(">HI", identifier, value)


def window(increment: int, stream: int = 0) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))


class Peer:
    """One connection. ``settings`` is the payload of its first SETTINGS; None sends no preface either."""

    def __init__(self, address: tuple[str, int], settings: bytes | None = b"", timeout: float = 10):
        self.socket = socket.create_connection(address, timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.seen: list[Frame] = []
        self.settings: dict[int, int] = {}
        self._encoder = hpack.Encoder()
        self._decoder = hpack.Decoder()
        self._received = bytearray()
        self._pings = itertools.count(1)
        self._headers: dict[int, dict[str, str]] = {}
        self._data: dict[int, bytearray] = {}
        self._room: dict[int, int] = {}  # of a stream: without its first window
        if settings is not None:
            self.begin(settings)

    def begin(self, settings: bytes = b"") -> None:
        self.send(PREFACE, frame(SETTINGS, 0, 0, settings))

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, *parts: bytes) -> None:
        self.socket.sendall(b"".join(parts))

    def try_to_send(self, *parts: bytes) -> bool:
        """Send; return whether the other side still accepts it."""
        try:
            self.send(*parts)
        except OSError:
            return False
        return True

    def encode(self, headers: Headers) -> bytes:
        return bytes(self._encoder.encode(headers))

    def block(self, *changes: tuple[str, str], headers: Headers = CALL) -> bytes:
        """Return the header block of a call, with headers changed or added."""
        changed = dict(changes)
        kept = [(name, changed.pop(name, value)) for name, value in headers]
        return self.encode([*kept, *changed.items()])

    def call(self, stream: int, body: bytes = b"", end: bool = True, headers: Headers = CALL) -> bytes:
        """Return the frames of a call."""
        data = [body[start : start + 16384] for start in range(0, len(body), 16384)]
        parts = [frame(HEADERS, END_HEADERS | (END_STREAM if end and not data else 0), stream, self.encode(headers))]
        for index, part in enumerate(data):
            last = end and index == len(data) - 1
            parts.append(frame(DATA, END_STREAM if last else 0, stream, part))
        return b"".join(parts)

    def read(self) -> Frame | None:
        """Return the next frame; None once the other side has closed. SETTINGS are acknowledged.

        Raises:
            TimeoutError: nothing comes.
        """
        while (found := self._parse()) is None:
            try:
                part = self.socket.recv(1 << 16)
            except (ConnectionResetError, BrokenPipeError):
                return None
            if not part:
                return None
            self._received += part
        self.seen.append(found)
        self._note(found)
        return found

    def _parse(self) -> Frame | None:
        if len(self._received) < 9:
            return None
        found, length = Frame.parse_frame_header(memoryview(bytes(self._received[:9])))
        if len(self._received) < 9 + length:
            return None
        found.parse_body(memoryview(bytes(self._received[9 : 9 + length])))
        del self._received[: 9 + length]
        return found

    def _note(self, found: Frame) -> None:
        if isinstance(found, SettingsFrame) and "ACK" not in found.flags:
            self.settings.update(found.settings)
            self.try_to_send(frame(SETTINGS, ACK))
        elif isinstance(found, HeadersFrame):
            decoded = self._decoder.decode(found.data)
            self._headers.setdefault(found.stream_id, {}).update((str(name), str(value)) for name, value in decoded)
        elif isinstance(found, WindowUpdateFrame):
            room = self._room.get(found.stream_id, 0 if found.stream_id else 65535)
            self._room[found.stream_id] = room + found.window_increment
        elif isinstance(found, DataFrame):
            self._data.setdefault(found.stream_id, bytearray()).extend(found.data)

    def until(self, wanted: Callable[[Frame], bool]) -> Frame | None:
        """Read until a frame matches; return None if the connection ends first."""
        while (found := self.read()) is not None:
            if wanted(found):
                return found
        return None

    def started(self) -> Peer:
        """Read the other side's settings."""
        assert self.until(lambda found: isinstance(found, SettingsFrame) and "ACK" not in found.flags) is not None
        return self

    def ping(self) -> list[Frame]:
        """Send a PING, and return all frames before its echo, or before the end of the connection."""
        start = len(self.seen)
        opaque = next(self._pings).to_bytes(8, "big")
        self.try_to_send(frame(PING, 0, 0, opaque))
        self.until(lambda found: isinstance(found, PingFrame) and found.opaque_data == opaque)
        return self.seen[start:]

    def answer(self, stream: int) -> tuple[dict[str, str], bytes]:
        """Read until a stream has ended; return all its headers, and its data. Windows are kept open."""
        while not self.ended(stream):
            found = self.read()
            assert found is not None, f"closed before an answer on stream {stream}: {self.seen[-3:]}"
            if isinstance(found, DataFrame) and found.flow_controlled_length:
                self.send(window(found.flow_controlled_length))
                if "END_STREAM" not in found.flags:
                    self.send(window(found.flow_controlled_length, found.stream_id))
            if found.stream_id == stream and isinstance(found, RstStreamFrame):
                break
        return self._headers.get(stream, {}), bytes(self._data.get(stream, b""))

    def ended(self, stream: int) -> bool:
        return any(found.stream_id == stream and "END_STREAM" in found.flags for found in self.seen)

    def received(self, stream: int) -> int:
        """Return how many bytes of data have come on a stream."""
        return len(self._data.get(stream, b""))

    def room(self, stream: int) -> int:
        """Return how many bytes the other side's windows allow on a stream."""
        first = self.settings.get(4, 65535)
        return min(self._room.get(0, 65535), self._room.get(stream, 0) + first)

    def data(self, stream: int, part: bytes) -> bytes:
        """Return a DATA frame, and count it against the other side's windows."""
        self._room[0] = self._room.get(0, 65535) - len(part)
        self._room[stream] = self._room.get(stream, 0) - len(part)
        return frame(DATA, 0, stream, part)

    def verdict(self, *parts: bytes) -> set[str]:
        """Send invalid bytes and return the outcome: ``goaway CODE``, ``reset CODE``, ``closed``, or ``alive``."""
        self.try_to_send(*parts)
        with contextlib.suppress(OSError):
            start = len(self.seen)
            self.ping()
            self.ping()  # by now, work in a later turn of the server's loop is done, too
            return set(_verdicts(self.seen[start:]))
        return {"closed"} if _is_closed(self.socket) else {"silent"}


def _verdicts(frames: Iterable[Frame]) -> Iterable[str]:
    last: Any = None
    for last in frames:
        if isinstance(last, GoAwayFrame):
            yield f"goaway {last.error_code}"
        elif isinstance(last, RstStreamFrame):
            yield f"reset {last.error_code}"
        elif isinstance(last, HeadersFrame) and "END_STREAM" in last.flags:
            yield "answered"
    yield "alive" if isinstance(last, PingFrame) and "ACK" in last.flags else "closed"


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True
