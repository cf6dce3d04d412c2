"""gRPC's messages in the bytes of a stream: each behind a flag and its length."""

from __future__ import annotations

from collections import deque

from ingot.errors import InvalidArgument, Unsupported
from ingot.server.compression import ENCODINGS, unfolded
from ingot.server.limits import check_size

PREFIX = 5


class Messages:
    """Puts the messages of one stream together from what arrives of them.

    Args:
        limit: the most bytes that a message may have.
    """

    __slots__ = ("_chunks", "_limit", "_size", "_wanted", "whole")

    def __init__(self, limit: int):
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._wanted = PREFIX
        self.whole: deque[tuple[bool, bytes]] = deque()

    @property
    def partial(self) -> int:
        """The bytes of a message that is not complete."""
        return self._size

    def feed(self, data: bytes) -> None:
        """Take bytes in; complete messages go to :attr:`whole`, each with whether it is compressed.

        Raises:
            TooLarge: a message is, or will be.
            InvalidArgument: a message's flag is unknown.
        """
        self._chunks.append(data)
        self._size += len(data)
        while self._size >= self._wanted:
            joined = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            if self._wanted == PREFIX and (stop := self._announced(joined)) > self._size:
                self._chunks = deque((joined,))
                self._wanted = stop
                return
            stop = PREFIX + int.from_bytes(joined[1:PREFIX])
            self.whole.append((joined[0] == 1, joined[PREFIX:stop]))
            rest = joined[stop:]
            self._chunks = deque((rest,)) if rest else deque()
            self._size = len(rest)
            self._wanted = PREFIX

    def _announced(self, data: bytes) -> int:
        size = int.from_bytes(data[1:PREFIX])
        check_size(size, self._limit)
        if data[0] > 1:
            raise InvalidArgument(f"a message begins with {data[0]}, where 0 is plain and 1 is compressed")
        return PREFIX + size


def decompressed(data: bytes, encoding: bytes, limit: int) -> bytes:
    """Return the message that ``data`` is, compressed.

    Raises:
        Unsupported: nobody knows the encoding.
        InvalidArgument: it is none, or damaged.
        TooLarge: the message has over ``limit`` bytes.
    """
    if encoding == b"identity":
        raise InvalidArgument("a message is compressed, but grpc-encoding names no compression")
    name = encoding.decode(errors="replace")
    if name not in ENCODINGS:
        raise Unsupported(f"grpc-encoding {name!r} is not understood; use gzip or deflate")
    return b"".join(unfolded(data, name, limit, members=1))
