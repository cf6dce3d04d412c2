"""Operations on arrays for all packages: the raw wire form, ``.npz`` files, and relative differences."""

from __future__ import annotations

import math
import os
import stat
import struct
import sys
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ingot.errors import InvalidArgument, NotFound
from ingot.tensors.specs import Array, DType, foreign_format

_LITTLE = sys.byteorder == "little"
# Types of numbers whose memory is the raw form.
_RAW = frozenset(map(np.dtype, "?bBhHiIlLqQefd")) if _LITTLE else frozenset()
_LENGTH = struct.Struct("<I").unpack_from


def to_bytes(array: Array) -> bytes:
    """Return an array in the protocol's raw form: little-endian, row-major; BYTES elements length-prefixed."""
    if array.dtype in _RAW:
        return array.tobytes()
    if array.dtype.kind in "OSU":
        flat = array.reshape(-1)
        return b"".join(_prefixed(flat[start : start + TEXTS]) for start in range(0, flat.size, TEXTS))
    if not (_LITTLE and array.dtype.isnative):
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array.tobytes()


def as_bytes(contents: Sequence[bytes]) -> Array:
    """Return texts or files as a BYTES tensor."""
    found = np.empty(len(contents), object)
    found[:] = contents
    return found


def _prefixed(texts: Array) -> bytes:
    """Return the elements of a BYTES tensor with one dimension, each behind its length."""
    items = [item if isinstance(item, bytes) else str(item).encode() for item in texts.tolist()]
    parts = [b""] * (2 * len(items))
    parts[0::2] = np.array(list(map(len, items)), "<u4").view("V4").tolist()
    parts[1::2] = items
    return b"".join(parts)


MAX_RANK = 32
TEXTS = 1 << 14
"""Elements of a BYTES tensor that are converted at once, in a few milliseconds; other threads can run in between."""
# Most rows of a tensor without elements: it costs its sender nothing, and the server a batch for some of them.
_MAX_EMPTY = 1 << 16
_MAX_ELEMENTS = 1 << 48  # numpy counts sizes of zero as one here, and cannot create larger arrays even if empty


def check_shape(name: str, shape: object) -> tuple[int, ...]:
    """Return a shape sent by a client.

    Raises:
        InvalidArgument: it is not a list of sizes.
    """
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) > MAX_RANK:
        raise InvalidArgument(f"tensor '{name}' has no shape that is a list of at most {MAX_RANK} sizes")
    elements = 1
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 40:
            raise InvalidArgument(f"the shape of tensor '{name}' holds {size!r}, which is not a size")
        elements *= size or 1
    if elements > _MAX_ELEMENTS:
        raise InvalidArgument(f"the shape of tensor '{name}', {list(shape)}, is too large")
    if 0 in shape and elements > _MAX_EMPTY:
        raise InvalidArgument(
            f"tensor '{name}' has no elements, and its other sizes {list(shape)} are too large: their product may be "
            f"{_MAX_EMPTY}"
        )
    return tuple(shape)


def from_bytes(name: str, dtype: DType, shape: Sequence[int], raw: bytes | memoryview) -> Array:
    """Return the array in ``raw``, as a read-only view if the type allows it.

    Raises:
        InvalidArgument: the length of ``raw`` does not match ``dtype`` and ``shape``.
    """
    count = math.prod(shape)
    if dtype is DType.BYTES:
        return _unpack_bytes(name, count, raw).reshape(shape)
    expected = count * dtype.numpy.itemsize
    if len(raw) != expected:
        raise InvalidArgument(
            f"tensor '{name}' has {len(raw)} bytes of data, but {dtype.value} {list(shape)} takes {expected}"
        )
    if dtype is DType.BOOL and any(byte > 1 for byte in set(bytes(raw))):
        raise InvalidArgument(f"tensor '{name}' is BOOL but holds bytes other than 0 and 1")
    return np.frombuffer(raw, dtype=dtype.numpy).reshape(shape)


def _unpack_bytes(name: str, count: int, raw: bytes | memoryview) -> Array:
    # The client states the count: compare it with the size of the data before allocating memory.
    if count * 4 > len(raw):
        raise InvalidArgument(f"tensor '{name}' has {len(raw)} bytes of data, too few for {count} BYTES elements")
    content = bytes(raw)
    size, position = len(content), 0
    found: list[bytes] = []
    try:
        for _ in range(count):
            start = position + 4
            position = start + _LENGTH(content, position)[0]
            if position > size:
                break
            found.append(content[start:position])
    except struct.error:
        raise InvalidArgument(f"tensor '{name}' ends before BYTES element {len(found)} of {count}") from None
    if len(found) < count:
        raise InvalidArgument(f"BYTES element {len(found)} of tensor '{name}' runs past the end of the data")
    if position != size:
        raise InvalidArgument(f"tensor '{name}' has {size - position} bytes after its {count} BYTES elements")
    return as_bytes(found)


