"""uvicorn's HTTP protocol with bounds on what comes before a request's body, and with order in pipelines."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ingot.server.http.departure import Departure

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 60.0
UNREAD_SECONDS = 60.0

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers are too large, or do not arrive in time.

    uvicorn has neither bound: a client that sends headers for ever would be held, and its bytes kept, for ever. It also
    reads on while a client leaves its answers unread, or sends one request after another and waits for none; here
    neither is read from until it has caught up, and one that reads nothing of an answer for a minute is left. The timer
    of an idle connection is set once, not with every request.

    ``parsed`` tells that the parser stands between two requests.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.parsed = True
        self._answering: Any = None  # the cycle whose turn it is; ``cycle`` is the newest
        self._advancing = False
        self._departure: Departure | None = None
        self._idle_since = 0.0
        self._head_bytes = 0
        self._in_head = True
        self._began = False
        self._unread: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        self._unwatch()
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

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # 1.0 knows no interim answers
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self.parsed = True
        super().on_message_complete()
        self.cycle.waiting_for_100_continue = False  # the body is there

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

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

    def _settle(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
