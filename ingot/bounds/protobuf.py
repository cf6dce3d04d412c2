"""Reading messages of protobuf without descriptions of their types.

A message (https://protobuf.dev/programming-guides/encoding) is a sequence of fields, each a tag with number and wire
type, and a value.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_TAG_BYTES, _MAX_VARINT_BYTES = 5, 10

Buffer = mmap.mmap | bytes
Span = tuple[int, int]
Value = int | Span | bytes


class DamagedError(Exception):
    """The file is not an encoded ONNX model, or too large to be analysed; the text says which."""


def fields(content: Buffer, span: Span) -> Iterator[tuple[int, Value]]:
    """Yield the number and value of each field, whose type is that on the wire.

    These are an integer, the place of a message, text or packed list, or the bytes of a floating-point number.

    Raises:
        DamagedError: the encoding is not one that protobuf's own parsers accept, or has groups, which ONNX does not.
    """
    at, end = span
    while at < end:
        tag, at = _varint(content, at, end, _MAX_TAG_BYTES)
        if not 8 <= tag < 1 << 32:  # field 0, or a tag over 32 bits
            raise _damaged(at)
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
            raise DamagedError(f"it has a field of wire type {kind} at byte {at}, which ONNX does not use")
        if at + size > end:
            raise _damaged(at)
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


def _varint(content: Buffer, at: int, end: int, limit: int = _MAX_VARINT_BYTES) -> tuple[int, int]:
    """Return an integer in base 128, lowest digit first, of at most ``limit`` bytes, and the position after it."""
    if at < end and (byte := content[at]) < 0x80:  # as most are
        return byte, at + 1
    value = shift = 0
    for position in range(at, min(end, at + limit)):
        byte = content[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position + 1
        shift += 7
    raise _damaged(at)


def _damaged(at: int) -> DamagedError:
    return DamagedError(f"its encoding is damaged at byte {at}")


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
