"""The built-in steps between models: parts of pictures, and turned ones, as uncompressed files, and rows of values."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ingot.config.pipelines import Node
from ingot.errors import TooLarge, missing_package
from ingot.report import units
from ingot.runtime.engines.python.torchserve.rows import Part, packed
from ingot.steps import Apply
from ingot.steps.images.image import Image
from ingot.tensors import Array
from ingot.tensors.arrays import as_bytes

# Bytes of the pictures that one node makes for one request: boxes may overlap, and models name many.
_MOST_BYTES = 256 << 20
# A part that is so many times as high as wide is turned, as its text runs from top to bottom.
_UPRIGHT = 1.5

Work = Callable[[Mapping[str, Array]], Array]
"""Returns a picture or a row for each item, BYTES[items], from the inputs of a step."""


def opened(node: Node, decode: Apply) -> Work:
    """Return the function of a step.

    Args:
        node: names the step.
        decode: that of :class:`~ingot.steps.images.image.Image` without operations.

    Raises:
        Unsupported: a package is missing.
    """
    if node.step == "row":
        return _rows
    if node.step == "rotate":
        turns = -node.degrees // 90
        return lambda values: _each(values, decode, lambda pixels, index: np.rot90(pixels, turns))
    if "box" in node.inputs:
        return lambda values: _each(values, decode, lambda pixels, index: _box(pixels, values["box"][index]))
    try:
        cv2: Any = importlib.import_module("cv2")  # by name: its types are those of other versions
    except ModuleNotFoundError as error:
        raise missing_package("opencv-python-headless", "cutting out polygons", "ocr") from error
    return lambda values: _each(values, decode, lambda pixels, index: _polygon(cv2, pixels, values["polygon"][index]))


def _rows(values: Mapping[str, Array]) -> Array:
    """Return the request to a handler of TorchServe that has the values of each item by their names."""
    items = zip(*(values[name].tolist() for name in values), strict=True)
    return as_bytes([packed([*map(Part, values, item)], {}) for item in items])


def _each(values: Mapping[str, Array], decode: Apply, work: Callable[[Array, int], Array]) -> Array:
    """Return a picture made of each item; a file that follows itself is decoded once.

    Raises:
        TooLarge: they have too many bytes.
        IngotError: a file cannot be decoded.
    """
    files = values["image"]
    found = np.empty(len(files), object)
    decoded, pixels, total = None, np.empty(0), 0
    for index, content in enumerate(files.tolist()):
        if content is not decoded:
            decoded, pixels = content, _pixels(files[index : index + 1], decode)
        found[index] = bitmap(work(pixels, index))
        total += len(found[index])
        if total > _MOST_BYTES:
            raise TooLarge(
                f"the first {index + 1} of {len(files)} parts of pictures have {units.size(total)}, over the limit of "
                f"{units.size(_MOST_BYTES)}; send fewer or smaller pictures"
            )
    return found


def _pixels(file: Array, decode: Apply) -> Array:
    """Return the pixels of a file, uint8[height, width, 3]."""
    pixels: Array = decode({DECODER.image: file})[DECODER.pixels][0].transpose(1, 2, 0)
    return pixels


DECODER = Image(operations=())
"""Decodes the files."""


def bitmap(pixels: Array) -> bytes:
    """Return pixels, uint8[height, width, 3] in RGB, as a BMP file."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)  # each row has a multiple of 4 bytes
    rows[:, : 3 * width] = pixels[:, :, ::-1].reshape(height, -1)
    # The sizes of the file and of both headers; a negative height is that of rows from the top.
    file = struct.pack("<2sIII", b"BM", 54 + rows.size, 0, 54)
    return file + struct.pack("<IiiHHIIiiII", 40, width, -height, 1, 24, 0, rows.size, 0, 0, 0, 0) + rows.tobytes()


def _box(pixels: Array, box: Array) -> Array:
    """Return the part within left, top, right and bottom, of 1 x 1 pixels or more."""
    height, width, _ = pixels.shape
    low = np.floor(np.nan_to_num(box[:2])).clip(0, (width - 1, height - 1)).astype(int)
    right, bottom = np.ceil(np.nan_to_num(box[2:])).clip(low + 1, (width, height)).astype(int)
    return pixels[low[1] : bottom, low[0] : right]


def _polygon(cv2: Any, pixels: Array, corners: Array) -> Array:
    """Return the part within four corners, clockwise from the top left, straightened as RapidOCR does it."""
    corners = corners.astype(np.float32)
    width = max(_length(corners[0], corners[1]), _length(corners[2], corners[3]))
    height = max(_length(corners[0], corners[3]), _length(corners[1], corners[2]))
    if 3 * width * height > _MOST_BYTES:
        raise TooLarge(f"a polygon has {width} x {height} pixels, over {units.size(_MOST_BYTES)}; check its corners")
    straight = np.array([[0, 0], [width, 0], [width, height], [0, height]], np.float32)
    matrix = cv2.getPerspectiveTransform(corners, straight)
    options = {"borderMode": cv2.BORDER_REPLICATE, "flags": cv2.INTER_CUBIC}
    part: Array = cv2.warpPerspective(np.ascontiguousarray(pixels), matrix, (width, height), **options)
    return np.rot90(part) if height / width >= _UPRIGHT else part


def _length(start: Array, end: Array) -> int:
    return max(1, int(np.linalg.norm(start - end)))
