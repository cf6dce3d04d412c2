"""Bodies that need more than one tick of the event loop: compressed bodies, and large JSON, decoded in a thread.

The limits on the size of bodies, and on the memory of all together, are in server/net/limits.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from ingot.protocol.requests import Cancellable
from ingot.server.net import compression
from ingot.server.net.compression import Decompression, Hold
from ingot.server.net.limits import Budget

T = TypeVar("T")


class CompressedBody:
    """The decompression of a body, and then the work on its content.

    Args:
        proceed: called once with the content or the error, unless this is cancelled; returns the work that it starts.
    """

    def __init__(self, proceed: Callable[[bytes | Exception], Cancellable | None]):
        self._proceed = proceed
        self._work: Cancellable | None = None

    def start(self, body: bytes, encoding: str, limit: int, hold: Hold) -> Cancellable | None:
        """Begin; return the work that can be cancelled, or None if it is done."""
        pieces = compression.decompressed(body, encoding, limit)
        self._work = work = Decompression(pieces, hold, self._continue)
        work.start(len(body))
        return self if self._work is not None else None

    def cancel(self) -> None:
        """Drop the work."""
        work, self._work = self._work, None  # it refers back to this object
        if work is not None:
            work.cancel()

    def _continue(self, content: bytes | Exception) -> None:
        self._work = self._proceed(content)


class ThreadedBody(Generic[T]):
    """A body decoded in a thread, so that the event loop stays free, and then its request.

    Args:
        budget: counts the body of a cancelled request until the thread is done with it.
        size: the body's, in bytes.
        proceed: called once with the decoded body or the error, unless this is cancelled; returns the work it starts.
    """

    def __init__(self, budget: Budget, size: int, proceed: Callable[[T | Exception], Cancellable | None]):
        self._budget = budget
        self._size = size
        self._proceed = proceed
        self._decoding: Future[T] | None = None
        self._work: Cancellable | None = None
        self._cancelled = False

    def start(self, decode: Callable[[], T]) -> Cancellable:
        """Begin."""
        self._decoding = compression.threads.submit(decode)
        asyncio.wrap_future(self._decoding).add_done_callback(self._continue)
        return self

    def cancel(self) -> None:
        """Drop the work."""
        if self._cancelled:
            return
        self._cancelled = True
        if self._decoding is not None and not self._decoding.cancel():
            self._budget.keep(self._size)
        work, self._work = self._work, None
        if work is not None:
            work.cancel()

    def _continue(self, future: asyncio.Future[T]) -> None:
        self._decoding = None
        if future.cancelled():
            return
        error = future.exception()
        if self._cancelled:
            self._budget.change(-self._size)
        elif isinstance(error, Exception):
            self._work = self._proceed(error)
        else:
            self._work = self._proceed(future.result())
