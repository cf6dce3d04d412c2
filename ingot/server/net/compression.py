"""gzip and deflate, as HTTP's ``Content-Encoding`` and gRPC's compressed messages use them.

Small bodies are processed in the event loop, large ones in threads, so that other requests do not wait.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ingot.errors import IngotError, InvalidArgument
from ingot.protocol.requests import outcome_of
from ingot.server.net.limits import check_size

_WINDOW = {"gzip": 31, "deflate": 15}  # zlib's window bits: 16 more means a gzip header
ENCODINGS = frozenset(_WINDOW)
_MAX_MEMBERS = 64
_SLICE = 64 << 10
_PIECE = 64 << 10  # most bytes of output at once
# Bodies that are processed in the event loop, which takes some hundreds of microseconds.
_AT_ONCE = 64 << 10
# Pieces between two checks of the budget and of the client's presence: the first time and at most. Their memory is
# reserved in advance, so a body that decompresses to little must not reserve much.
_FIRST_STRIDE, _STRIDE = 2, 16

threads = ThreadPoolExecutor(2, "ingot-bodies")
"""Runs whatever takes long on bodies and messages: compression, and the decoding of large JSON."""

Hold = Callable[[int], None]
T = TypeVar("T")


async def run(work: Callable[[], T], *, in_thread: bool) -> T:
    """Return the result of work that the event loop does itself, or a thread if it takes long."""
    return await asyncio.get_running_loop().run_in_executor(threads, work) if in_thread else work()


def known(encoding: str) -> str:
    """Return the name of a ``Content-Encoding`` as :data:`ENCODINGS` has it; empty for an uncompressed body.

    Raises:
        InvalidArgument: the encoding is unknown.
    """
    name = encoding.strip().lower()
    name = "gzip" if name == "x-gzip" else name  # RFC 9110, 8.4.1.3
    if name in ("", "identity"):
        return ""
    if name not in _WINDOW:
        raise InvalidArgument(f"Content-Encoding '{name}' is not known; use gzip or deflate")
    return name


def wanted_encoding(accepted: str) -> str | None:
    """Return the encoding that a client asks for.

    Only ``Accept-Encoding`` with a single name counts, as tritonclient's ``response_compression_algorithm`` sends it.
    HTTP libraries send lists by default, and compressing tensors costs more time than nearly any network saves.
    """
    name, _, weight = accepted.lower().replace(" ", "").partition(";q=")
    refused = bool(weight) and not weight.strip("0.")  # q=0 excludes it
    return name if name in _WINDOW and "," not in weight and not refused else None


def decompressed(body: bytes, encoding: str, limit: int, members: int = _MAX_MEMBERS) -> Iterator[bytes]:
    """Yield the content of a compressed body, in pieces of at most 64 KiB, none of them empty.

    Args:
        body: one compressed stream, or several in a row, as gzip allows ("members").
        encoding: one of :data:`ENCODINGS`.
        limit: the most bytes that may come out.
        members: the most streams.

    Raises:
        InvalidArgument: the body is not of the encoding, cut off, or has more streams.
        TooLarge: the content exceeds the limit.
    """
    # Slices, as zlib copies the input that it leaves: of the whole body, that would be once for each member.
    view = memoryview(body)
    start = size = 0
    for _ in range(members):
        decoder = zlib.decompressobj(_WINDOW[encoding])
        while not decoder.eof:
            piece = view[start : start + _SLICE]
            if not piece:
                raise InvalidArgument(f"the {encoding} body is truncated")
            try:
                out = decoder.decompress(piece, min(_PIECE, limit + 1 - size))
            except zlib.error as error:
                raise InvalidArgument(f"the body is not valid {encoding}: {error}") from error
            start += len(piece) - len(decoder.unused_data) - len(decoder.unconsumed_tail)
            size += len(out)
            check_size(size, limit)
            if out:
                yield out
        if start == len(view):
            return
    raise InvalidArgument(f"the {encoding} body continues behind the end of stream {members}; send it as one stream")


class Decompression:
    """The decompression of one request body or gRPC message.

    Args:
        pieces: from :func:`decompressed`.
        hold: reserves memory for the request; raises an IngotError if that exceeds a limit.
        done: called once with the whole body or the error, unless the request is cancelled: by :meth:`start` if the
            body is small, else in a later tick of the event loop.
    """

    def __init__(self, pieces: Iterator[bytes], hold: Hold, done: Callable[[bytes | Exception], None]):
        self._pieces = pieces
        self._hold = hold
        self._done = done
        self._parts: list[bytes] = []
        self._stride = _FIRST_STRIDE
        self._ahead = 0  # bytes reserved for the output of a thread
        self._cancelled = False

    def start(self, size: int) -> None:
        """Begin; ``size`` is the compressed body's."""
        if size <= _AT_ONCE:
            try:
                self._add(next(self._pieces, b""))
                following = next(self._pieces, None)
                if following is None:
                    self._done(self._parts[0])
                    return
                self._add(following)
            except IngotError as error:
                self._done(error)
                return
        self._continue()

    def cancel(self) -> None:
        """Drop the request."""
        self._cancelled = True
        self._parts.clear()

    def _add(self, part: bytes) -> None:
        self._hold(len(part))
        self._parts.append(part)

    def _continue(self) -> None:
        ahead = self._stride * _PIECE
        try:
            self._hold(ahead)
        except IngotError as refused:
            self.cancel()
            self._done(refused)
            return
        self._ahead = ahead
        future = asyncio.get_running_loop().run_in_executor(threads, self._next, self._stride)
        future.add_done_callback(self._received)
        self._stride = min(2 * self._stride, _STRIDE)

    def _next(self, stride: int) -> bytes:
        return b"".join(itertools.islice(self._pieces, stride))

    def _received(self, future: asyncio.Future[bytes]) -> None:
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
            self._continue()
        else:
            whole = b"".join(self._parts)
            self._parts.clear()
            self._done(whole)


async def decompress(pieces: Iterator[bytes], size: int, hold: Hold) -> bytes:
    """Return a whole body; :class:`Decompression` as a coroutine, which stops when it is cancelled.

    Args:
        pieces: from :func:`decompressed`.
        size: the compressed body's.
        hold: reserves memory for the request; raises an IngotError if that exceeds a limit.

    Raises:
        IngotError: the body is damaged or too large, or ``hold`` refused it.
    """

    def begin(done: Callable[[bytes | Exception], None]) -> Decompression:
        work = Decompression(pieces, hold, done)
        work.start(size)
        return work

    return await outcome_of(begin)


def compress(body: bytes, encoding: str, done: Callable[[bytes], None]) -> None:
    """Apply a ``Content-Encoding`` and pass on the result: at once if the body is small, else in a later tick."""
    if len(body) <= _AT_ONCE:
        done(_compressed(body, encoding))
        return
    future = asyncio.get_running_loop().run_in_executor(threads, _compressed, body, encoding)
    future.add_done_callback(lambda future: done(future.result()))


def _compressed(body: bytes, encoding: str) -> bytes:
    encoder = zlib.compressobj(1, zlib.DEFLATED, _WINDOW[encoding])
    return encoder.compress(body) + encoder.flush()
