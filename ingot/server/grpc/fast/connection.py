"""One connection: bytes to frames, and frames to calls (RFC 9113)."""

from __future__ import annotations

import asyncio
from typing import cast

from ingot.server.grpc.fast import frames
from ingot.server.grpc.fast.calls import Calls
from ingot.server.grpc.fast.control import COST_OF_REFUSAL, STREAM_WINDOW, Control, check_dependency
from ingot.server.grpc.fast.frames import (
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
from ingot.server.grpc.fast.head import HEADER_LIST, Heads, check_trailers
from ingot.server.grpc.fast.replies import HTTP_1
from ingot.server.grpc.fast.stream import Stream

_WINDOW = 16 << 20
_MAX_STREAMS = 1024
# A block of headers; in how many frames it comes is a matter of patience.
_MAX_BLOCK = 32 << 10
# A frame of DATA with less does not pay for itself: not even a message's shortest header fits in.
_SMALL_DATA = 16
# Answers that the client's windows hold up; while there are more, it gets no new streams.
_MAX_QUEUED = 64 << 20

_GREETING = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: _MAX_STREAMS,
        frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: HEADER_LIST,
    }
) + window_update(0, _WINDOW - frames.DEFAULT_WINDOW)
_HEAD = frames.HEAD.unpack_from


