"""Records between two processes of a server, with tensors as raw bytes.

A record is its body's length (4 bytes, little-endian), its kind (1 byte) and the body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import orjson

from ingot.errors import CLASSES, EngineLost, HandlerFailed, IngotError, ModelFailed
from ingot.tensors import Array, DType

HEADER = struct.Struct("<IB")
NUMBER = struct.Struct("<Q")
INLINE = (1 << 64) - 1
"""The offset of data that follows in the record itself, and not in an arena."""

# The classes of errors, by their numbers in a record.
_ERRORS: tuple[type[IngotError], ...] = (*CLASSES.values(), EngineLost, ModelFailed, HandlerFailed)
_STATUS = struct.Struct("<H")


@dataclass
class TensorLayout:
    """The names, datatypes and shapes of some tensors."""

    tensors: tuple[tuple[str, DType, tuple[int, ...]], ...]

    @classmethod
    def of_arrays(cls, values: Mapping[str, Array]) -> TensorLayout:
        return cls(tuple((name, DType.of(array), array.shape) for name, array in values.items()))

    def encode(self) -> bytes:
        return orjson.dumps([[name, dtype.value, shape] for name, dtype, shape in self.tensors])

    @classmethod
    def decode(cls, raw: bytes) -> TensorLayout:
        return cls(tuple((name, DType(dtype), tuple(shape)) for name, dtype, shape in orjson.loads(raw)))


class Splitter:
    """Cuts a stream into records, without copying those that arrive in one piece.

    Args:
        most: the largest body in bytes.
    """

    def __init__(self, most: int):
        self._most = most
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = 0

    def feed(self, data: bytes) -> Iterator[tuple[int, memoryview]]:
        """Yield the kinds and bodies of the records that these bytes complete.

        Raises:
            ValueError: a record is too large.
        """
        if self._parts:
            self._parts.append(data)
            self._size += len(data)
            if self._size < self._needed:
                return
            data = b"".join(self._parts)
            self._parts = []
        view, at, end = memoryview(data), 0, len(data)
        needed = HEADER.size
        while end - at >= HEADER.size:
            size, kind = HEADER.unpack_from(data, at)
            if size > self._most:
                raise ValueError(f"a record of {size} bytes")
            needed = HEADER.size + size
            if end - at < needed:
                break
            yield kind, view[at + HEADER.size : at + needed]
            at += needed
            needed = HEADER.size
        if at < end:
            self._parts = [data[at:]]
            self._size, self._needed = end - at, needed


def encode_error(error: IngotError) -> bytes:
    """Encode an error: one byte for its class (or its code's class, if it has no number), its status, and its text."""
    kind = type(error) if type(error) in _ERRORS else CLASSES[error.code]
    status = _STATUS.pack(error.status if isinstance(error, HandlerFailed) else 0)
    return bytes([_ERRORS.index(kind)]) + status + str(error).encode()


def decode_error(body: memoryview) -> IngotError:
    """Decode an error of :func:`encode_error`."""
    kind, (status,) = _ERRORS[body[0]], _STATUS.unpack_from(body, 1)
    text = bytes(body[1 + _STATUS.size :]).decode(errors="replace")
    return HandlerFailed(text, status) if kind is HandlerFailed else kind(text)
