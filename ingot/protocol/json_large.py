"""Decodes large JSON in chunks, and never more values than the tensor's shape holds.

A Python object per value takes many times the memory of the text, and orjson keeps the interpreter lock until all are
parsed. Here the numbers are cut out of the text before the rest is parsed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from ingot.errors import InvalidArgument, TooLarge
from ingot.protocol import json_data
from ingot.tensors import Array, DType

AT_ONCE = 64 << 10
"""JSON, and binary tensors of text, of more bytes are decoded in a thread; shorter ones take a millisecond at most."""

# Bytes that are converted at once, for some 100 microseconds; other threads run in between.
_PIECE = 16 << 10
# Bytes that are searched at once.
_STEP = 1 << 20
# Most values of one text in addition to the numbers that were cut out. Each may take 64 bytes.
_MOST_VALUES = 1 << 20
_KEY = b'"data"'
_LIST = re.compile(rb"\s*:\s*(?=\[)")
_VALUE = re.compile(rb"[^][\s]")
# Replaces the first list that was cut out while the rest is parsed; the next numbers replace the others.
_FIRST_MARK = 123454321
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[],"))
_NO_BRACKETS = bytes.maketrans(b"[]", b"  ")
# Replaces all but brackets and commas by one character.
_SKELETON = bytes(code if code in b"[]," else ord("0") for code in range(256))


def is_slow(body: bytes, header_length: int | None, *, regions: bool) -> bool:
    """Return whether the event loop should not decode a body: it holds large JSON, or many elements of text.

    Args:
        body: the whole body.
        header_length: the JSON's length if raw buffers follow it; None for plain JSON.
        regions: whether inputs may be in shared memory.
    """
    size = len(body) if header_length is None else min(header_length, len(body))
    if size > AT_ONCE or (len(body) <= AT_ONCE and not regions):
        return size > AT_ONCE
    json = body[:size]
    if b"\\" in json:  # the words below may be written with escapes
        return True
    return b"BYTES" in json and (len(body) > AT_ONCE or b"shared_memory_region" in json)


class Numbers:
    """A list of numbers or truth values, which may be nested: a part of a text, from ``start`` to ``stop``."""

    def __init__(self, text: bytes, start: int, stop: int):
        self._text = text
        self._start = start
        self._stop = stop

    def to_array(self, name: str, dtype: DType, shape: Sequence[int]) -> Array:
        """Return the values as an array; see :func:`ingot.protocol.json_data.to_array`.

        Raises:
            InvalidArgument: the number of values is not that of ``shape``, or one does not fit ``dtype``.
        """
        size = math.prod(shape)
        count = self._count(b",") + (_VALUE.search(self._text, self._start, self._stop) is not None)
        if count != size and size:  # empty lists have commas without values
            raise InvalidArgument(f"tensor '{name}' has {count} values, but shape {list(shape)} takes {size}")
        lists = self._count(b"[")
        if size == 0:
            return self._otherwise(name, dtype, shape, count + lists)
        if lists == 1:
            structure = b"[%b]" % (b"," * (count - 1))
        elif count and lists == sum(itertools.accumulate(shape[:-1], int.__mul__, initial=1)):
            structure = _structure(shape)
        else:
            return self._otherwise(name, dtype, shape, count + lists)
        array = np.empty(size, object if dtype is DType.BYTES else dtype.numpy)
        filled = at = 0
        for piece in self._pieces():
            end = at + len(marks := piece.translate(None, _NO_STRUCTURE))
            if lists > 1 and _misplaced(piece):
                raise InvalidArgument(f"the data of tensor '{name}' is not valid JSON: a bracket is next to a number")
            if marks != structure[at:end]:
                return self._otherwise(name, dtype, shape, count + lists)
            at = end
            values = _parsed(name, piece.removesuffix(b",") if end < len(structure) else piece)
            array[filled : filled + len(values)] = json_data.cast(name, dtype, values)
            filled += len(values)
        if filled != size:
            raise InvalidArgument(f"tensor '{name}' has {filled} values, but shape {list(shape)} takes {size}")
        return array.reshape(shape)

    def _otherwise(self, name: str, dtype: DType, shape: Sequence[int], most: int) -> Array:
        """Decode data whose nesting does not match ``shape``."""
        if most > _MOST_VALUES:
            raise InvalidArgument(
                f"the data of tensor '{name}' does not have the nesting of its shape {list(shape)}; send it flat"
            )
        try:
            values = orjson.loads(self._text[self._start : self._stop])
        except orjson.JSONDecodeError as error:
            raise InvalidArgument(
                f"the data of tensor '{name}' is not valid JSON: {json_data.problem(error)}"
            ) from error
        return json_data.to_array(name, dtype, shape, values)

    def _count(self, mark: bytes) -> int:
        return _count(self._text, mark, self._start, self._stop)

    def _pieces(self) -> Iterator[bytes]:
        """Yield the text in pieces that end behind a comma."""
        start = self._start
        while start < self._stop:
            stop = self._text.find(b",", start + _PIECE, self._stop) + 1 or self._stop
            yield self._text[start:stop]
            start = stop


def loads(raw: bytes) -> Any:
    """Parse JSON as orjson does, but with :class:`Numbers` for the long lists of numbers in tensors' data.

    Raises:
        JSONDecodeError: the text is not JSON.
        TooLarge: the text has too many values.
    """
    lists = list(_long_lists(raw))
    if lists:
        rest = _without(raw, lists)
        check(rest)
        parsed = orjson.loads(rest)
        if _put_back(parsed, [Numbers(raw, *place) for place in lists]):
            return parsed
    check(raw)
    return orjson.loads(raw)


def _long_lists(raw: bytes) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each long list of numbers that seems to be a tensor's data."""
    at = 0
    while (key := raw.find(_KEY, at)) >= 0:
        at = key + len(_KEY)
        found = _LIST.match(raw, at)
        if found is None:
            continue
        # A list of numbers has neither quotation marks nor braces, so the next of them is behind it. The quotation mark
        # is searched first, as each key has one: the search for the brace then ends before the next key.
        start, end = found.end(), len(raw)
        for mark in (b'"', b"}"):
            behind = raw.find(mark, start, end)
            end = behind if behind >= 0 else end
        stop = raw.rfind(b"]", start, end) + 1
        # A list with other values ends later: it is parsed with the rest.
        if stop - start > _PIECE and _count(raw, b"[", start, stop) == _count(raw, b"]", start, stop):
            yield start, stop
            at = stop


