"""gRPC for the load generator: HTTP/2 connections with many calls, or with streams of inference.

The tables of header compression are turned off by SETTINGS_HEADER_TABLE_SIZE, so equal header blocks are equal bytes:
each is encoded or decoded once.
"""

from __future__ import annotations

import ssl
import struct
from collections import deque
from collections.abc import Callable
from urllib.parse import unquote

from hpack import Decoder, Encoder
from hpack.exceptions import HPACKError
from hpack.struct import NeverIndexedHeaderTuple

from ingot.bench.plan import Plan
from ingot.bench.sockets import Socket

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _END_HEADERS, _ACK, _PADDED, _PRIORITY = 1, 4, 1, 8, 32
_FRAME = struct.Struct(">BHBBI")  # length in two parts, type, flags, stream
_SETTING = struct.Struct(">HI")
_LARGEST = (1 << 31) - 1
# The server may send so many bytes; half of them are allowed again before they are used up.
_REFILL = 1 << 29
_MOST_BLOCKS = 1024
_MOST_BLOCK = 64 << 10
_MOST_FRAME = 16384  # as SETTINGS_MAX_FRAME_SIZE is not sent
_MOST_ERROR = 1 << 20
# The key of the field `error_message` of ModelStreamInferResponse, which comes first.
_ERROR_FIELD = 0x0A
_STATUS = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)


