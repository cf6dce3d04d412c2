"""Planes of numbers at the size of a picture: resized as PyTorch does it, and written as PNG files."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from ingot.errors import TooLarge
from ingot.steps.step import Values
from ingot.tensors import Array

# Numbers of all planes of a request, once they have the sizes of its pictures: some seconds.
MOST_RESIZED = 1 << 31
# Pixels of a band.
_AT_ONCE = 1 << 16
# The coefficient of PyTorch's cubic convolution.
_CUBIC = np.float32(-0.75)
# Rows and columns of cells in which masks are compared, and bytes of one.
_CELLS = 4
_MOST_BYTES = 1 << 28
_PNG = b"\x89PNG\r\n\x1a\n"
_GREY = 8, 0, 0, 0, 0  # bits, and that a pixel is one byte of grey, without interlacing

Neighbours = tuple[tuple[Array, ...], tuple[Array, ...]]
"""The elements that each element of a resized axis is made of, and their weights."""


def check_resized(sizes: Array, planes: int, what: str) -> None:
    """Refuse a request whose planes would take too long to resize.

    Args:
        sizes: height and width of the pictures, int[n, 2].
        planes: those of each picture.
        what: they are, such as ``classes``.

    Raises:
        TooLarge: they would have over :data:`MOST_RESIZED` numbers.
    """
    if (total := int(sizes.prod(axis=1).sum()) * planes) > MOST_RESIZED:
        raise TooLarge(
            f"the pictures of the request have {total} pixels times {what}, over the limit of {MOST_RESIZED}; divide "
            "the request, or send smaller pictures"
        )


def bands(planes: Array, height: int, width: int) -> Iterator[tuple[slice, Iterator[Array]]]:
    """Yield bands of rows, each with its place and its planes, which are resized as PyTorch does.

    This is ``torch.nn.functional.interpolate(..., mode="bilinear")`` of float32[planes, h, w]. All resized planes at
    once would take hundreds of times the picture's memory, and one plane of a band fits the cache.
    """
    (places, weights), columns = linear(planes.shape[1], height), linear(planes.shape[2], width)
    step = max(1, _AT_ONCE // width)
    for start in range(0, height, step):
        band = slice(start, min(start + step, height))
        first, last = places[0][band][0], places[-1][band][-1] + 1
        near = mixed(planes[:, first:last], columns, 2)
        rows = tuple(place[band] - first for place in places), tuple(weight[band, None] for weight in weights)
        yield band, (mixed(plane, rows, 0) for plane in near)


def resized(planes: Array, height: int, width: int) -> Array:
    """Return float32[planes, height, width], resized as in :func:`bands`."""
    rows, columns = linear(planes.shape[1], height), linear(planes.shape[2], width)
    return mixed(mixed(planes, columns, 2), (rows[0], tuple(weight[:, None] for weight in rows[1])), 1)


def resized_cubic(plane: Array, height: int, width: int) -> Array:
    """Return ``torch.nn.functional.interpolate(..., mode="bicubic")`` of float32[h, w] as float32[height, width]."""
    (places, weights), near = _cubic(plane.shape[0], height), mixed(plane, _cubic(plane.shape[1], width), 1)
    found = np.empty((height, width), np.float32)
    step = max(1, _AT_ONCE // width)
    for start in range(0, height, step):
        band = slice(start, start + step)
        rows = tuple(place[band] for place in places), tuple(weight[band, None] for weight in weights)
        found[band] = mixed(near, rows, 0)
    return found


def resized_nearest(planes: Array, height: int, width: int) -> Array:
    """Return ``torch.nn.functional.interpolate(..., mode="nearest")`` of [planes, h, w] as [planes, height, width]."""
    rows, columns = (
        np.minimum(_scale(before, after) * np.arange(after, dtype=np.float32), before - 1).astype(np.intp)
        for before, after in zip(planes.shape[1:], (height, width), strict=True)
    )
    found: Array = planes[:, rows[:, None], columns]
    return found


def mixed(values: Array, neighbours: Neighbours, axis: int) -> Array:
    """Return the weighted sums of neighbours on an axis."""
    (first, *others), (weight, *weights) = neighbours
    found: Array = np.take(values, first, axis)
    found *= weight
    for place, weight in zip(others, weights, strict=True):
        part = np.take(values, place, axis)
        part *= weight
        found += part
    return found


def linear(before: int, after: int) -> Neighbours:
    """Return the two elements that each element of a resized axis lies between, and their weights."""
    place = np.maximum(_centres(before, after), 0)
    first = np.minimum(place.astype(np.intp), before - 1)
    part = np.clip(place - first.astype(np.float32), 0, 1)
    return (first, np.minimum(first + 1, before - 1)), (1 - part, part)


def _cubic(before: int, after: int) -> Neighbours:
    """Return the four elements around each element of a resized axis, and their weights."""
    place = _centres(before, after)
    floor = np.floor(place)
    part, first = place - floor, floor.astype(np.intp)
    weights = _outer(part + 1), _inner(part), _inner(1 - part), _outer(2 - part)
    return tuple(np.clip(first + offset, 0, before - 1) for offset in (-1, 0, 1, 2)), weights


def _inner(distance: Array) -> Array:
    weight: Array = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance * distance + 1
    return weight


def _outer(distance: Array) -> Array:
    weight: Array = ((_CUBIC * distance - 5 * _CUBIC) * distance + 8 * _CUBIC) * distance - 4 * _CUBIC
    return weight


def _centres(before: int, after: int) -> Array:
    """Return where the centres of the elements of a resized axis are on the axis before, float32[after]."""
    half = np.float32(0.5)
    return _scale(before, after) * (np.arange(after, dtype=np.float32) + half) - half


def _scale(before: int, after: int) -> np.float32:
    return np.float32(before) / np.float32(after)


def png(pixels: Array) -> bytes:
    """Return a PNG of one byte for each pixel, of uint8[height, width], or of bool, where true becomes 255."""
    height, width = pixels.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with the number of its filter
    rows[:, 1:] = pixels * np.uint8(255) if pixels.dtype == bool else pixels
    head = struct.pack(">2I5B", width, height, *_GREY)
    return _PNG + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)) + _chunk(b"IEND", b"")


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def shares_of(labels: Sequence[str], label: str, mask: str, answers: Values) -> Array:
    """Return the part of the pixels that each class has in each cell of a grid, float32[n, classes, 4, 4].

    Libraries compress the same pixels to other bytes, and rounding moves the border of a class by a pixel.

    Args:
        labels: the names of the classes.
        label: the name of the answer with labels.
        mask: the name of the answer with masks.
        answers: of steps.
    """
    names = {each.encode(): index for index, each in enumerate(labels)}
    shares = np.zeros((len(answers[mask]), len(names), _CELLS, _CELLS), np.float32)
    for place, file in np.ndenumerate(answers[mask]):
        if file and (index := names.get(bytes(answers[label].item(place)))) is not None:
            shares[place[0], index] += cells_of(file)
    return shares


def cells_of(file: bytes) -> Array:
    """Return the mean of the pixels, from 0 to 1, in each cell of a PNG that :func:`png` made; NaN for another file."""
    start = len(_PNG) + 8 + 13 + 4 + 8  # of the content of IDAT, behind IHDR
    shares = np.full((_CELLS, _CELLS), np.nan, np.float32)
    try:
        width, height = struct.unpack_from(">2I", file, 16)
        pixels = zlib.decompressobj().decompress(file[start:-16], min(height * (width + 1), _MOST_BYTES))
        rows = np.frombuffer(pixels, np.uint8).reshape(height, width + 1)[:, 1:]
    except (struct.error, zlib.error, ValueError):
        return shares
    for place, _ in np.ndenumerate(shares):
        bands = (
            slice(size * at // _CELLS, size * (at + 1) // _CELLS) for at, size in zip(place, rows.shape, strict=True)
        )
        cell = rows[*bands]
        shares[place] = cell.mean() / 255 if cell.size else 0
    return shares
