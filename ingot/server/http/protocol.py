"""uvicorn's HTTP protocol with bounds on how long a request may take to come, and with order in pipelines."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ingot.server.http.departure import Departure
from ingot.server.limits import BODY_BYTES

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 60.0
BODY_SECONDS = 60.0
UNREAD_SECONDS = 60.0
LINGER_SECONDS = 1.0

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_NO_VERSION = b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class _Flow(FlowControl):
    """uvicorn's, which also tells for how long reading was paused: ``paused`` seconds in all, but for a pause now."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        super().__init__(transport)
        self.paused = 0.0
        self._loop = loop
        self._since = 0.0

    def pause_reading(self) -> None:
        if not self.read_paused:
            self._since = self._loop.time()
        super().pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.paused += self._loop.time() - self._since
        super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers are too large, or do not arrive in time, or whose body stalls.

    uvicorn has none of these bounds: a client that sends headers for ever, or never the end of a body, would be held,
    and its bytes kept, for ever. A body that is not whole must bring :data:`BODY_BYTES` in every minute, not counting
    the time in which it is the server that does not read. uvicorn also reads on while a client leaves its answers
    unread, or sends one request after another and waits for none; here neither is read from until it has caught up, and
    one that reads nothing of an answer for a minute is left. The timers of idle connections and of bodies are set once,
    not with every request: they look for themselves what has happened meanwhile.

    uvicorn closes idle connections as soon as it is told to stop, and so loses the requests that are on their way; here
    each has :data:`LINGER_SECONDS` for one more.

    ``parsed`` tells that the parser stands between two requests.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow: _Flow = _Flow(transport, self.loop)
        self.parsed = True
        self._answering: Any = None  # the cycle whose turn it is; ``cycle`` is the newest
        self._advancing = False
        self._departure: Departure | None = None
        self._idle_since = 0.0
        self._head_bytes = 0
        self.head_size = 0  # of what the parser has told of it
        self._in_head = True
        self._began = False
        self._fed = False
        self._in_body = False  # and some of it was waited for; what follows tells how it got on
        self._came = 0
        self._since = self._paused_before = 0.0
        self._pace: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._stopping: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        self._unwatch()
        for timer in (self._pace, self._stopping):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self.pipeline.clear()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None

    def data_received(self, data: bytes) -> None:
        self._began = False
        super().data_received(data)
        if not self._in_head:
            self._settle()
            if not self.parsed and not self.transport.is_closing():
                self._wait_for_body(len(data))
        elif not self.transport.is_closing():
            if self._expiry is None:
                self._expiry = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
            # What came with the head's first byte is not counted: the end of another request's body may be in it.
            if not self._began:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.transport.write(_TOO_LARGE)
                    self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.parsed = False
        self._head_bytes, self._in_head, self._began = 0, True, True
        self.head_size = 0
        self._in_body = False

    def on_url(self, url: bytes) -> None:
        self.head_size += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.head_size += len(name) + len(value) + 4  # a colon, a blank and the end of the line
        super().on_header(name, value.rstrip(b" \t"))  # which the parser leaves

    def send_400_response(self, msg: str) -> None:
        if "Invalid HTTP version" in str(sys.exception()):  # the parser's error, which uvicorn has just caught
            self.transport.write(_NO_VERSION)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # 1.0 knows no interim answers
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._fed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self.parsed = True
        super().on_message_complete()
        self.cycle.waiting_for_100_continue = False  # the body is there

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        if self._stopping is not None and not self.pipeline:
            cycle.keep_alive = False
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """Go on until the requests in work are answered, and one that may be on its way."""
        drain = self.config.timeout_graceful_shutdown
        linger = LINGER_SECONDS if drain is None else min(LINGER_SECONDS, drain)
        self._stopping = self.loop.call_later(linger, self._end_if_idle)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def _end_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self._departure is not None and not self.pipeline:
            self.transport.close()  # the client has said that it sends no more
        if self.transport.is_closing():
            self._watch()
            return
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._arm(self.timeout_keep_alive)
        if self.pipeline or self.flow.read_paused:
            self._advance()

    def resume_writing(self) -> None:
        self._unwatch()
        super().resume_writing()
        self._advance()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()
        self._watch()

    def _watch(self) -> None:
        """Give the client :data:`UNREAD_SECONDS` for reading some of what it was sent, again and again."""
        size = self.transport.get_write_buffer_size()
        if size and self._unread is None:
            self._unread = self.loop.call_later(UNREAD_SECONDS, self._look, size)

    def _look(self, before: int) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() == before:
            self.transport.abort()
        else:
            self._watch()

    def _unwatch(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _advance(self) -> None:
        """Go on to the next requests of the pipeline, and to reading, unless the client leaves its answers unread."""
        if self._advancing:  # by a request that was answered at once; the loop below goes on after it
            return
        self._advancing = True
        try:
            while self.pipeline and self._answering.response_complete and not self.flow.write_paused:
                if self.transport.is_closing():
                    break
                self._start_asgi_task(*self.pipeline.pop())
        finally:
            self._advancing = False
        if not self.pipeline and not self.flow.write_paused:
            self.flow.resume_reading()

    def _unset_keepalive_if_required(self) -> None:
        """Nothing: the timer looks for itself whether the connection was idle all the time."""

    def _arm(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if not self.parsed or self.cycle is None or not self.cycle.response_complete:
            return  # the end of the answer sets it anew
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._arm(left)
        else:
            super().timeout_keep_alive_handler()
            self._watch()

    def _wait_for_body(self, came: int) -> None:
        """Note that so many bytes came, and that a body is still not whole."""
        if not self._in_body:
            self._in_body = True
            self._begin_minute()
        if self._fed:
            self._fed, self._head_bytes = False, 0
        else:  # trailers, which are kept, or the extensions of a chunk
            self._head_bytes += came
            if self._head_bytes > MAX_HEAD_BYTES:
                self._break_off(_TOO_LARGE)
                return
        self._came += came
        if self._pace is None:
            self._pace = self.loop.call_later(BODY_SECONDS, self._look_at_body)

    def _begin_minute(self) -> None:
        self._came = 0
        self._since = self.loop.time()
        self._paused_before = self.flow.paused

    def _look_at_body(self) -> None:
        self._pace = None
        if self.parsed or self._in_head or self.transport.is_closing():
            return  # the next body that does not come whole sets it anew
        waited = self.loop.time() - self._since - (self.flow.paused - self._paused_before)
        left = BODY_SECONDS - waited
        if self.flow.read_paused or self._answering is not self.cycle:
            left = BODY_SECONDS
        elif left <= 0:
            if self._came < BODY_BYTES:
                self._break_off(self.too_slow())
                return
            self._begin_minute()
            left = BODY_SECONDS
        self._pace = self.loop.call_later(left, self._look_at_body)

    def too_slow(self) -> bytes:
        """Return the answer to a request whose body comes too slowly."""
        return _TOO_SLOW

    def _break_off(self, answer: bytes) -> None:
        """End the connection amid a body, with an answer unless there was one."""
        if not self.cycle.response_started:
            self.transport.write(answer)
        self.abandon(self.cycle)  # now, however long the client takes to read this
        self.transport.close()
        self._watch()

    def abandon(self, cycle: Any) -> None:
        """Tell a request's application that its client is gone."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _settle(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
