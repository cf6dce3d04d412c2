"""Operations on the pixels of a picture, as data: one class for each, with the arithmetic of its origin.

Arrays have the shape (height, width, 3). They hold bytes until a rescaling or normalization makes them float32; the
last operation may replace them by the indices of colours. ``apply`` refuses to make more than ``most`` pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from ingot.errors import InvalidArgument
from ingot.steps.images.opencv import opencv_linear
from ingot.steps.images.sizes import Multiple, Side, Target
from ingot.tensors import Array

_CHANNELS = 3
# Distances to colours that are computed at once: 8 MiB.
_DISTANCES = 1 << 20
# Pillow's numbers of filters, which processors store.
FILTERS = {"nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5}
Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming", "opencv_linear"]
Channels = tuple[FiniteFloat, FiniteFloat, FiniteFloat]
_Extent = Annotated[float, Field(gt=0, le=1 << 20, allow_inf_nan=False)]


class _Operation(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Resize(Target):
    """Resize with Pillow's filter, or as OpenCV's ``INTER_LINEAR``, to the size that ``rule`` computes."""

    operation: Literal["resize"] = "resize"
    filter: Filter = "bilinear"

    def apply(self, pixels: Array, most: int) -> Array:
        from PIL import Image

        before = pixels.shape[0], pixels.shape[1]
        height, width = self.of(before)
        if not 0 < height * width <= most:
            raise InvalidArgument(
                f"is {before[1]} x {before[0]} pixels, which the model's steps resize to {width} x {height}; the "
                f"size must be at least 1 x 1 and at most {most} pixels: send a picture that is less narrow"
            )
        if (height, width) == before:
            return pixels
        if self.filter == "opencv_linear":
            return opencv_linear(pixels, height, width)
        return np.asarray(Image.fromarray(pixels).resize((width, height), FILTERS[self.filter]))


class CenterCrop(_Operation):
    """Cut the centre out; a smaller picture is first extended with zeros on all sides.

    With ``relative``, the sizes are shares of the shorter side instead of pixels: Perceiver's rule. ``rounding`` is
    that of the first row and column: transformers rounds a half down and adds an odd pixel at the start, torchvision
    rounds it to even and adds the pixel at the end.
    """

    operation: Literal["center_crop"] = "center_crop"
    height: _Extent
    width: _Extent
    relative: bool = False
    rounding: Literal["floor", "even"] = "floor"

    def apply(self, pixels: Array, most: int) -> Array:
        unit = min(pixels.shape[:2]) if self.relative else 1
        wanted = int(self.height * unit), int(self.width * unit)
        if 0 in wanted:
            raise InvalidArgument(f"is {pixels.shape[1]} x {pixels.shape[0]} pixels, too small to be cropped")
        if wanted[0] * wanted[1] > most:
            raise InvalidArgument(f"is extended to {wanted[1]} x {wanted[0]} pixels; the most are {most}")
        for axis, size in enumerate(wanted):
            pixels = self._along(pixels, axis, size)
        return pixels

    def _along(self, pixels: Array, axis: int, size: int) -> Array:
        more = size - pixels.shape[axis]
        if more > 0:
            before = (more + 1) // 2 if self.rounding == "floor" else more // 2
            return _extended(pixels, axis, before, more - before)
        start = -more // 2 if self.rounding == "floor" else round(-more / 2)
        return pixels[start : start + size] if axis == 0 else pixels[:, start : start + size]


class Pad(_Operation):
    """Extend to ``height`` and ``width``, to these at least, to a square, or to the next multiples of ``multiple``.

    ``centered`` divides what is added between both sides, half of it, rounded down, at the start; otherwise it is
    all at the end. ``values`` are one for each channel, and ``mirrored`` repeats the picture's edge instead.
    ``beyond`` adds a multiple even to a size that is a multiple already: Swin2SR's rule.
    """

    operation: Literal["pad"] = "pad"
    to: Literal["size", "at_least", "square", "multiple"]
    height: Side = 0
    width: Side = 0
    multiple: Multiple = 1
    beyond: bool = False
    centered: bool = False
    mirrored: bool = False
    values: Channels = (0, 0, 0)

    def apply(self, pixels: Array, most: int) -> Array:
        height, width = pixels.shape[:2]
        if self.to == "square":
            wanted = (max(height, width),) * 2
        elif self.to == "multiple":
            wanted = self._next(height), self._next(width)
        elif self.to == "at_least":
            wanted = max(height, self.height), max(width, self.width)
        else:
            wanted = self.height, self.width
        if wanted[0] < height or wanted[1] < width:
            raise InvalidArgument(
                f"is {width} x {height} pixels after it was resized, more than the {wanted[1]} x {wanted[0]} that "
                "the model's steps extend it to: send a picture of another aspect ratio"
            )
        if wanted[0] * wanted[1] > most:
            raise InvalidArgument(f"is extended to {wanted[1]} x {wanted[0]} pixels; the most are {most}")
        for axis, size in enumerate(wanted):
            more = size - pixels.shape[axis]
            before = more // 2 if self.centered else 0
            pixels = _extended(pixels, axis, before, more - before, None if self.mirrored else self.values)
        return pixels

    def _next(self, size: int) -> int:
        return (size // self.multiple + 1 if self.beyond else -(-size // self.multiple)) * self.multiple


class Reverse(_Operation):
    """Reverse the order of the channels, from RGB to BGR."""

    operation: Literal["reverse"] = "reverse"

    def apply(self, pixels: Array, most: int) -> Array:
        return pixels[..., ::-1]


class Rescale(_Operation):
    """Multiply in float64, round to float32, and add ``offset``."""

    operation: Literal["rescale"] = "rescale"
    factor: FiniteFloat
    offset: FiniteFloat = 0

    def apply(self, pixels: Array, most: int) -> Array:
        scaled = (pixels.astype(np.float64) * self.factor).astype(np.float32)
        return scaled + np.float32(self.offset) if self.offset else scaled


class Normalize(_Operation):
    """Subtract the mean and divide by the deviation of each channel, in float32."""

    operation: Literal["normalize"] = "normalize"
    mean: Channels
    std: Channels

    @field_validator("std")
    @classmethod
    def _check_std(cls, std: Channels) -> Channels:
        if 0 in std:
            raise ValueError("the deviation of a channel is 0, by which nothing can be divided")
        return std

    def apply(self, pixels: Array, most: int) -> Array:
        values = pixels.astype(np.float32)
        normalized: Array = (values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return normalized


class Quantize(_Operation):
    """Replace each pixel by the index of the nearest of ``colours``, of several the first: ImageGPT's rule.

    Distances are squared, in float64. The result is int64[height * width]; no operation can follow.
    """

    operation: Literal["quantize"] = "quantize"
    colours: tuple[Channels, ...] = Field(min_length=1, max_length=1 << 12)

    def apply(self, pixels: Array, most: int) -> Array:
        values, colours = pixels.reshape(-1, _CHANNELS), np.array(self.colours).T
        colour = np.square(colours).sum(0)
        found = np.empty(len(values), np.int64)
        for start in range(0, len(values), step := max(1, _DISTANCES // colours.shape[1])):
            part = values[start : start + step]
            distances = np.square(part).sum(1)[:, None] - 2 * np.matmul(part, colours) + colour
            found[start : start + step] = distances.argmin(1)
        return found


Operation = Annotated[
    Resize | CenterCrop | Pad | Reverse | Rescale | Normalize | Quantize, Field(discriminator="operation")
]


class Pipeline:
    """Operations in their order, for any number of pictures at a time.

    Rescaling and normalizing bytes is one look-up in a table of the 256 values of each channel, which the operations
    themselves compute: the result is the same to the last bit.

    Args:
        operations: in their order.
        most: pixels of the largest picture that an operation may produce.
    """

    def __init__(self, operations: Sequence[Any], most: int):
        self._most = most
        self._parts = [[*group] for _, group in groupby(operations, lambda each: isinstance(each, Rescale | Normalize))]
        self._tables = {
            index: self._each(part, np.arange(256, dtype=np.uint8)[:, None].repeat(_CHANNELS, axis=1))
            for index, part in enumerate(self._parts)
            if isinstance(part[0], Rescale | Normalize)
        }

    def apply(self, pixels: Array) -> Array:
        """Return the values of a picture of bytes, in the shape (3, height, width), or its indices of colours.

        Raises:
            InvalidArgument: an operation cannot resize, crop or extend a picture of its size; the text completes
                "the picture ...".
        """
        for index, part in enumerate(self._parts):
            if index in self._tables and pixels.dtype == np.uint8:
                pixels = _looked_up(self._tables[index], pixels)
            else:
                pixels = self._each(part, pixels)
        return pixels if pixels.ndim == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def _each(self, part: Sequence[Any], pixels: Array) -> Array:
        for operation in part:
            pixels = operation.apply(pixels, self._most)
        return pixels


def _looked_up(table: Array, pixels: Array) -> Array:
    values = np.empty((_CHANNELS, *pixels.shape[:2]), table.dtype)  # the layout of the result, which is not copied then
    for channel in range(_CHANNELS):
        np.take(table[:, channel], pixels[..., channel], out=values[channel], mode="clip")
    return values.transpose(1, 2, 0)


def _extended(pixels: Array, axis: int, before: int, after: int, values: Channels | None = (0, 0, 0)) -> Array:
    """Return a picture with further rows or columns of one value for each channel; without values, mirrored ones."""
    if before == after == 0:
        return pixels
    if values is None:
        widths = [(before, after) if each == axis else (0, 0) for each in range(3)]
        return np.pad(pixels, widths, mode="symmetric")
    shape = [*pixels.shape]
    shape[axis] += before + after
    extended = np.empty(shape, pixels.dtype)
    extended[:] = np.array(values).astype(pixels.dtype)
    place = slice(before, before + pixels.shape[axis])
    extended[(place,) if axis == 0 else (slice(None), place)] = pixels
    return extended
