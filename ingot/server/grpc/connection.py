"""A gRPC connection: an asyncio transport, HTTP/2 on its bytes, and the server's calls behind it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import cast

from ingot.server.access.peers import peer_of
from ingot.server.grpc.call import Call
from ingot.server.grpc.calls import Calls
from ingot.server.grpc.head import Head
from ingot.server.grpc.replies import HTTP_1, Replies
from ingot.server.http2.connection import STREAM_WINDOW, Http2Connection
from ingot.server.http2.frames import PREFACE, ErrorCode, Fault, goaway, settings

# How long a client that will be refused may send nothing.
_SILENT_SECONDS = 10.0


class WithoutAlpn(asyncio.Protocol):
    """Refuses a client that did not negotiate ``h2``, as RFC 9113, section 3.2 asks, once it has sent something.

    Args:
        loop: the event loop.
        transport: the connection, whose protocol this becomes.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport):
        self._transport = transport
        self._timer = loop.call_later(_SILENT_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        refused = goaway(0, ErrorCode.INADEQUATE_SECURITY, "negotiate h2 by ALPN")
        self._transport.write(settings({}) + refused if PREFACE.startswith(data[: len(PREFACE)]) else HTTP_1)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()


class Connection(asyncio.Protocol):
    """A client's connection.

    ``_quiet`` counts the calls of :meth:`poll` since the client last sent anything, ``_stuck`` those since it last read
    any of its queued answers.
    """

    __slots__ = (
        "_calls",
        "_connections",
        "_moved",
        "_quiet",
        "_replies",
        "_stuck",
        "begin",
        "data",
        "ended",
        "http2",
        "loop",
        "parse",
        "transport",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: Calls, connections: set[Connection]):
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.parse = calls.parse
        self.http2: Http2Connection[Call] = Http2Connection(self, loop.time)
        self._calls = calls
        self._connections = connections
        self._replies = Replies(loop, self.http2)
        # A request goes straight to the server's calls.
        self.begin = partial(calls.begin, self._replies)
        self.data = partial(calls.data, self._replies)
        self.ended = partial(calls.ended, self._replies)
        self._quiet = self._stuck = self._moved = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None and encrypted.selected_alpn_protocol() != "h2":
            self.faulted(ErrorCode.INADEQUATE_SECURITY)
            self.transport.set_protocol(WithoutAlpn(self.loop, self.transport))
            return
        limits = self._calls.limits
        if limits is not None and limits.connect() is not None:
            self.transport.abort()  # after a GOAWAY, gRPC's core would connect again every 10 ms
            return
        if self._calls.checks_access:
            self._replies.peer = peer_of(transport)
        self._connections.add(self)
        if self._calls.stopping:  # it was accepted before the port was closed, and comes a turn of the loop later
            self.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.http2.control.over = True
        if self in self._connections:
            self._connections.discard(self)
            if self._calls.limits is not None:
                self._calls.limits.disconnect()
        self._calls.cleanup.add(self._replies)

    def pause_writing(self) -> None:
        self.http2.sender.paused = True
        if self.transport is not None:
            self.transport.pause_reading()  # a client that does not read its answers may not ask for more

    def resume_writing(self) -> None:
        self.http2.sender.paused = False
        self._quiet = 0
        if self.transport is not None:
            self.transport.resume_reading()
        self._flush()

    def eof_received(self) -> None:
        """Close: gRPC clients never shut down one side alone, so this one has left and waits for no answers."""
        self.http2.control.leaving = True

    def data_received(self, data: bytes) -> None:
        self._quiet = 0
        self.http2.receive(data)
        if self._replies.fresh:
            for call in self._replies.fresh:
                if not call.ended and not call.closed:
                    self._calls.expect(self._replies, call)
            self._replies.fresh.clear()

    def poll(self, warn: int, end: int) -> None:
        """Check for dead and stuck clients, and for stalled messages; called at regular intervals.

        Args:
            warn: the calls without a sign of life after which the client is pinged; also the calls without any progress
                after which a client that does not read its answers, or a call that stalls inside a message, is ended.
            end: the calls without a sign of life after which the connection is aborted.
        """
        sender, control = self.http2.sender, self.http2.control
        self._quiet += 1
        self._stuck = self._stuck + 1 if sender.queued and sender.moved == self._moved else 0
        self._moved = sender.moved
        if self._quiet >= end and self.transport is not None:
            self.transport.abort()
        elif self._stuck >= warn and not sender.paused:
            control.fail(Fault(ErrorCode.ENHANCE_YOUR_CALM, "answers wait, and the client keeps its windows closed"))
        elif self._quiet == warn and control.settled:
            control.ping()
        if sender.paused:
            return
        for call in list(sender.streams.values()):
            # A larger ``received`` means that earlier messages wait for the model: the client may not send more.
            if call.received < STREAM_WINDOW // 2 and call.stalls(warn):
                self._calls.stalled(self._replies, call)

    def recheck(self) -> None:
        """End the streams whose client has lost its access."""
        for call in list(self.http2.sender.streams.values()):
            self._calls.recheck(self._replies, call)

    def leave(self) -> None:
        """Ask the client to open no more calls, once it has begun to speak HTTP/2."""
        self.http2.control.leave()

    def _flush(self) -> None:
        data = self.http2.sender.take()
        if data and self.transport is not None and not self.http2.control.over:
            self.transport.write(data)

    def close(self) -> None:
        """Write the remaining output and close."""
        control = self.http2.control
        control.leaving = True
        self._flush()
        control.over = True
        if self.transport is not None:
            self.transport.close()
        self._calls.cleanup.add(self._replies)

    def drained(self) -> None:
        self.loop.call_soon(self.close)

    def not_http2(self, data: bytes) -> None:
        if self.transport is not None:
            if b"HTTP/1" in data[:1024] or data[:4] in (b"GET ", b"POST", b"HEAD"):
                self.transport.write(HTTP_1)
            self.http2.control.over = True
            self.transport.close()

    def faulted(self, code: int) -> None:
        self._calls.count_fault(ErrorCode(code))

    def wake(self) -> None:
        self.loop.call_soon(self._flush)

    def create(self, stream_id: int, head: Head) -> Call:
        return Call(stream_id, head)

    def sent(self, stream: Call) -> None:
        if stream.room is not None and not stream.room.done():
            stream.room.set_result(None)

    def stopped(self, stream: Call) -> None:
        stream.stop()

    def released(self, stream: Call) -> None:
        if stream.timer is not None:
            stream.timer.cancel()
        if stream.held or stream.counted or stream.share is not None:
            self._calls.release(stream)
        if self.http2.control.leaving and not self.http2.sender.streams:
            self.drained()
