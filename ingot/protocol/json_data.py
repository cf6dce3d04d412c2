"""A tensor's data in JSON: lists to arrays and back, without rounding."""

from __future__ import annotations

import codecs
import functools
import itertools
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orjson

from ingot.errors import InvalidArgument
from ingot.tensors import Array, DType, arrays, foreign_format

# The struct module converts a short list several times faster than numpy, and refuses values that do not fit.
FORMATS = {
    DType.FP16: "e",
    DType.FP32: "f",
    DType.FP64: "d",
    DType.INT8: "b",
    DType.INT16: "h",
    DType.INT32: "i",
    DType.INT64: "q",
    DType.UINT8: "B",
    DType.UINT16: "H",
    DType.UINT32: "I",
    DType.UINT64: "Q",
}
# Values that are converted at once; other threads can run in between.
_CHUNK = 1 << 14
# Characters of texts that are converted at once.
_TEXT = 1 << 20
# The most lists in each other, as in Triton: more than any tensor has dimensions.
_MAX_DEPTH = 100
_NOT_A_NUMBER = re.compile(r"-?(?:NaN|nan|Infinity|inf)")
_NUMBERS = frozenset((int, float))
_INTEGERS = frozenset((int,))


def to_array(name: str, dtype: DType, shape: Sequence[int], data: object) -> Array:
    """Return JSON ``data``, nested or flat, as an array; no value is rounded or wrapped to fit an integer type.

    Raises:
        InvalidArgument: the number of values is not that of ``shape``, or one does not fit ``dtype``.
    """
    if not isinstance(data, list):
        raise InvalidArgument(f"the data of tensor '{name}' is not a list")
    values = _flat(name, data)
    if len(values) != math.prod(shape):
        raise InvalidArgument(
            f"tensor '{name}' has {len(values)} values, but shape {list(shape)} takes {math.prod(shape)}"
        )
    return cast(name, dtype, values).reshape(shape)


def from_json(name: str, dtype: DType, data: object) -> Array:
    """Return nested lists as an array of their shape; a single value is a scalar.

    Raises:
        InvalidArgument: the lists are ragged, or a value does not fit the datatype.
    """
    shape: list[int] = []
    level = data
    while isinstance(level, list) and len(shape) <= arrays.MAX_RANK:
        shape.append(len(level))
        level = level[0] if level else None
    array = to_array(name, dtype, shape, data if isinstance(data, list) else [data])
    if dtype.is_float and not np.isfinite(array).all():  # which Python's parser accepts, unlike the server's
        raise InvalidArgument(f"tensor '{name}' is {dtype.value}, but its data holds NaN or infinity")
    return array


def to_json(name: str, dtype: DType, array: Array) -> bytes:
    """Return an array's values as a flat JSON list.

    Raises:
        InvalidArgument: JSON cannot carry one: NaN, infinity, or text that is not UTF-8.
    """
    flat = array.ravel()
    if dtype is DType.BYTES:
        try:
            return _in_chunks(flat, _dump_texts)
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"tensor '{name}' holds bytes that are not UTF-8, which JSON cannot carry; ask for binary data"
            ) from error
    if dtype is DType.BF16:
        flat = flat.astype(np.float32)
    return _in_chunks(flat, functools.partial(_dump_numbers, name))


def _in_chunks(flat: Array, dump: Callable[[Array], bytes]) -> bytes:
    """Return the JSON list of an array's values, converted in chunks, between which other threads run."""
    if len(flat) <= _CHUNK:
        return dump(flat)
    chunks = [dump(flat[start : start + _CHUNK])[1:-1] for start in range(0, len(flat), _CHUNK)]
    chunks[0] = b"[" + chunks[0]
    chunks[-1] += b"]"
    return b",".join(chunks)  # which lets other threads run, unlike the formatting of bytes


def _dump_texts(flat: Array) -> bytes:
    texts = flat.tolist()
    if sum(map(len, texts)) <= _TEXT:
        return orjson.dumps([text if isinstance(text, str) else text.decode() for text in texts])
    listed = [piece for text in texts for piece in (b",", b'"', *_pieces(text), b'"')]
    return b"".join((b"[", *listed[1:], b"]"))


