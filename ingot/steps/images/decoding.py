"""Pictures as bytes to pixels, by Pillow: limits are checked before anything is decoded."""

from __future__ import annotations

import importlib
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from ingot import foreign
from ingot.errors import InvalidArgument, TooLarge, missing_package
from ingot.steps.item import binary
from ingot.tensors import Array

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# Of the formats, and what Pillow would import while it decodes: a confined process cannot open files then.
_MODULES = ("Jpeg", "Mpo", "Png", "WebP", "Gif", "Bmp", "Tiff")
# How base64 of each format begins, which no file of a format does.
_BASE64 = (b"/9j/", b"iVBORw0KGgo", b"UklGR", b"R0lGOD", b"Qk", b"SUkq", b"TU0AKg")
_WHITE = (255, 255, 255, 255)
# Modes of more than 8 bits for each channel: Pillow would cut values above 255 to 255.
_DEEP = ("I", "F")


class Limits(BaseModel):
    """The most bytes and pixels of a picture that is sent, and the most pixels that resizing may make of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nbytes: int = Field(20 << 20, ge=1, le=1 << 30)
    pixels: int = Field(50_000_000, ge=1, le=1 << 29)
    resized_pixels: int = Field(10_000_000, ge=1, le=1 << 29)


def prepare() -> None:
    """Import what decoding needs.

    Raises:
        Unsupported: Pillow is not installed.
    """
    try:
        for name in (*(f"{each}ImagePlugin" for each in _MODULES), "ImageOps", "ImagePalette"):
            importlib.import_module(f"PIL.{name}")
        from PIL import Image

        Image.preinit()
    except ModuleNotFoundError as error:
        raise missing_package("pillow", "decoding pictures", "images") from error


def decode(content: bytes, limits: Limits, *, upright: bool = True, blends: bool = True) -> Array:
    """Return the pixels of a picture in RGB, of the shape (height, width, 3), ``upright`` as its EXIF data says.

    The file may be in base64. Transparent pixels are put on white, or with ``blends=False`` have their own colours. Of
    a file with several frames, the first is decoded.
    Call :func:`prepare` once before. The text of errors completes "the picture ...".

    Raises:
        InvalidArgument: it is not a picture in one of :data:`FORMATS`, is damaged, or has more than 8 bits for each
            channel.
        TooLarge: it has more bytes or pixels than the limits.
    """
    if len(content) > limits.nbytes:
        raise TooLarge(f"has {len(content)} bytes; the most are {limits.nbytes}: send a smaller one")
    picture = _opened(binary(content, _BASE64))
    width, height = picture.size
    if width * height > limits.pixels:
        raise TooLarge(f"is {width} x {height} pixels; the most are {limits.pixels}: send a smaller one")
    if picture.mode.startswith(_DEEP):
        raise InvalidArgument(
            f"has the mode {picture.mode}, of more than 8 bits for each channel, of which Pillow would cut all above "
            "255: send it with 8 bits for each channel"
        )
    with foreign.reported_as(InvalidArgument, f"is a damaged or truncated {picture.format}", keep=MemoryError):
        from PIL import ImageOps

        picture.load()
        turned = ImageOps.exif_transpose(picture) if upright else picture
        return np.asarray(_on_white(turned) if blends else turned.convert("RGB"))


def _opened(content: bytes) -> Image:
    from PIL import Image, UnidentifiedImageError

    found = foreign.outcome(lambda: Image.open(BytesIO(content), formats=FORMATS))
    if isinstance(found, Image.DecompressionBombError | Image.DecompressionBombWarning):
        raise TooLarge(f"has too many pixels ({foreign.one_line(found)}): send a smaller one")
    if isinstance(found, UnidentifiedImageError):
        names = ", ".join(FORMATS[:-1])
        raise InvalidArgument(f"is not a {names} or {FORMATS[-1]} file; its first bytes are {content[:8]!r}")
    if isinstance(found, Exception):
        raise InvalidArgument(f"cannot be read: {foreign.typed(found)}") from found
    return found


def _on_white(picture: Image) -> Image:
    """Return a picture in RGB, as transformers 5.24 converts it."""
    if "A" not in picture.getbands() and picture.info.get("transparency") is None:
        return picture.convert("RGB")
    from PIL import Image

    opaque = Image.new("RGBA", picture.size, _WHITE)
    return Image.alpha_composite(opaque, picture.convert("RGBA")).convert("RGB")
