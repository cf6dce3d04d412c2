"""Reading messages of protobuf without descriptions of their types.

A message (https://protobuf.dev/programming-guides/encoding) is a sequence of fields, each a tag with number and wire
type, and a value.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Buffer = mmap.mmap | bytes
Span = tuple[int, int]
Value = int | Span | bytes


class DamagedError(Exception):
    """The file is not an encoded ONNX model, or too large to be analysed; the text says which."""


def fields(content: Buffer, span: Span) -> Iterator[tuple[int, Value]]:
    """Yield the number and value of each field, whose type is that on the wire.

    These are an integer, the place of a message, text or packed list, or the bytes of a floating-point number.
    """
    at, end = span
    while at < end:
        tag, at = _varint(content, at, end)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(content, at, end)
            yield tag >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(content, at, end)
        elif kind in (_FIXED32, _FIXED64):
            size = 4 if kind == _FIXED32 else 8
        else:
            raise DamagedError("its encoding is damaged")
        if at + size > end or tag >> 32:
            raise DamagedError("its encoding is damaged")
        yield tag >> 3, (at, at + size) if kind == _BYTES else content[at : at + size]
        at += size


def integers(content: Buffer, value: Value) -> list[int]:
    """Return the integers of one field of a list, packed or not."""
    if isinstance(value, bytes):
        return []
    return [signed(value)] if isinstance(value, int) else list(map(signed, _varints(content, value)))


def _varints(content: Buffer, span: Span) -> Iterator[int]:
    at, end = span
    while at < end:
        value, at = _varint(content, at, end)
        yield value


def _varint(content: Buffer, at: int, end: int) -> tuple[int, int]:
    if at < end and (byte := content[at]) < 0x80:  # as most are
        return byte, at + 1
    value = shift = 0
    while at < end and shift < 70:
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise DamagedError("its encoding is damaged")


def signed(value: int) -> int:
    """Return the signed number that an unsigned one of 64 bits encodes."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def messages(content: Buffer, span: Span) -> Iterator[tuple[int, Span]]:
    """Yield the number and the bytes of each message, text or packed list of a message."""
    for number, value in fields(content, span):
        if isinstance(value, tuple):
            yield number, value


def text(content: Buffer, span: Span) -> str:
    """Return a text. Bytes that are not UTF-8 are kept, so that distinct names stay distinct."""
    return content[span[0] : span[1]].decode("utf-8", "surrogateescape")
