"""Answers of calls. Their header blocks are HPACK literals, so they need no table that a client could resize."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Final

from ingot.protocol.context import RequestContext
from ingot.server.access.peers import Peer
from ingot.server.grpc.call import Call
from ingot.server.http2.connection import Http2Connection
from ingot.server.http2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, LARGEST_FRAME
from ingot.server.net.limits import Share

# RFC 7541, appendix A and section 6.
_STATUS_200 = b"\x88"
_STATUS = b"\x08"
_CONTENT_TYPE = b"\x0f\x10"
_ALLOW = b"\x0f\x07"
_CONTENT_LENGTH_0 = b"\x0f\x0d\x010"

# gRPC's statuses of the HTTP statuses that clients of another protocol get: unimplemented, and unknown.
_OF_HTTP = {405: 12}

# Milliseconds, as gRPC's retries (proposal A6) read it.
PUSHBACK = b"grpc-retry-pushback-ms"

_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}


def integer(value: int, prefix: int, first: int = 0) -> bytes:
    """Encode an integer for HPACK (RFC 7541, section 5.1) after the bits of ``first``."""
    most = (1 << prefix) - 1
    if value < most:
        return bytes((first | value,))
    out = bytearray((first | most,))
    value -= most
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SIZES: Final = [integer(size, 7) for size in range(128)]


def _text(value: bytes) -> bytes:
    size = len(value)
    return (_SIZES[size] if size < len(_SIZES) else integer(size, 7)) + value


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + _text(name) + _text(value)


OPENING: Final = _STATUS_200 + _CONTENT_TYPE + _text(b"application/grpc")
_OK = _literal(b"grpc-status", b"0")

_HEAD_OF_OPENING: Final = len(OPENING) << 8 | HEADERS
_pack_begin: Final = struct.Struct(f">IBI{len(OPENING)}sIBIBI").pack
_pack_end: Final = struct.Struct(">IBI").pack
_REQUEST_ID, _TRACEPARENT = (b"\x00" + _text(name) for name in (b"x-request-id", b"traceparent"))


_OK_REQUEST_ID: Final = _OK + _REQUEST_ID


def _identity(context: RequestContext) -> bytes:
    """Return the trailers that name a call: its id and, if it has one, its trace context."""
    block = _REQUEST_ID + _text(context.id)
    return block + _TRACEPARENT + _text(context.traceparent) if context.traceparent else block


def whole(stream_id: int, message: tuple[bytes, ...], size: int, context: RequestContext) -> list[bytes]:
    """Return the frames of a complete answer: one message of ``size`` bytes that fits into one frame."""
    begin = _pack_begin(
        _HEAD_OF_OPENING, END_HEADERS, stream_id, OPENING, (size + 5) << 8 | DATA, 0, stream_id, 0, size
    )
    block = _OK_REQUEST_ID + _text(context.id)
    if context.traceparent:
        block = _OK + _identity(context)
    return [begin, *message, _pack_end(len(block) << 8 | HEADERS, END_HEADERS | END_STREAM, stream_id), block]


def ending(
    status: int, text: str = "", *, context: RequestContext, opened: bool, accepts: bool = False, later: bool = False
) -> bytes:
    """Return the header block that ends an answer.

    Args:
        status: gRPC's status code.
        text: the message for the client.
        context: the call's identity.
        opened: whether the answer has begun; otherwise this block is the whole answer.
        accepts: whether to list the supported compressions.
        later: whether the client should retry, but not within a second.
    """
    block = _OK if status == 0 else _literal(b"grpc-status", str(status).encode())
    if text:
        block += _literal(b"grpc-message", _percent_encoded(text))
    if accepts:
        block += _literal(b"grpc-accept-encoding", b"identity,deflate,gzip")
    if later:
        block += _literal(PUSHBACK, b"1000")
    block += _identity(context)
    return block if opened else OPENING + block


def refusal(status: int) -> bytes:
    """Return the header block of an answer to a request that is not gRPC."""
    block = _STATUS + _text(str(status).encode()) + _CONTENT_LENGTH_0
    return block + _ALLOW + _text(b"POST") if status == 405 else block


def _percent_encoded(text: str) -> bytes:
    raw = text.encode(errors="replace")
    return b"".join(bytes((byte,)) if byte in _PLAIN else b"%%%02X" % byte for byte in raw)


HTTP_1 = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\ncontent-length: 67\r\n\r\n"
    b"this port speaks gRPC over HTTP/2; plain HTTP is on the other port\n"
)

# A streaming handler waits while its stream has more queued bytes than this.
_STREAM_QUEUE = 256 << 10


class Replies:
    """Answers the calls of one connection.

    ``fresh``: those whose headers arrived in the current read. ``peer``: the client, if access is checked.
    ``share``: what clients without a name use of their limits.
    """

    __slots__ = ("_sender", "fresh", "http2", "loop", "peer", "share")

    def __init__(self, loop: asyncio.AbstractEventLoop, http2: Http2Connection[Call]):
        self.loop = loop
        self.http2 = http2
        self._sender = http2.sender
        self.fresh: list[Call] = []
        self.peer = Peer()
        self.share = Share()

    def answer(self, call: Call, message: tuple[bytes, ...], size: int) -> None:
        """Answer a call with one message, given in parts, and end it.

        Raises:
            TooLarge: the client does not read its answers, and too many bytes wait already.
        """
        sender = self._sender
        context = call.context
        context.finish(0)
        if size + 5 <= LARGEST_FRAME and sender.answer(call, whole(call.id, message, size, context), size + 5):
            return
        sender.send(call, OPENING, b"\0" + size.to_bytes(4), *message)
        sender.end(call, ending(0, context=context, opened=True))

    def send(self, call: Call, message: bytes) -> None:
        """Send one message of a stream; raises as :meth:`answer`."""
        self._sender.send(call, OPENING, b"\0" + len(message).to_bytes(4), message)

    def end(self, call: Call) -> None:
        """End an answer after its queued messages."""
        call.context.finish(0)
        self._sender.end(call, ending(0, context=call.context, opened=call.opened))

    def fail(self, call: Call, status: int, text: str, *, accepts: bool = False, later: bool = False) -> None:
        """End an answer with an error; its queued messages are dropped."""
        if not call.closed:
            context = call.context
            context.finish(status)
            block = ending(status, text, context=context, opened=call.opened, accepts=accepts, later=later)
            self._sender.replace(call, block)

    def refuse(self, call: Call, status: int) -> None:
        """Answer a request that is not gRPC with an HTTP status."""
        call.context.finish(_OF_HTTP.get(status, 2))
        self._sender.replace(call, refusal(status))

    async def room(self, call: Call) -> None:
        """Wait while too many bytes of a call are queued."""
        while call.outgoing and sum(map(len, call.outgoing)) > _STREAM_QUEUE:
            call.room = self.loop.create_future()
            await call.room


# Calls ended per tick of the event loop. Each may cancel a task and its work, which takes about 0.1 ms.
_A_TICK = 64


class StreamCleanup:
    """Ends the calls of closed connections, a limited number per tick of the event loop."""

    def __init__(self) -> None:
        self._closed: deque[Replies] = deque()
        self._due = False

    def add(self, replies: Replies) -> None:
        """End the calls of a connection, the first ones now unless this tick has ended enough already."""
        self._closed.append(replies)
        if not self._due:
            self._end_some(replies.loop)

    def _end_some(self, loop: asyncio.AbstractEventLoop) -> None:
        left = _A_TICK
        while self._closed and left:
            sender = self._closed[0].http2.sender
            while sender.streams and left:
                sender.forget(next(iter(sender.streams.values())))
                left -= 1
            if not sender.streams:
                self._closed.popleft()
        self._due = left < _A_TICK
        if self._due:
            loop.call_soon(self._end_some, loop)