def _pieces(text: str | bytes) -> Iterator[bytes]:
    """Yield the JSON of a text in pieces, between which other threads run."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _TEXT):
        piece = text[start : start + _TEXT]
        yield orjson.dumps(piece if isinstance(piece, str) else decoder.decode(piece))[1:-1]
    decoder.decode(b"", final=True)  # raises if the last character is incomplete


def _dump_numbers(name: str, flat: Array) -> bytes:
    text = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY)
    if b"null" in text:  # which NaN and infinity become
        raise InvalidArgument(
            f"tensor '{name}' holds NaN or infinity, which JSON cannot carry; "
            "ask for it as binary data (parameters: binary_data true)"
        )
    return text


def _flat(name: str, data: list[Any]) -> list[Any]:
    """Return nested lists of equal lengths as one list."""
    for _ in range(_MAX_DEPTH):
        if not data or not isinstance(data[0], list):
            return data
        if len(data) == 1:
            data = data[0]
            continue
        length = len(data[0])
        if not all(isinstance(item, list) and len(item) == length for item in data):
            raise InvalidArgument(f"the data of tensor '{name}' is ragged: its lists have different lengths")
        data = list(itertools.chain.from_iterable(data))
    raise InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({_MAX_DEPTH}) in tensor '{name}'")


def cast(name: str, dtype: DType, values: list[Any]) -> Array:
    """Return a flat list as an array; no value is rounded or wrapped to fit an integer type.

    Raises:
        InvalidArgument: one does not fit ``dtype``.
    """
    # Types are checked before numpy is used: of numbers with one long text it would make an array of texts.
    kinds = set(map(type, values))
    code = FORMATS.get(dtype)
    if code is not None and kinds and kinds <= (_NUMBERS if code in "efd" else _INTEGERS):
        try:
            return _packed(dtype, code, values)
        except (struct.error, OverflowError):
            pass  # the checks below name the value that does not fit
    problem = f"tensor '{name}' is {dtype.value}, but its data"
    if dtype is DType.BYTES:
        if not kinds <= {str}:
            raise InvalidArgument(f"{problem} holds something other than text")
        items = np.empty(len(values), dtype=object)
        items[:] = [item.encode() for item in values]
        return items
    if dtype is DType.BOOL:
        if not (kinds <= {bool} or (kinds <= {bool, int} and set(values) <= {0, 1})):
            raise InvalidArgument(f"{problem} holds something other than true, false, 1 and 0")
        return np.array(values, dtype=np.bool_)
    if not kinds <= {int, float}:
        raise InvalidArgument(f"{problem} holds {'booleans' if bool in kinds else 'something other than numbers'}")
    if dtype.is_float:
        with np.errstate(over="ignore"):
            result = np.array(values, dtype=np.float64).astype(dtype.numpy)
        if not np.isfinite(result).all():
            raise InvalidArgument(f"{problem} holds a number out of its range")
        return result
    if float in kinds:
        found = next(value for value in values if type(value) is float)
        raise InvalidArgument(f"{problem} holds {found}; write whole numbers of at most 64 bits, without a point")
    bounds = np.iinfo(dtype.numpy)
    try:
        return np.array(values, dtype=dtype.numpy)  # exact, or an error: never wrapped
    except OverflowError:
        text = f"{problem} holds a number out of its range, {bounds.min} to {bounds.max}"
        raise InvalidArgument(text) from None


def _packed(dtype: DType, code: str, values: list[Any]) -> Array:
    count = len(values)
    if count <= _CHUNK:
        return np.frombuffer(struct.pack(f"={count}{code}", *values), dtype.numpy)
    parts = (values[start : start + _CHUNK] for start in range(0, count, _CHUNK))
    return np.frombuffer(b"".join(struct.pack(f"={len(part)}{code}", *part) for part in parts), dtype.numpy)


def problem(error: orjson.JSONDecodeError, start: bytes = b"") -> str:
    """Return why a text that begins so is not JSON; orjson speaks of surrogates where it is not text."""
    if (kind := foreign_format(start)) is not None:
        return f"it is {kind}"
    if "surrogates" in str(error):
        return "it is not UTF-8"
    if (value := _NOT_A_NUMBER.search(error.doc[max(0, error.pos - 1) : error.pos + 8])) is not None:
        place = str(error).partition(": ")[2]
        return f"JSON has no {value[0]} ({place}); send the tensor as binary data, or over gRPC"
    return str(error)
