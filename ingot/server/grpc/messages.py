"""The framing of gRPC messages: each follows a flag and its length."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from ingot.errors import InvalidArgument, Unsupported
from ingot.server.net.compression import ENCODINGS, decompressed
from ingot.server.net.limits import check_size

PREFIX: Final = 5
# Chunks below this size together are joined: a client may send single bytes, and each chunk needs about 50 bytes.
_SMALL = 1024


class Messages:
    """Collects the chunks of one stream, and joins those of a message when it is taken.

    Args:
        limit: the most bytes of a message.
    """

    __slots__ = ("_at", "_chunks", "_limit", "_wanted", "size", "taken")

    def __init__(self, limit: int):
        self._limit = limit
        self._chunks: deque[bytes] = deque()
        self._at = 0  # offset of the first message in the first chunk
        self._wanted = 0  # its size with its prefix; 0 until it is known
        self.size = 0
        self.taken = 0  # messages

    @property
    def begun(self) -> bool:
        """Whether a part of the first message has arrived."""
        return self.size > 0 and not 0 < self._wanted <= self.size

    @property
    def more(self) -> bool:
        """Whether bytes follow the first message, which must be complete."""
        return (self.taken > 0 and self.size > 0) or 0 < self._wanted < self.size

    def feed(self, data: bytes) -> bool:
        """Add bytes, and return whether a message is complete; :attr:`size` counts the bytes not taken yet.

        Raises:
            TooLarge: a message exceeds the limit, or its prefix announces that it will.
            InvalidArgument: a message's flag is unknown.
        """
        self.size += len(data)
        if self._chunks and len(self._chunks[-1]) + len(data) <= _SMALL:
            self._chunks[-1] += data
        elif data:
            self._chunks.append(data)
        return self.ready()

    def ready(self) -> bool:
        """Return whether a message is complete.

        Raises:
            TooLarge: the first message exceeds the limit.
            InvalidArgument: its flag is unknown.
        """
        if not self._wanted and self.size >= PREFIX:
            prefix = self._peek()
            size = int.from_bytes(prefix[1:])
            check_size(size, self._limit)
            if prefix[0] > 1:
                raise InvalidArgument(f"a message begins with {prefix[0]}, where 0 is plain and 1 is compressed")
            self._wanted = PREFIX + size
        return 0 < self._wanted <= self.size

    def take(self) -> tuple[bool, bytes]:
        """Return the first message, which must be complete, and whether it is compressed."""
        flag = self._cut(PREFIX)[0]
        message = self._cut(self._wanted - PREFIX)
        self._wanted = 0
        self.taken += 1
        return flag == 1, message

    def _peek(self) -> bytes:
        prefix = self._chunks[0][self._at : self._at + PREFIX]
        for index in range(1, len(self._chunks)):
            if len(prefix) == PREFIX:
                break
            prefix += self._chunks[index][: PREFIX - len(prefix)]
        return prefix

    def _cut(self, size: int) -> bytes:
        """Remove and return the first ``size`` bytes, which must have arrived."""
        self.size -= size
        parts: list[bytes] = []
        while size:
            first = self._chunks[0]
            part = first[self._at : self._at + size]
            self._at += len(part)
            size -= len(part)
            parts.append(part)
            if self._at == len(first):
                self._chunks.popleft()
                self._at = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)


def pieces(data: bytes, encoding: bytes, limit: int) -> Iterator[bytes]:
    """Return the pieces of a compressed message: see :func:`ingot.server.net.compression.decompressed`.

    Raises:
        Unsupported: the encoding is unknown.
        InvalidArgument: the message is not in that encoding.
    """
    if encoding == b"identity":
        raise InvalidArgument("a message is compressed, but grpc-encoding names no compression")
    name = encoding.decode(errors="replace")
    if name not in ENCODINGS:
        raise Unsupported(f"grpc-encoding {name!r} is not supported; use gzip or deflate")
    return decompressed(data, name, limit, members=1)
