"""Pictures on which the steps of an export are proved: odd sizes, modes, orientations and transparency, as files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any

import numpy as np

_SIZES = ((64, 48), (37, 211), (500, 333), (225, 224), (1, 1), (7, 640), (223, 223), (97, 31), (256, 256), (301, 150))
_MODES = ("RGB", "L", "RGBA", "P", "CMYK", "LA", "1", "PA")
_ORIENTATION = 0x0112  # the tag of EXIF


def drawn(
    count: int,
    seed: int = 0,
    least: int = 1,
    sizes: Sequence[tuple[int, int]] = _SIZES,
    modes: Sequence[str] = _MODES,
) -> Iterator[bytes]:
    """Yield the files of ``count`` pictures, the same for each seed; their sides have at least ``least`` pixels."""
    random = np.random.default_rng(seed)
    for index in range(count):
        width, height = sizes[(index * 3 + index // len(sizes)) % len(sizes)]
        yield _file(random, (max(width, least), max(height, least)), modes[index % len(modes)], index % 9)


def _file(random: np.random.Generator, size: tuple[int, int], mode: str, orientation: int) -> bytes:
    from PIL import Image

    colours = random.integers(0, 256, (5, 6, 4), np.uint8)
    picture: Any = Image.fromarray(colours, "RGBA").resize(size, Image.Resampling.BICUBIC)  # smooth, with edges
    noise = Image.fromarray(random.integers(0, 256, (size[1], size[0], 4), np.uint8), "RGBA")
    picture = _converted(Image.blend(picture, noise, 0.2), mode)
    exif = Image.Exif()
    if orientation:
        exif[_ORIENTATION] = orientation
    kind = _kind(mode, orientation)
    file = BytesIO()
    options: dict[str, Any] = {"quality": 90} if kind in ("JPEG", "WEBP") else {}
    if kind in ("JPEG", "PNG", "WEBP", "TIFF"):
        options["exif"] = exif
    if kind == "PNG" and mode in ("P", "RGB", "L") and orientation % 2:
        options["transparency"] = {"P": 3, "L": 9, "RGB": picture.getpixel((0, 0))}[mode]
    picture.save(file, kind, **options)
    return file.getvalue()


def _converted(picture: Any, mode: str) -> Any:
    if mode == "P":
        return picture.convert("RGB").quantize(32)
    if mode == "PA":
        return picture.convert("RGB").quantize(16).convert("PA")
    return picture.convert(mode)


def _kind(mode: str, index: int) -> str:
    """Return a format that can store a mode."""
    kinds = {
        "RGB": ("JPEG", "PNG", "WEBP", "BMP", "TIFF"),
        "L": ("PNG", "JPEG", "TIFF", "GIF"),
        "RGBA": ("PNG", "WEBP", "TIFF"),
        "P": ("PNG", "GIF", "BMP"),
        "CMYK": ("JPEG", "TIFF"),
        "LA": ("PNG",),
        "1": ("PNG", "BMP", "TIFF"),
        "PA": ("TIFF",),
    }[mode]
    return kinds[index % len(kinds)]
