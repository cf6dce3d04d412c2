"""OpenCV's arithmetic on pixels, to the last bit, without OpenCV."""

from __future__ import annotations

import numpy as np

from ingot.tensors import Array

# A weight is a multiple of 1/2048; products are shifted as OpenCV's vector instructions do.
_WEIGHT = np.float32(2048)


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
    (left, right), (first, second) = _neighbours(columns, width, edges=False)
    mixed = (pixels[:, left] * first[:, None] + pixels[:, right] * second[:, None]) >> 4
    (above, below), (first, second) = _neighbours(rows, height, edges=True)
    upper, lower = mixed[above] * first[:, None, None] >> 16, mixed[below] * second[:, None, None] >> 16
    return _rounded(upper + lower)


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