class Connection(Control, asyncio.Protocol):
    """A client's connection."""

    __slots__ = (
        "_begun",
        "_block",
        "_block_flags",
        "_block_of",
        "_calls",
        "_fresh",
        "_heads",
        "_rest",
        "_taken",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: Calls):
        super().__init__(loop)
        self._calls = calls
        self._heads = Heads()
        self._rest = b""
        self._begun = False
        self._block = b""
        self._block_of = self._block_flags = 0
        self._taken = 0
        self._fresh: list[Stream] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._calls.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.over = True
        self._calls.connections.discard(self)
        self.abandon()

    def abandon(self) -> None:
        self._calls.endings.add(self)

    def pause_writing(self) -> None:
        self.paused = True
        if self.transport is not None:
            self.transport.pause_reading()  # who does not read its answers asks nothing more

    def resume_writing(self) -> None:
        self.paused = False
        self.quiet = 0
        if self.transport is not None:
            self.transport.resume_reading()
        self.flush()

    def eof_received(self) -> None:
        """Close: clients of gRPC never shut down one side alone, so this one has left, and nobody waits for answers."""
        self.leaving = True

    def look(self, warn: int, end: int) -> None:
        """Also end the calls of which a message was begun, and has brought too little for ``warn`` looks."""
        super().look(warn, end)
        if self.paused:
            return
        for stream in list(self.streams.values()):
            # A window that is to be refilled means that earlier messages of the stream wait: the client may not send.
            if stream.received < STREAM_WINDOW // 2 and stream.stalls(warn):
                self._calls.stalled(self, stream)

    def released(self, stream: Stream) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
        self._calls.release(stream)
        if self.leaving and not self.streams:
            self.loop.call_soon(self.close)

    def failed(self, code: ErrorCode) -> None:
        self._calls.count_fault(code)

    def data_received(self, data: bytes) -> None:
        self.quiet = 0
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        if not self._begun:
            at = self._begin(data)
            if at < 0:
                return
        at = self._frames(data, at)
        if at < len(data) and not self.over:
            self._rest = data[at:]
        if self._fresh:
            for stream in self._fresh:
                if not stream.ended:
                    self._calls.arm(self, stream)
            self._fresh.clear()

    def _begin(self, data: bytes) -> int:
        """Return where the first frame begins; -1 if it is not there yet, or never will be."""
        if data[: len(PREFACE)] != PREFACE[: len(data)]:
            if self.transport is not None:
                if b"HTTP/1" in data[:1024] or data[:4] in (b"GET ", b"POST", b"HEAD"):
                    self.transport.write(HTTP_1)
                self.over = True
                self.transport.close()
            return -1
        if len(data) < len(PREFACE):
            self._rest = data
            return -1
        self._begun = True
        self.write(_GREETING)
        return len(PREFACE)

    def _frames(self, data: bytes, at: int) -> int:
        """Take all frames that are complete; return where the next begins."""
        last = len(data) - 9
        while at <= last:
            size, flags, stream_id = _HEAD(data, at)
            kind = size & 0xFF
            size >>= 8
            start = at + 9
            stop = start + size
            try:
                if stop > len(data):
                    if size > DEFAULT_FRAME:
                        raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes, over {DEFAULT_FRAME}")
                    break
                at = stop
                if kind == DATA and not self._block_of:
                    self._data(flags, stream_id & 0x7FFFFFFF, data, start, stop)
                else:
                    self._other(kind, flags, stream_id & 0x7FFFFFFF, data, start, stop)
            except Fault as fault:
                self.fail_with(fault)
                if self.over:
                    return len(data)
        return at

    def _other(self, kind: int, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        if stop - start > DEFAULT_FRAME:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {stop - start} bytes, over {DEFAULT_FRAME}")
        if self._block_of:
            if kind != CONTINUATION or stream_id != self._block_of:
                raise Fault(ErrorCode.PROTOCOL_ERROR, "a frame came between those of a block of headers")
            self._continue(flags, data[start:stop])
        elif kind == HEADERS and self.settled:
            self._headers(flags, stream_id, data, start, stop)
        elif kind == SETTINGS or self.settled:
            self.handle_control_frame(kind, flags, stream_id, data[start:stop])
        else:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "the first frame is not SETTINGS")

    def _data(self, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        size = stop - start
        if size > DEFAULT_FRAME:
            raise Fault(ErrorCode.FRAME_SIZE_ERROR, f"a frame of {size} bytes, over {DEFAULT_FRAME}")
        self._taken += size
        if self._taken >= _WINDOW // 2:
            self.write(window_update(0, self._taken))
            self._taken = 0
        stream = self.streams.get(stream_id)
        if stream is None or stream.ended:
            self._stray(stream_id, size)
            return
        if flags & PADDED:
            start, stop = unpadded(data, start, stop)
        stream.total += stop - start
        length = stream.head.length
        if flags & END_STREAM:
            if length is not None and length != stream.total:
                raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length is not that of the data", stream_id)
            stream.ended = True
            if stream.messages is None:
                self._calls.whole(self, stream, data[start:stop])
                return
        elif length is not None and stream.total > length:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length is not that of the data", stream_id)
        elif stop - start < _SMALL_DATA:
            self.spend(1, "too many small frames of DATA")
        stream.received += size
        if stream.received > STREAM_WINDOW:
            raise Fault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the stream's window", stream_id)
        self._calls.feed(self, stream, data[start:stop])

    def _stray(self, stream_id: int, size: int) -> None:
        """Take DATA that belongs to no stream that is open."""
        if size < _SMALL_DATA:
            self.spend(1, "too many small frames of DATA")
        if stream_id == 0 or stream_id > self.last_id:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "DATA on a stream that was never opened")
        if not self.was_ended_first(stream_id):
            raise Fault(ErrorCode.STREAM_CLOSED, "DATA on a stream that is closed", stream_id)

    def _headers(self, flags: int, stream_id: int, data: bytes, start: int, stop: int) -> None:
        if not stream_id & 1:
            raise Fault(ErrorCode.PROTOCOL_ERROR, f"HEADERS on stream {stream_id}, which is not for clients to open")
        if flags & PADDED:
            start, stop = unpadded(data, start, stop)
        if flags & HAS_PRIORITY:
            if stop - start < 5:
                raise Fault(ErrorCode.FRAME_SIZE_ERROR, "HEADERS without room for their priority")
            check_dependency(0, stream_id, data[start : start + 4])  # its block is not decoded: the table would be lost
            start += 5
        if flags & END_HEADERS:
            self._open(flags, stream_id, data[start:stop])
        else:
            self._block, self._block_of, self._block_flags = data[start:stop], stream_id, flags

    def _continue(self, flags: int, part: bytes) -> None:
        self._block += part
        self.spend(1)
        if len(self._block) > _MAX_BLOCK:
            raise Fault(ErrorCode.ENHANCE_YOUR_CALM, "the headers are too large")
        if flags & END_HEADERS:
            stream_id, block, self._block_of, self._block = self._block_of, self._block, 0, b""
            self._open(self._block_flags, stream_id, block)

    def _open(self, flags: int, stream_id: int, block: bytes) -> None:
        """Take the headers that open a stream, or those behind a request."""
        if stream_id <= self.last_id:
            self._trailers(flags, stream_id, block)
            return
        self.last_id = stream_id
        head = self._heads(block)  # in any case, as both sides keep a table of what was sent
        if self._heads.cost:
            self.spend(self._heads.cost, "too many headers that are long to read")
        if head.fault:
            raise Fault(ErrorCode.PROTOCOL_ERROR, head.fault, stream_id)
        if self.leaving or len(self.streams) >= _MAX_STREAMS or self.queued > _MAX_QUEUED:
            raise Fault(ErrorCode.REFUSED_STREAM, "no more streams are taken", stream_id)
        stream = self.streams[stream_id] = Stream(stream_id, head)
        if flags & END_STREAM:
            stream.ended = True
            if head.length:
                raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length is not that of the data", stream_id)
        if head.refusal:
            self.refuse(stream, head.refusal)
            self.spend(COST_OF_REFUSAL, "too many calls that cannot be answered")
            return
        self._calls.begin(self, stream)
        if stream.deadline is not None:
            self._fresh.append(stream)

    def _trailers(self, flags: int, stream_id: int, block: bytes) -> None:
        headers = self._heads.decode(block)
        self.spend(self._heads.cost, "too many headers that are long to read")
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self.was_ended_first(stream_id):
                raise Fault(ErrorCode.STREAM_CLOSED, "HEADERS on a stream that is closed")
            self.spend(1)
            return
        if stream.ended:
            raise Fault(ErrorCode.STREAM_CLOSED, "HEADERS behind the end of a request", stream_id)
        if not flags & END_STREAM:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "HEADERS amid a request", stream_id)
        check_trailers(headers, stream_id)
        if stream.head.length is not None and stream.head.length != stream.total:
            raise Fault(ErrorCode.PROTOCOL_ERROR, "content-length is not that of the data", stream_id)
        stream.ended = True
        self._calls.ended(self, stream)