def header_block(headers: list[tuple[str, str]]) -> bytes:
    """Return the header block of a call, which is equal on each stream: without references to a table that changes."""
    made = Encoder().encode([NeverIndexedHeaderTuple(name, value) for name, value in headers], huffman=False)
    return bytes(made)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return a frame."""
    length = len(payload)
    return _FRAME.pack(length >> 16, length & 0xFFFF, kind, flags, stream) + payload


class Place:
    """The place of a call in flight, or of a stream with one request in flight.

    Attributes:
        connection: which carries it.
        due: when the request in flight was due.
        sent: when it was sent.
        stream: the id of its stream; 0 if it has none.
        window: bytes that may be sent on the stream.
        rest: the message that waits for the server to extend its windows.
        position: where that begins in the message.
        arrived: of a stream of inference: the beginning of a response.
        missing: of such a stream: bytes until the end of a response, which are only counted.
        received: of such a stream: bytes since it was allowed to send more.
    """

    __slots__ = ("arrived", "connection", "due", "missing", "position", "received", "rest", "sent", "stream", "window")

    def __init__(self, connection: GrpcConnection):
        self.connection = connection
        self.due = self.sent = 0.0
        self.stream = self.window = self.received = self.position = self.missing = 0
        self.rest = self.arrived = b""

    def begin(self, message: bytes) -> None:
        """Send a message. Raises OSError if the connection is lost."""
        self.connection.send(self, message)


class GrpcConnection:
    """A connection with ``size`` places.

    Attributes:
        socket: the connection to the server.
        places: where requests can be in flight.
        usable: False once the server accepts no further calls on it.
    """

    def __init__(self, plan: Plan, security: ssl.SSLContext | None, answered: Callable[[Place, str], None], size: int):
        self.socket = Socket(plan, security)
        self.usable = True
        self._answered = answered
        self._streaming = plan.wire == "grpc-stream"
        self._header = plan.header
        self._next = 1
        self._open: dict[int, Place] = {}
        self._window = self._initial = 65535
        self._largest = 16384
        self._most = _LARGEST
        self._blocked: deque[Place] = deque()
        self._out: list[bytes] = []
        self._buffer = b""
        self._received = 0
        self._block = b""
        self._block_flags = 0
        self._blocks: dict[bytes, str] = {}
        try:
            self._greet()
            if self._most < size:
                raise ValueError(
                    f"the server allows {self._most} calls on a connection, not {size}: raise --connections"
                )
        except (OSError, ValueError):
            self.socket.close()
            raise
        self.places = [Place(self) for _ in range(size)]

    def _greet(self) -> None:
        settings = ((1, 0), (2, 0), (4, _LARGEST))  # no header table, no push, windows of streams
        payload = b"".join(_SETTING.pack(*setting) for setting in settings)
        window = struct.pack(">I", _LARGEST - 65535)
        self.socket.send(_PREFACE + frame(_SETTINGS, 0, 0, payload) + frame(_WINDOW, 0, 0, window))
        self._settled = False
        while not self._settled:
            self.readable()
        self.flush()

    def send(self, place: Place, message: bytes) -> None:
        """Begin a call, or continue a stream; :meth:`flush` sends it."""
        length = len(message)
        if self._streaming and place.stream:
            stream, begin = place.stream, b""
        else:
            stream, self._next = self._next, self._next + 2
            self._open[stream] = place
            place.stream, place.window = stream, self._initial
            begin = frame(_HEADERS, _END_HEADERS, stream, self._header)
        if length <= self._largest and length <= place.window and length <= self._window and not self._blocked:
            self._window -= length
            place.window -= length
            end = 0 if self._streaming else _END_STREAM
            head = _FRAME.pack(length >> 16, length & 0xFFFF, _DATA, end, stream)
            self._out.append(begin + head + message)
            return
        self._out.append(begin)
        place.rest, place.position = message, 0
        self._blocked.append(place)
        self._unblock()

    def _unblock(self) -> None:
        """Send as much of the messages that wait as the windows allow."""
        waiting, self._blocked = self._blocked, deque()
        for place in waiting:
            rest, start = place.rest, place.position
            while start < len(rest):
                size = min(len(rest) - start, self._largest, place.window, self._window)
                if size <= 0:
                    break
                end = start + size == len(rest) and not self._streaming
                self._out.append(frame(_DATA, _END_STREAM if end else 0, place.stream, rest[start : start + size]))
                place.window -= size
                self._window -= size
                start += size
            place.position = start
            if start < len(rest):
                self._blocked.append(place)

    def flush(self) -> None:
        """Send what was begun since the last time. Raises OSError if the connection is lost."""
        if self._out:
            out, self._out = b"".join(self._out), []
            self.socket.send(out)
        elif self.socket.unsent:
            self.socket.flush()

    def readable(self) -> None:
        """Read what has arrived. Raises OSError if the connection is lost, ValueError if it is not HTTP/2."""
        data = self.socket.receive()
        if self._buffer:
            data = self._buffer + data
        position, size = 0, len(data)
        while size - position >= 9:
            high, low, kind, flags, stream = _FRAME.unpack_from(data, position)
            end = position + 9 + (high << 16) + low
            if (high << 16) + low > _MOST_FRAME:
                raise ValueError("the server sent a larger frame than HTTP/2 allows")
            if end > size:
                break
            try:
                self._frame(kind, flags, stream, data[position + 9 : end])
            except (struct.error, IndexError, HPACKError) as error:
                raise ValueError(f"the server sent a malformed frame: {error}") from error
            position = end
        self._buffer = data[position:]
        if not self._settled and self._buffer[:5] == b"HTTP/":
            raise ValueError("the server speaks HTTP/1.1, not gRPC, on this port")

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _DATA:
            self._data(stream, payload)
            if flags & _END_STREAM:
                self._end(stream, "the stream ended without a status")
        elif kind in (_HEADERS, _CONTINUATION):
            if kind == _HEADERS:
                start = (1 if flags & _PADDED else 0) + (5 if flags & _PRIORITY else 0)
                end = len(payload) - (payload[0] if flags & _PADDED else 0)
                self._block, self._block_flags = payload[start:end], flags
            else:
                self._block += payload
                if len(self._block) > _MOST_BLOCK:
                    raise ValueError(f"the server sent headers of more than {_MOST_BLOCK >> 10} KiB")
            if flags & _END_HEADERS and self._block_flags & _END_STREAM:
                self._end(stream, self._status(self._block))
        elif kind == _WINDOW:
            self._extend(stream, int.from_bytes(payload, "big") & _LARGEST)
        elif kind == _SETTINGS and not flags & _ACK:
            self._apply(payload)
        elif kind == _PING and not flags & _ACK:
            self._out.append(frame(_PING, _ACK, 0, payload))
        elif kind == _RESET:
            self._end(stream, f"the server reset the call (HTTP/2 error {int.from_bytes(payload, 'big')})")
        elif kind == _GOAWAY:
            self.usable = False

    def _data(self, stream: int, payload: bytes) -> None:
        self._received += len(payload)
        if self._received >= _REFILL:
            self._out.append(frame(_WINDOW, 0, 0, struct.pack(">I", self._received)))
            self._received = 0
        if not self._streaming:
            return
        place = self._open.get(stream)
        if place is None:
            return
        place.received += len(payload)
        if place.received >= _REFILL:
            self._out.append(frame(_WINDOW, 0, stream, struct.pack(">I", place.received)))
            place.received = 0
        self._messages(place, payload)

    def _messages(self, place: Place, payload: bytes) -> None:
        """Read the responses in a part of a stream; only those that are errors are kept until they are whole."""
        if place.missing:
            skipped = min(place.missing, len(payload))
            place.missing -= skipped
            if place.missing:
                return
            payload = payload[skipped:]
            self._answered(place, "")
        data, place.arrived = place.arrived + payload, b""
        while len(data) >= 5:
            end = 5 + int.from_bytes(data[1:5], "big")
            failed = data[5:6] == bytes((_ERROR_FIELD,))
            if failed and end > _MOST_ERROR:
                raise ValueError(f"the server sent an error of more than {_MOST_ERROR >> 20} MiB")
            if len(data) < end:
                if failed or len(data) == 5:
                    break
                place.missing = end - len(data)
                return
            self._answered(place, _stream_error(data[5:end]) if failed else "")
            data = data[end:]
        place.arrived = data

    def _end(self, stream: int, error: str) -> None:
        place = self._open.pop(stream, None)
        if place is not None:
            place.stream, place.missing, place.arrived = 0, 0, b""
            if place in self._blocked:
                self._blocked.remove(place)
            self._answered(place, error or ("the server ended the stream" if self._streaming else ""))

    def _status(self, block: bytes) -> str:
        """Return the error that trailers report, or an empty text."""
        found = self._blocks.get(block)
        if found is None:
            headers = {str(name): str(value) for name, value in Decoder().decode(block, raw=False)}
            number = int(headers.get("grpc-status", -1))
            name = _STATUS[number] if 0 <= number < len(_STATUS) else f"HTTP {headers.get(':status')}"
            message = unquote(headers.get("grpc-message", ""))[:200]
            found = "" if number == 0 else f"{name}: {message}" if message else name
            if len(self._blocks) > _MOST_BLOCKS:
                self._blocks.clear()
            self._blocks[block] = found
        return found

    def _extend(self, stream: int, by: int) -> None:
        if not stream:
            self._window += by
        elif stream in self._open:
            self._open[stream].window += by
        if self._blocked:
            self._unblock()

    def _apply(self, payload: bytes) -> None:
        for name, value in _SETTING.iter_unpack(payload):
            if name == 3:
                self._most = value
            elif name == 4:
                for place in self._open.values():
                    place.window += value - self._initial
                self._initial = value
            elif name == 5:
                self._largest = value
        self._settled = True
        self._out.append(frame(_SETTINGS, _ACK, 0))
        if self._blocked:
            self._unblock()


def _stream_error(message: bytes) -> str:
    """Return the error in a message of a stream."""
    # Not for loads without errors.
    from google.protobuf.message import DecodeError

    from ingot.protocol.open_inference_pb2 import ModelStreamInferResponse

    try:
        return str(ModelStreamInferResponse.FromString(message).error_message)[:200]
    except DecodeError as error:
        raise ValueError(f"the server sent a malformed message: {error}") from error
