"""What all HTTP connections of a server share, and the way from uvicorn to FastAPI."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ingot.server.dataplane import DataPlane
from ingot.server.http.exchange import HttpResponse, Service
from ingot.server.http.heads import Head
from ingot.server.http.plans import Plans
from ingot.server.limits import BoundedCache, Budget

_MAX_HEADS = 1024
# Copying a small body behind its head costs less than handing two buffers to the kernel.
_JOIN_BELOW = 32 << 10


class Shared:
    """HTTP over a data plane: inference and health checks are answered by the connections themselves, all else by
    FastAPI, which is not imported before it is needed: that takes a third of a second.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body, before and after decompression.
        max_bodies_bytes: how much all requests together may hold.
    """

    def __init__(self, plane: DataPlane, max_body_bytes: int, max_bodies_bytes: int):
        self.budget = Budget(max_bodies_bytes)
        self.service = Service(plane, Plans(), max_body_bytes, self.budget)
        self.heads: BoundedCache[bytes, Head] = BoundedCache(_MAX_HEADS)
        self._app: Any = None
        self._importing: asyncio.Lock | None = None
        self._heads: BoundedCache[tuple[Any, ...], bytes] = BoundedCache(_MAX_HEADS)
        self._defaults: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on to FastAPI."""
        if self._app is None:
            self._importing = self._importing or asyncio.Lock()
            async with self._importing:
                self._app = self._app or await asyncio.to_thread(self._load)
        if scope["method"] == "HEAD":  # as GET; uvicorn leaves the body out
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, functools.partial(self._send, send))

    async def _send(self, send: Any, message: Any) -> None:
        """Forward a message of FastAPI's response, with ``Connection: close`` while draining."""
        if self.service.plane.draining and message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    def _load(self) -> Any:
        from ingot.server.http.app import create_app

        return create_app(self.service.plane, self.service.max_body_bytes, budget=self.budget)

    def render(self, answer: HttpResponse, defaults: list[tuple[bytes, bytes]], *, keep_alive: bool) -> list[bytes]:
        """Return an answer as bytes, in one piece or two.

        Args:
            answer: what to send.
            defaults: headers of every answer; uvicorn makes a new list of them once a second, with the date.
            keep_alive: whether the connection is for more requests.
        """
        if defaults is not self._defaults:
            self._defaults = defaults
            self._heads.clear()
        status, body, headers, media_type = answer
        kind = (status, media_type, headers, keep_alive, len(body))
        head = self._heads.get(kind)
        if head is None:
            head = _head(answer, defaults, keep_alive=keep_alive)
            self._heads.keep(kind, head)
        return [head + body] if len(body) < _JOIN_BELOW else [head, body]


def _head(answer: HttpResponse, defaults: list[tuple[bytes, bytes]], *, keep_alive: bool) -> bytes:
    """Return all that stands before the body."""
    lines = [STATUS_LINE[answer.status], *(b"%b: %b\r\n" % header for header in defaults)]
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    lines.append(f"content-type: {answer.media_type}\r\ncontent-length: {len(answer.body)}\r\n".encode())
    lines += [f"{name.lower()}: {value}\r\n".encode("latin-1") for name, value in answer.headers]
    return b"".join((*lines, b"\r\n"))
