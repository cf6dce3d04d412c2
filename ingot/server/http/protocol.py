"""uvicorn's HTTP protocol with bounds on what comes before a request's body."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 60.0

_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers are too large, or do not arrive in time.

    uvicorn has neither bound: a client that sends headers for ever would be held, and its bytes kept, for ever.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_bytes = 0
        self._in_head = True
        self._began = False
        self._expiry: asyncio.TimerHandle | None = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._began = False
        super().data_received(data)
        # What came with the head's first byte is not counted: the end of another request's body may be in it.
        if self._in_head and not self._began and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_TOO_LARGE)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes, self._in_head, self._began = 0, True, True
        if self._expiry is None:
            self._expiry = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._settle()
        super().on_headers_complete()

    def _settle(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
