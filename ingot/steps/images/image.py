"""``image``: from the bytes of pictures to the values of their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from ingot.errors import InvalidArgument, TooLarge
from ingot.steps.images.decoding import Limits, decode, prepare
from ingot.steps.images.operations import Operation, Pipeline, Quantize
from ingot.steps.item import Item, ItemStep
from ingot.steps.step import Values
from ingot.tensors import Array, Range, Signature

# Bytes that decoding needs for each pixel, with transparency that is put on white; and MiB of the process itself.
_PIXEL_BYTES = 24
_PROCESS_MB = 256


class Image(ItemStep):
    """Decode pictures, and apply operations to their pixels in order.

    Attributes:
        image: the input with the files, BYTES[n]: JPEG, PNG, WebP, GIF (the first frame), BMP or TIFF.
        pixels: the values, [n, 3, height, width]: float32, or uint8 if no operation rescales or normalizes; or the
            indices of colours, int64[n, height * width], of which each picture has as many.
        pixel_mask: 1 for each pixel that is not padding, int64[n, height, width]. With this name, pictures of several
            sizes are extended with zeros at the right and at the bottom, as DETR's processor does; without it they are
            refused.
        padded: the height and width that pictures are extended to; by default the largest of the request.
        size: the height and width of each picture before all operations, but upright, int64[n, 2].
        upright: whether pictures are turned as their EXIF data says.
        blends: whether transparent pixels are put on white; otherwise their own colours count, as in Pillow's
            ``convert("RGB")``.
        operations: in their order.
        limits: of what is decoded.
        reference: whose results the operations have, such as ``transformers 5.24.0 ViTImageProcessorPil``.
    """

    media_type: ClassVar[str] = "image/*"
    kind: Literal["image"] = "image"
    image: str = "image"
    pixels: str = "pixel_values"
    pixel_mask: str = ""
    padded: tuple[PositiveInt, PositiveInt] | None = None
    size: str = ""
    upright: bool = True
    blends: bool = True
    operations: tuple[Operation, ...] = Field((), max_length=32)
    limits: Limits = Limits()
    reference: str = ""

    @field_validator("operations")
    @classmethod
    def _colours_come_last(cls, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        if any(isinstance(each, Quantize) for each in operations[:-1]):
            raise ValueError("'quantize' must be the last operation, as it makes numbers of pixels")
        return operations

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.image,)

    @property
    def writes(self) -> tuple[str, ...]:
        return tuple(name for name in (self.pixels, self.pixel_mask, self.size) if name)

    @property
    def memory_mb(self) -> int:
        return _PROCESS_MB + (self.limits.pixels * _PIXEL_BYTES >> 20)

    def check_sides(self, pixels: Array, signature: Signature) -> None:
        """Check that the graph takes pictures of the size that the operations gave them.

        Args:
            pixels: the values, [n, 3, height, width].
            signature: the graph's signature.

        Raises:
            InvalidArgument: they are too small or too large.
        """
        spec = next((spec for spec in signature.inputs if spec.name == self.pixels), None)
        if spec is None or len(spec.shape) != 4 or pixels.ndim != 4:
            return
        ranges = [Range(side, side) if isinstance(side, int) else signature.range(side) for side in spec.shape[2:]]
        if all(size in sides for size, sides in zip(pixels.shape[2:], ranges, strict=True)):
            return
        height, width = pixels.shape[2:]
        raise InvalidArgument(
            f"a picture of input '{self.image}' has {width} x {height} pixels after the model's steps, and the model "
            f"takes a width of {_shown(ranges[1])} and a height of {_shown(ranges[0])}: send one of another size or "
            "aspect ratio"
        )

    def item(self) -> Item:
        prepare()
        read = partial(decode, limits=self.limits, upright=self.upright, blends=self.blends)
        pipeline = Pipeline(self.operations, self.limits.resized_pixels)

        def values(content: bytes) -> Values:
            picture = read(content)
            found = {self.pixels: pipeline.apply(picture)}
            return found | {self.size: np.array(picture.shape[:2])} if self.size else found

        return values

    def joined(self, found: Sequence[Values]) -> Values:
        if not self.pixel_mask:
            return super().joined(found)
        sizes = {self.size: np.stack([each[self.size] for each in found])} if self.size else {}
        return {**self._extended([each[self.pixels] for each in found]), **sizes}

    def _extended(self, rows: Sequence[Array]) -> Values:
        """Return pictures of one size, and what of it is not padding.

        Raises:
            InvalidArgument: a picture is larger than the declared size.
            TooLarge: together they have more pixels than one picture may have.
        """
        height, width = largest = max(row.shape[1] for row in rows), max(row.shape[2] for row in rows)
        if self.padded:
            height, width = self.padded
        if height < largest[0] or width < largest[1]:
            raise InvalidArgument(
                f"a picture of input '{self.image}' has {largest[1]} x {largest[0]} pixels after it was resized, more "
                f"than the {width} x {height} that the model's steps extend it to: send one of another aspect ratio"
            )
        if len(rows) * height * width > self.limits.pixels:
            raise TooLarge(
                f"the pictures of input '{self.image}' have {len(rows)} x {width} x {height} pixels once they have one "
                f"size; the most are {self.limits.pixels}: divide the request"
            )
        pixels = np.zeros((len(rows), 3, height, width), rows[0].dtype)
        mask = np.zeros((len(rows), height, width), np.int64)
        for index, row in enumerate(rows):
            place = slice(row.shape[1]), slice(row.shape[2])
            pixels[index, :, *place] = row
            mask[index, *place] = 1
        return {self.pixels: pixels, self.pixel_mask: mask}


def _shown(sides: Range) -> str:
    if sides.low == sides.high:
        return str(sides.low)
    ends = f"{sides.low} or more" if sides.high is None else f"{sides.low} to {sides.high}"
    return f"{ends} in multiples of {sides.step}" if sides.step > 1 else ends
