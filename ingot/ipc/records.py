"""Records between two processes of a server, with tensors as raw bytes.

A record is its body's length (4 bytes, little-endian), its kind (1 byte) and the body.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import orjson

from ingot.errors import CLASSES, EngineLost, IngotError
from ingot.tensors import Array, DType, arrays

HEADER = struct.Struct("<IB")
NUMBER = struct.Struct("<Q")
INLINE = (1 << 64) - 1
"""The offset of data that follows in the record itself, and not in an arena."""

_ALIGN = 64
# The classes of errors, by their numbers in a record.
_ERRORS: tuple[type[IngotError], ...] = (*CLASSES.values(), EngineLost)


@dataclass
class TensorLayout:
    """The names, datatypes and shapes of some tensors, and the offset of each in their joint data.

    ``size`` is the data's, in bytes; -1 for tensors with text, whose size depends on the values.
    """

    tensors: tuple[tuple[str, DType, tuple[int, ...], int], ...]  # the last is an offset
    size: int

    @classmethod
    def of(cls, tensors: Iterator[tuple[str, DType, tuple[int, ...]]]) -> TensorLayout:
        placed, end, text = [], 0, False
        for name, dtype, shape in tensors:
            placed.append((name, dtype, shape, end))
            text = text or dtype is DType.BYTES
            end += -(-prod(shape) * dtype.numpy.itemsize // _ALIGN) * _ALIGN
        return cls(tuple(placed), -1 if text else end)

    @classmethod
    def of_arrays(cls, values: Mapping[str, Array]) -> TensorLayout:
        return cls.of((name, DType.of(array), array.shape) for name, array in values.items())

    def dumps(self) -> bytes:
        return orjson.dumps([[name, dtype.value, shape] for name, dtype, shape, _ in self.tensors])

    @classmethod
    def loads(cls, raw: bytes) -> TensorLayout:
        return cls.of((name, DType(dtype), tuple(shape)) for name, dtype, shape in orjson.loads(raw))

    def write(self, values: Mapping[str, Array], place: Array) -> None:
        """Copy tensors into a block of bytes."""
        for name, dtype, shape, start in self.tensors:
            size = prod(shape) * dtype.numpy.itemsize
            np.copyto(place[start : start + size].view(dtype.numpy).reshape(shape), values[name])

    def dump(self, values: Mapping[str, Array]) -> list[bytes]:
        """Return tensors as bytes that :meth:`read` accepts when they are joined."""
        parts: list[bytes] = []
        for name, dtype, _, _ in self.tensors:
            if dtype is DType.BYTES:
                raw = arrays.to_bytes(values[name])
                parts += (NUMBER.pack(len(raw)), raw)
            else:
                parts.append(values[name].tobytes())
        return parts

    def read(self, data: memoryview) -> dict[str, Array]:
        """Return the tensors of :meth:`dump`, as views unless they are text."""
        values: dict[str, Array] = {}
        at = 0
        for name, dtype, shape, _ in self.tensors:
            if dtype is DType.BYTES:
                (size,) = NUMBER.unpack_from(data, at)
                at += NUMBER.size
                values[name] = arrays.from_bytes(name, dtype, shape, data[at : at + size])
            else:
                size = prod(shape) * dtype.numpy.itemsize
                values[name] = np.frombuffer(data[at : at + size], dtype.numpy).reshape(shape)
            at += size
        return values

    def map(self, place: Array) -> dict[str, Array]:
        """Return the tensors of :meth:`write`, as views on the block."""
        values: dict[str, Array] = {}
        for name, dtype, shape, start in self.tensors:
            size = prod(shape) * dtype.numpy.itemsize
            values[name] = place[start : start + size].view(dtype.numpy).reshape(shape)
        return values


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


def dump_error(error: IngotError) -> bytes:
    """Return an error's class, or that of its code, and its text as bytes."""
    kind = type(error) if type(error) in _ERRORS else CLASSES[error.code]
    return bytes([_ERRORS.index(kind)]) + str(error).encode()


def load_error(body: memoryview) -> IngotError:
    """Return the error of :func:`dump_error`."""
    return _ERRORS[body[0]](bytes(body[1:]).decode(errors="replace"))