# Magnitude below which a tensor counts as zero, and relative errors are noise.
SCALE_FLOOR = 1e-2


def worst_error(expected: Mapping[str, Array], actual: Mapping[str, Array]) -> tuple[str, float]:
    """Return the output that differs most and its difference; see :func:`departure`."""
    errors = {name: departure(expected[name], actual[name]) for name in expected}
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst]


def departure(expected: Array, actual: Array, floor: float = SCALE_FLOOR) -> float:
    """Return the largest absolute difference relative to the largest expected magnitude.

    It is relative to the whole tensor, not to each element: an element that happens to be near zero says nothing about
    the numerics. A tensor of tiny values is compared with ``floor``. Different shapes, datatypes, NaNs or infinities,
    and any difference in integers or strings, are infinite.
    """
    if expected.shape != actual.shape or DType.of(expected) is not DType.of(actual):
        return np.inf
    if not DType.of(expected).is_float:
        return 0.0 if np.array_equal(expected, actual) else np.inf
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    finite = np.isfinite(left)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True) or not np.isfinite(right[finite]).all():
        return np.inf
    scale = max(float(np.abs(left[finite]).max(initial=0.0)), floor)
    return float(np.abs(left[finite] - right[finite]).max(initial=0.0)) / scale


def open_regular(path: str | Path, *, follow: bool = True) -> BinaryIO:
    """Open a regular file for reading. Devices, pipes and folders, which may block or never end, are refused.

    Args:
        path: the file.
        follow: whether it may be a symbolic link.

    Raises:
        OSError: it does not exist, is not a regular file, or may not be read.
    """
    # Without O_NONBLOCK, opening a pipe would block until another process opens it for writing.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError("it is not a regular file")


def not_an_array(path: str | Path, form: str, error: Exception) -> InvalidArgument:
    """Return the error for a file that numpy cannot read as ``.npy`` or ``.npz``.

    numpy takes any other file for a pickle, and names an option of numpy.load.
    """
    try:
        with open_regular(path) as file:
            kind = foreign_format(file.read(12))
    except OSError:
        kind = None
    if kind is not None and "image" in kind:
        return InvalidArgument(
            f"{path} is {kind}, not {form}: decode it, give it the shape and datatype of the model's input, and save "
            "that with numpy.save"
        )
    reason = "it has another format, or holds Python objects" if "pickle" in str(error) else str(error)
    return InvalidArgument(f"{path} is not {form}: {reason}")


def load_npz(path: str | Path) -> dict[str, Array]:
    """Read the arrays of an ``.npz`` file; pickled objects are refused.

    Raises:
        NotFound: there is no such file.
        InvalidArgument: it is not an ``.npz``, is encrypted, or holds Python objects or duplicate names.
    """
    try:
        with open_regular(path) as file:  # opened here, since numpy leaves a damaged file open
            loaded = np.load(file, allow_pickle=False)
            if not isinstance(loaded, np.lib.npyio.NpzFile):
                raise InvalidArgument(
                    f"{path} holds one array without a name; save it with numpy.savez(path, name=array)"
                )
            return {name: _native(array) for name, array in _members(loaded)}
    except FileNotFoundError:
        raise NotFound(f"there is no file {path}") from None
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError) as error:
        raise not_an_array(path, "an .npz file of plain arrays", error) from error


def _members(loaded: Any) -> Iterator[tuple[str, Array]]:
    seen: set[str] = set()
    for name in loaded.files:
        if name in seen:
            raise ValueError(f"it holds '{name}' twice")
        seen.add(name)
        array = loaded[name]
        if not isinstance(array, np.ndarray):  # numpy returns other files as bytes
            raise ValueError(f"'{name}' in it is not an .npy")
        yield name, array


def _native(array: Array) -> Array:
    """Return text as an object array of bytes, the form of BYTES tensors."""
    if array.dtype.kind not in "SU":
        return array
    items = [item if isinstance(item, bytes) else item.encode() for item in array.reshape(-1).tolist()]
    return as_bytes(items).reshape(array.shape)
