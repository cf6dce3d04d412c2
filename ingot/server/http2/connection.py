"""The receiving half of an HTTP/2 connection: bytes to frames, and frames to the handler's callbacks (RFC 9113).

There is no I/O here, and no event objects: a request costs two callbacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic

from ingot.server.http2 import frames
from ingot.server.http2.abuse_budget import AbuseBudget
from ingot.server.http2.control import Control, check_dependency
from ingot.server.http2.frames import (
    CONTINUATION,
    DATA,
    DEFAULT_FRAME,
    END_HEADERS,
    END_STREAM,
    HAS_PRIORITY,
    HEADERS,
    PADDED,
    PREFACE,
    SETTINGS,
    ErrorCode,
    Fault,
    unpadded,
    window_update,
)
from ingot.server.http2.headers import HEADER_LIST, HeaderDecoder, check_trailers
from ingot.server.http2.sender import Sender
from ingot.server.http2.stream import Handler, S

# Messages of some MiB flow at full speed through this; the handler bounds what all streams hold together.
STREAM_WINDOW: Final = 4 << 20
_WINDOW: Final = 16 << 20
_MAX_STREAMS: Final = 1024
# Bytes of a header block; the abuse budget bounds its number of frames.
_MAX_BLOCK = 32 << 10
# A DATA frame below this size is charged: it cannot hold even a message's shortest header.
_SMALL_DATA: Final = 16
# Bytes of queued answers above which a client gets no new streams.
_MAX_QUEUED: Final = 64 << 20

_GREETING = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
        frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: HEADER_LIST,
    }
) + window_update(0, _WINDOW - frames.DEFAULT_WINDOW)
_HEAD: Final = frames.HEAD.unpack_from


class Http2Connection(Generic[S]):
    """The server's side of a connection. Feed it with :meth:`receive`; write what ``sender.take()`` returns.

    Args:
        handler: receives the requests.
        clock: returns seconds.
    """

    __slots__ = (
        "_begun",
        "_block",
        "_block_flags",
        "_block_of",
        "_handler",
        "_heads",
        "_rest",
        "_streams",
        "_taken",
        "abuse_budget",
        "control",
        "sender",
    )

    def __init__(self, handler: Handler[S], clock: Callable[[], float]):
        self._handler = handler
        self.sender: Sender[S] = Sender(handler)
        self.abuse_budget = AbuseBudget(self.sender, clock)
        self.control: Control[S] = Control(handler, self.sender, self.abuse_budget)
        self._streams = self.sender.streams
        self._heads = HeaderDecoder(handler.parse)
        self._rest = b""
        self._begun = False
        self._block = b""
        self._block_of = self._block_flags = 0
        self._taken = 0

    def receive(self, data: bytes) -> None:
        """Handle bytes from the client; an incomplete frame is kept for the next call."""
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        if not self._begun:
            at = self._begin(data)
            if at < 0:
                return
        length = len(data)
        last = length - 9
        while at <= last:
            word: int  # struct's types are unknown, and arithmetic on them is slow when compiled
            flags: int
            stream_id: int
            word, flags, stream_id = _HEAD(data, at)
            kind, size = word & 0xFF, word >> 8
            start = at + 9
            stop = start + size
            try:
                if size > DEFAULT_FRAME:
                    raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes, over {DEFAULT_FRAME}")
                if stop > length:
                    break
                at = stop
                if kind == DATA and not self._block_of:
                    self._data(flags, stream_id & 0x7FFFFFFF, data, start, stop)
                else:
                    self._other(kind, flags, stream_id & 0x7FFFFFFF, data, start, stop)
            except Fault as fault:
                self.control.fail(fault)
                if self.control.over:
                    return
        if at < length and not self.control.over:
            self._rest = data[at:]

    def refill(self, stream: S) -> None:
        """Return a stream's window to the client, which may then send more."""
        if stream.received >= STREAM_WINDOW // 2 and not stream.ended and not stream.closed:
            self.sender.write(window_update(stream.id, stream.received))
            stream.received = 0

    def _begin(self, data: bytes) -> int:
        """Return where the first frame begins, or -1 if it has not arrived or never will."""
        if data[: len(PREFACE)] != PREFACE[: len(data)]:
            self._handler.not_http2(data)
            return -1
        if len(data) < len(PREFACE):
            self._rest = data
            return -1
        self._begun = True
        self.sender.write(_GREETING)
        return len(PREFACE)

    def _other(self, kind: int, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        if self._block_of:
            if kind != CONTINUATION or stream_id != self._block_of:
                raise Fault(ErrorCode.PROTOCOL_ERROR, "a frame came inside a header block")
            self._continue(flags, data[start:stop])
        elif kind == HEADERS and self.control.settled:
            self._headers(flags, stream_id, data, start, stop)
        elif kind == SETTINGS or self.control.settled:
            self.control.handle(kind, flags, stream_id, data[start:stop])
        else:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")

    def _data(self, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        size = stop - start
        self._taken += size
        if self._taken >= _WINDOW // 2:
            self.sender.write(window_update(0, self._taken))
            self._taken = 0
        stream = self._streams.get(stream_id)
        if stream is None or stream.ended:
            self._stray(stream_id, size)
            return
        if flags & PADDED:
            start, stop = unpadded(data, start, stop)
        stream.total += stop - start
        length = stream.length
        if flags & END_STREAM:
            if length is not None and length != stream.total:
                raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length differs from the data", stream_id)
            stream.ended = True
            if not stream.received:  # one frame without earlier data cannot exceed the window
                self._handler.data(stream, data[start:stop])
                return
        elif length is not None and stream.total > length:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length differs from the data", stream_id)
        elif stop - start < _SMALL_DATA:
            self.abuse_budget.spend(1, "too many small DATA frames")
        stream.received += size
        if stream.received > STREAM_WINDOW:
            raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window", stream_id)
        self._handler.data(stream, data[start:stop])

    def _stray(self, stream_id: int, size: int) -> None:
        """Handle DATA of a stream that is not open."""
        if size < _SMALL_DATA:
            self.abuse_budget.spend(1, "too many small DATA frames")
        if stream_id == 0 or stream_id > self.control.last_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that was never opened")
        if not self.sender.was_ended_first(stream_id):
            raise Fault(ErrorCode.STREAM_CLOSED, "DATA on a stream that is closed", stream_id)

    def _headers(self, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        if not stream_id & 1:
            raise Fault(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}, which clients may not open")
        if flags & PADDED:
            start, stop = unpadded(data, start, stop)
        if flags & HAS_PRIORITY:
            if stop - start < 5:
                raise Fault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS shorter than their priority")
            check_dependency(0, stream_id, data[start : start + 4])  # ends the connection: its block is not decoded
            start += 5
        if flags & END_HEADERS:
            self._open(flags, stream_id, data[start:stop])
        else:
            self._block, self._block_of, self._block_flags = data[start:stop], stream_id, flags

    def _continue(self, flags: int, part: bytes) -> None:
        self._block += part
        self.abuse_budget.spend(1)
        if len(self._block) > _MAX_BLOCK:
            raise Fault(ErrorCode.ENHANCE_YOUR_CALM, "the headers are too large")
        if flags & END_HEADERS:
            stream_id, block, self._block_of, self._block = self._block_of, self._block, 0, b""
            self._open(self._block_flags, stream_id, block)

    def _open(self, flags: int, stream_id: int, block: bytes) -> None:
        """Handle the headers that open a stream, or trailers."""
        if stream_id <= self.control.last_id:
            self._trailers(flags, stream_id, block)
            return
        self.control.last_id = stream_id
        head = self._heads(block)  # decode even if refused: both sides keep a table
        if self._heads.cost:
            self.abuse_budget.spend(self._heads.cost, "too many headers that are expensive to decode")
        if head.fault:
            raise Fault(ErrorCode.PROTOCOL_ERROR, head.fault, stream_id)
        if self.control.leaving or len(self._streams) >= _MAX_STREAMS or self.sender.queued > _MAX_QUEUED:
            raise Fault(ErrorCode.REFUSED_STREAM, "no more streams are accepted", stream_id)
        stream = self._streams[stream_id] = self._handler.create(stream_id, head)
        if flags & END_STREAM:
            stream.ended = True
            if stream.length:
                raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length differs from the data", stream_id)
        self._handler.begin(stream)

    def _trailers(self, flags: int, stream_id: int, block: bytes) -> None:
        headers = self._heads.decode(block)
        self.abuse_budget.spend(self._heads.cost, "too many headers that are expensive to decode")
        stream = self._streams.get(stream_id)
        if stream is None:
            if not self.sender.was_ended_first(stream_id):
                raise Fault(ErrorCode.STREAM_CLOSED, "HEADERS on a stream that is closed")
            self.abuse_budget.spend(1)
            return
        if stream.ended:
            raise Fault(ErrorCode.STREAM_CLOSED, "HEADERS after the end of a request", stream_id)
        if not flags & END_STREAM:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "HEADERS inside a request", stream_id)
        check_trailers(headers, stream_id)
        if stream.length is not None and stream.length != stream.total:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length differs from the data", stream_id)
        stream.ended = True
        self._handler.ended(stream)
