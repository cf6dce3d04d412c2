"""``image``: from the bytes of pictures to the values of their pixels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ingot.steps.images.decoding import Limits, decode, prepare
from ingot.steps.images.operations import Operation, Pipeline
from ingot.steps.item import Item, ItemStep

# Bytes that decoding needs for each pixel, with transparency that is put on white; and MiB of the process itself.
_PIXEL_BYTES = 24
_PROCESS_MB = 256


class Image(ItemStep):
    """Decode pictures, and apply operations to their pixels in order.

    Attributes:
        image: the input with the files, BYTES[n]: JPEG, PNG, WebP, GIF (the first frame), BMP or TIFF.
        pixels: the values, [n, 3, height, width]: float32, or uint8 if no operation rescales or normalizes.
        operations: in their order.
        limits: of what is decoded.
        reference: whose results the operations have, such as ``transformers 5.24.0 ViTImageProcessorPil``.
    """

    kind: Literal["image"] = "image"
    image: str = "image"
    pixels: str = "pixel_values"
    operations: tuple[Operation, ...] = Field((), max_length=32)
    limits: Limits = Limits()
    reference: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.image,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.pixels,)

    @property
    def memory_mb(self) -> int:
        return _PROCESS_MB + (self.limits.pixels * _PIXEL_BYTES >> 20)

    def item(self) -> Item:
        prepare()
        limits, pipeline = self.limits, Pipeline(self.operations, self.limits.resized_pixels)
        return lambda content: {self.pixels: pipeline.apply(decode(content, limits))}
