"""Bodies of responses, read within limits: a server may be faulty, hostile, or not the one that was meant."""

from __future__ import annotations

import math
import time

import httpx

from ingot.client.access import DOCUMENT_BYTES, too_large
from ingot.errors import Unsupported

IDENTITY = {"Accept-Encoding": "identity"}
"""Compressed responses are refused, as a small one may decompress to any size."""
_ERROR_BYTES = 64 << 10


def read(
    response: httpx.Response, place: str, limit: int = DOCUMENT_BYTES, seconds: float | None = None
) -> httpx.Response:
    """Return a streamed response with its body, which is closed.

    Args:
        response: its head was read, and nothing of its body.
        place: of the server, for messages.
        limit: bytes. Of the body of an error, the first 64 KiB are returned.
        seconds: until all has arrived. httpx limits the time to each part, which an endless body always meets.

    Raises:
        TooLarge: the body is larger than the limit.
        Unsupported: it is compressed.
        httpx.HTTPError: it takes too long, or the connection breaks.
    """
    body = _Body(response, place, limit, seconds)
    for part in response.iter_raw():
        if body.add(part):
            break
    response.close()
    return body.response()


async def aread(
    response: httpx.Response, place: str, limit: int = DOCUMENT_BYTES, seconds: float | None = None
) -> httpx.Response:
    """Do the same in an event loop."""
    body = _Body(response, place, limit, seconds)
    async for part in response.aiter_raw():
        if body.add(part):
            break
    await response.aclose()
    return body.response()


class _Body:
    def __init__(self, response: httpx.Response, place: str, limit: int, seconds: float | None):
        self._head, self._place, self._limit = response, place, limit
        self._failed = response.status_code >= 400
        self._end = math.inf if seconds is None else time.monotonic() + seconds
        self._parts: list[bytes] = []
        self._size = 0
        encoding = response.headers.get("Content-Encoding", "identity")
        self._readable = encoding in ("", "identity")
        if self._failed:
            return
        if not self._readable:
            raise Unsupported(f"{place} sent an answer in the encoding '{encoding[:40]}', which it was not asked for")
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and len(length) < 20 and int(length) > limit:
            raise too_large(place, limit)

    def add(self, part: bytes) -> bool:
        """Add a part; return whether no more is needed."""
        self._parts.append(part)
        self._size += len(part)
        if self._failed and self._size >= _ERROR_BYTES:
            return True
        if self._size > self._limit:
            raise too_large(self._place, self._limit)
        if time.monotonic() > self._end:
            raise httpx.ReadTimeout("timed out")
        return False

    def response(self) -> httpx.Response:
        headers = [(name, value) for name, value in self._head.headers.multi_items() if name != "content-encoding"]
        content = b"".join(self._parts) if self._readable else b""
        return httpx.Response(self._head.status_code, headers=headers, content=content)


class Lines:
    """The lines of a stream of text that arrives in parts."""

    def __init__(self, place: str, limit: int):
        self._place, self._limit, self._rest = place, limit, bytearray()

    def add(self, part: bytes) -> list[str]:
        """Return the lines that a part ends.

        Raises:
            TooLarge: a line is longer than the limit.
        """
        start = len(self._rest)
        self._rest += part
        if self._rest.find(b"\n", start) < 0:
            if len(self._rest) > self._limit:
                raise too_large(self._place, self._limit)
            return []
        *lines, last = bytes(self._rest).split(b"\n")
        self._rest = bytearray(last)
        return [line.decode(errors="replace").removesuffix("\r") for line in lines]