def _count(text: bytes, mark: bytes, start: int, stop: int) -> int:
    """Count in steps, between which other threads run."""
    return sum(text.count(mark, at, min(at + _STEP, stop)) for at in range(start, stop, _STEP))


def _without(raw: bytes, lists: Sequence[tuple[int, int]]) -> bytes:
    """Return a text with marks in place of lists."""
    parts: list[bytes] = []
    done = 0
    for number, (start, stop) in enumerate(lists):
        parts += (raw[done:start], b"%d" % (_FIRST_MARK + number))
        done = stop
    return b"".join((*parts, raw[done:]))


def _put_back(parsed: object, lists: Sequence[Numbers]) -> bool:
    """Put lists in the places of their marks; return whether each was found once, as the data of an input."""
    inputs = parsed.get("inputs") if isinstance(parsed, dict) else None
    found = 0
    for item in inputs if isinstance(inputs, list) else ():
        value = item.get("data") if isinstance(item, dict) else None
        if type(value) is int and 0 <= value - _FIRST_MARK < len(lists):
            if value - _FIRST_MARK != found:
                return False
            item["data"] = lists[found]
            found += 1
    return found == len(lists)


def check(text: bytes) -> None:
    """Refuse JSON with too many values before they are parsed.

    Raises:
        TooLarge: the text has over a million.
    """
    if _separators(text) <= _MOST_VALUES:
        return
    # Most of the separators may be in strings.
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = plain.count(b'"') // 2
    if strings > _MOST_VALUES or _separators(b"".join(plain.split(b'"')[::2])) > _MOST_VALUES:
        raise TooLarge(
            f"the request's JSON has over {_MOST_VALUES:,} values that are decoded one by one, the limit of one "
            "request; send tensors as binary data to .../infer (parameters: binary_data_size)"
        )


def _separators(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


def _structure(shape: Sequence[int]) -> bytes:
    """Return the brackets and commas of nested lists of a shape with at least one dimension, and none of size 0."""
    text = b"[%b]" % (b"," * (shape[-1] - 1))
    for dim in reversed(shape[:-1]):
        text = b"[%b]" % ((text + b",") * dim)[:-1]
    return text


def _misplaced(piece: bytes) -> bool:
    """Return whether a bracket directly follows a number that it cannot follow, or precedes one."""
    skeleton = piece.translate(_SKELETON, b" \t\r\n")
    return b"0[" in skeleton or b"]0" in skeleton


def _parsed(name: str, piece: bytes) -> list[Any]:
    # Stripped: behind two blanks, orjson 3.13 exhausts the memory that it reserves for a list of short numbers.
    numbers = piece.translate(_NO_BRACKETS).strip(b" \t\r\n")
    try:
        values: list[Any] = orjson.loads(b"[%b]" % numbers)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the data of tensor '{name}' is not valid JSON: {json_data.problem(error)}") from error
    return values
