"""What all HTTP connections of a server share, and the way from uvicorn to FastAPI."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ingot.server.dataplane import DataPlane
from ingot.server.http.exchange import Answer
from ingot.server.http.heads import Head
from ingot.server.http.recent import Recent
from ingot.server.limits import Budget

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
        self.plane = plane
        self.max_body_bytes = max_body_bytes
        self.budget = Budget(max_bodies_bytes)
        self.heads: Recent[bytes, Head] = Recent(_MAX_HEADS)
        self._app: Any = None
        self._importing: asyncio.Lock | None = None
        self._lines: dict[tuple[Any, ...], bytes] = {}
        self._defaults: list[tuple[bytes, bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on to FastAPI."""
        if self._app is None:
            self._importing = self._importing or asyncio.Lock()
            async with self._importing:
                self._app = self._app or await asyncio.to_thread(self._load)
        await self._app(scope, receive, send)

    def _load(self) -> Any:
        from ingot.server.http.app import create_app

        return create_app(self.plane, self.max_body_bytes, budget=self.budget)

    def render(self, answer: Answer, defaults: list[tuple[bytes, bytes]], *, keep_alive: bool) -> list[bytes]:
        """Return an answer as bytes, in one piece or two.

        Args:
            answer: what to send.
            defaults: headers of every answer; uvicorn makes a new list of them once a second, with the date.
            keep_alive: whether the connection is for more requests.
        """
        if defaults is not self._defaults:
            self._defaults = defaults
            self._lines.clear()
        kind = (answer.status, answer.media_type, keep_alive)
        line = self._lines.get(kind)
        if line is None:
            line = self._lines[kind] = _head(answer, defaults, keep_alive=keep_alive)
        body = answer.body
        parts = [line, b"%d\r\n" % len(body)]
        parts += [f"{name.lower()}: {value}\r\n".encode("latin-1") for name, value in answer.headers.items()]
        parts.append(b"\r\n")
        if len(body) < _JOIN_BELOW:
            parts.append(body)
            return [b"".join(parts)]
        return [b"".join(parts), body]


def _head(answer: Answer, defaults: list[tuple[bytes, bytes]], *, keep_alive: bool) -> bytes:
    """Return the head up to the content's length."""
    lines = [STATUS_LINE[answer.status], *(b"%b: %b\r\n" % header for header in defaults)]
    if not keep_alive:
        lines.append(b"connection: close\r\n")
    return b"".join((*lines, f"content-type: {answer.media_type}\r\ncontent-length: ".encode()))
