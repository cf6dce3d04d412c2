"""Compressed bodies, and messages: small ones in the event loop, large ones in threads, so that nobody waits."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ingot.errors import IngotError
from ingot.server import compression

# What is unfolded or compressed in the event loop: some hundreds of microseconds.
_AT_ONCE = 64 << 10
# Pieces from one look at the budget, and at whether the client is still there, to the next: first and at most. As what
# they may take is held before, a body that unfolds to little must not ask for much.
_FIRST_STRIDE, _STRIDE = 2, 16

threads = ThreadPoolExecutor(2, "ingot-bodies")
"""Where all that takes long is done to bodies and messages: compression, and the decoding of large JSON."""

Hold = Callable[[int], None]


class Decompression:
    """A request body on its way out of its ``Content-Encoding``, or a message of gRPC out of its ``grpc-encoding``.

    Args:
        pieces: what :func:`ingot.server.compression.unfolded` yields.
        hold: told how much more memory the request takes; raises an IngotError if that is too much.
        done: called once with the whole body or the error, unless the request is cancelled: by :meth:`start` if the
            body is small, else in a later tick of the event loop.
    """

    def __init__(self, pieces: Iterator[bytes], hold: Hold, done: Callable[[bytes | Exception], None]):
        self._pieces = pieces
        self._hold = hold
        self._done = done
        self._parts: list[bytes] = []
        self._stride = _FIRST_STRIDE
        self._ahead = 0  # bytes that are held for what a thread unfolds
        self._cancelled = False

    def start(self, size: int) -> None:
        """Begin; ``size`` is the compressed body's."""
        if size <= _AT_ONCE:
            try:
                self._take(next(self._pieces, b""))
                following = next(self._pieces, None)
                if following is None:
                    self._done(self._parts[0])
                    return
                self._take(following)
            except IngotError as error:
                self._done(error)
                return
        self._go_on()

    def cancel(self) -> None:
        """Forget the request."""
        self._cancelled = True
        self._parts.clear()

    def _take(self, part: bytes) -> None:
        self._hold(len(part))
        self._parts.append(part)

    def _go_on(self) -> None:
        ahead = self._stride * compression.PIECE
        try:
            self._hold(ahead)
        except IngotError as refused:
            self.cancel()
            self._done(refused)
            return
        self._ahead = ahead
        future = asyncio.get_running_loop().run_in_executor(threads, self._next, self._stride)
        future.add_done_callback(self._unfolded)
        self._stride = min(2 * self._stride, _STRIDE)

    def _next(self, stride: int) -> bytes:
        return b"".join(itertools.islice(self._pieces, stride))

    def _unfolded(self, future: asyncio.Future[bytes]) -> None:
        if self._cancelled or future.cancelled():
            return
        error = future.exception()
        if isinstance(error, Exception):
            self._done(error)
            return
        part = future.result()
        try:
            self._hold(len(part) - self._ahead)  # never more, but the request may be over
        except IngotError as refused:
            self.cancel()
            self._done(refused)
            return
        if part:
            self._parts.append(part)
            self._go_on()
        else:
            whole = b"".join(self._parts)
            self._parts.clear()
            self._done(whole)


async def unfolded(pieces: Iterator[bytes], size: int, hold: Hold) -> bytes:
    """Return a whole body; :class:`Decompression` as a coroutine, which no longer unfolds when it is cancelled.

    Args:
        pieces: what :func:`ingot.server.compression.unfolded` yields.
        size: the compressed body's.
        hold: told how much more memory the request takes; raises an IngotError if that is too much.

    Raises:
        IngotError: the body is damaged or too large, or ``hold`` refused it.
    """
    future: asyncio.Future[bytes | Exception] = asyncio.get_running_loop().create_future()

    def done(body: bytes | Exception) -> None:
        if not future.done():  # else the task was cancelled in this very tick
            future.set_result(body)

    unfolding = Decompression(pieces, hold, done)
    unfolding.start(size)
    try:
        body = await future
    finally:
        unfolding.cancel()  # which does nothing unless this task is cancelled
    if isinstance(body, Exception):
        raise body
    return body


def compress(body: bytes, encoding: str, done: Callable[[bytes], None]) -> None:
    """Apply a ``Content-Encoding``, and call ``done`` with it: at once if the body is small, else in a later tick."""
    if len(body) <= _AT_ONCE:
        done(compression.compress(body, encoding))
        return
    future = asyncio.get_running_loop().run_in_executor(threads, compression.compress, body, encoding)
    future.add_done_callback(lambda future: done(future.result()))
