"""OpenCV's arithmetic on pixels, to the last bit, without OpenCV."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ingot.tensors import Array

# A weight is a multiple of 1/2048; products are shifted as OpenCV's vector instructions do.
_WEIGHT = np.float32(2048)
# Pixels of a band.
_AT_ONCE = 1 << 14


def opencv_linear(pixels: Array, height: int, width: int) -> Array:
    """Resize as ``cv2.resize`` does with its default, ``INTER_LINEAR``, as of OpenCV 5.0.

    Args:
        pixels: uint8[rows, columns, channels].
        height: of the result, 1 or more.
        width: likewise.
    """
    rows, columns = pixels.shape[:2]
    if (rows, columns) == (2 * height, 2 * width):  # OpenCV takes the mean of four
        halves = pixels[::2].astype(np.int32) + pixels[1::2]
        return _rounded(halves[:, ::2] + halves[:, 1::2])
    places, weights = _neighbours(columns, width, edges=False)
    near = np.empty((rows, width, pixels.shape[2]), np.int32)
    for band in _bands(rows, width):
        near[band] = _mixed(pixels[band], places, weights[..., None], 1, 0) >> 4
    places, weights = _neighbours(rows, height, edges=True)
    found = np.empty((height, *near.shape[1:]), np.uint8)
    for band in _bands(height, width):
        found[band] = _rounded(_mixed(near, places[:, band], weights[:, band, None, None], 0, 16))
    return found


def _bands(rows: int, width: int) -> Iterator[slice]:
    """Yield slices of rows, whose temporary arrays fit the cache."""
    step = max(1, _AT_ONCE // width)
    yield from (slice(start, start + step) for start in range(0, rows, step))


def _mixed(pixels: Array, places: Array, weights: Array, axis: int, shift: int) -> Array:
    """Return the sum of two neighbours on an axis, each times its weight and shifted."""
    total: Array
    other: Array
    total, other = (np.take(pixels, place, axis) * weight for place, weight in zip(places, weights, strict=True))
    total >>= shift
    other >>= shift
    total += other
    return total


def _rounded(quarters: Array) -> Array:
    rounded: Array = ((quarters + 2) >> 2).astype(np.uint8)
    return rounded


def _neighbours(before: int, after: int, *, edges: bool) -> tuple[Array, Array]:
    """Return the two elements that each element of a resized axis lies between, and their weights, each [2, after].

    Args:
        before: elements of the axis.
        after: elements that it gets.
        edges: whether places beyond the first and last element have the weights of two elements, which are the same.
    """
    scale = 1 / (after / before)
    place = ((np.arange(after) + 0.5) * scale - 0.5).astype(np.float32)
    low = np.floor(place)
    part, first = place - low, low.astype(np.intp)
    if not edges:
        part[(first < 0) | (first >= before - 1)] = 0
    weights = np.rint(np.stack([1 - part, part]) * _WEIGHT).astype(np.int32)
    return np.stack([first, first + 1]).clip(0, before - 1), weights
