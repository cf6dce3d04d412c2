"""The preprocessing of an image into a model's input, declared in one line of text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from ingot.errors import InvalidArgument
from ingot.tensors import Dim, DType, TensorSpec

Layout = Literal["nchw", "nhwc"]
Color = Literal["rgb", "bgr", "gray"]
Interpolation = Literal["bilinear", "bicubic", "nearest", "lanczos"]

_CHOICES = {
    "layout": ("nchw", "nhwc"),
    "color": ("rgb", "bgr", "gray"),
    "interpolation": ("bilinear", "bicubic", "nearest", "lanczos"),
}
MAX_PIXELS = 1 << 26
"""The largest number of pixels to scale an image to, or to crop: more are a mistake, and would fill the memory."""

_OPTIONS = ("resize", "crop", "mean", "std", "scale", *_CHOICES)


@dataclass(frozen=True)
class ImageTransform:
    """The preprocessing of an image, in this order: convert, resize, crop the center, scale, subtract, divide.

    It is written as ``resize=256,crop=224,mean=0.485/0.456/0.406,std=0.229/0.224/0.225``, each part optional.
    Missing parts come from the model's input: its height and width are the crop, its channels give the layout and the
    color. EXIF orientation is ignored and transparency dropped, as in torchvision.

    Attributes:
        resize: the shorter side (``256``), or height and width (``256x320``); by default the smallest size that covers
            the crop, with the proportions kept.
        crop: height and width of the center to keep (``224`` or ``224x320``); None keeps the whole.
        mean: subtracted; one number for all channels or one per channel, separated by ``/``; 0 by default.
        std: the divisor after that; 1 by default.
        scale: the factor for the values 0..255, applied before; ``1/255`` by default. A model with uint8 inputs gets
            the values unchanged.
        layout: ``nchw`` or ``nhwc``.
        color: ``rgb``, ``bgr`` or ``gray``.
        interpolation: ``bilinear``, ``bicubic``, ``nearest`` or ``lanczos``, as in Pillow.
    """

    resize: int | tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    scale: float = 1 / 255
    layout: Layout = "nchw"
    color: Color = "rgb"
    interpolation: Interpolation = "bilinear"

    @classmethod
    def parse(cls, text: str, spec: TensorSpec, batch: str | None = None) -> ImageTransform:
        """Return the transform that ``text`` declares for a model's input.

        Raises:
            InvalidArgument: the text is not of that form, or the input does not accept such images.
        """
        options = _split(text)
        shape = [dim for dim in spec.shape if batch is None or dim != batch]
        if batch is None and len(shape) == 4 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != 3 or not (spec.dtype.is_float or spec.dtype is DType.UINT8):
            raise InvalidArgument(
                f"the input {spec} does not accept images; it must be float or uint8 [batch,C,H,W]; use an .npz"
            )
        layout = cast(Layout, _choose(options, "layout", "nchw" if shape[0] in (1, 3) else "nhwc"))
        channels, *size = shape if layout == "nchw" else (shape[2], shape[0], shape[1])
        color = cast(Color, _choose(options, "color", "gray" if channels == 1 else "rgb"))
        if channels != (1 if color == "gray" else 3) and isinstance(channels, int):
            raise InvalidArgument(f"the input {spec} does not accept images of color={color} and layout={layout}")
        if spec.dtype is DType.UINT8 and options.keys() & {"mean", "std", "scale"}:
            raise InvalidArgument(f"the input {spec} expects unscaled values: leave out mean, std and scale")
        count = 1 if color == "gray" else 3
        return cls(
            resize=_resize(options),
            crop=_crop(options, size, spec),
            mean=_numbers(options, "mean", 0.0, count),
            std=_numbers(options, "std", 1.0, count),
            scale=_number("scale", options.get("scale", "1/255")),
            layout=layout,
            color=color,
            interpolation=cast(Interpolation, _choose(options, "interpolation", "bilinear")),
        )


def _split(text: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in _OPTIONS:
            raise InvalidArgument(f"'{part}' is not part of a transform; known: {', '.join(_OPTIONS)}, as in crop=224")
        if name in options:
            raise InvalidArgument(f"the transform contains {name} twice")
        options[name] = value
    return options


def _choose(options: Mapping[str, str], name: str, default: str) -> str:
    value = options.get(name, default).lower()
    if value not in _CHOICES[name]:
        raise InvalidArgument(f"{name}={value} of the transform is not known; known: {', '.join(_CHOICES[name])}")
    return value


def _sizes(name: str, text: str) -> tuple[int, ...]:
    parts = text.lower().split("x")
    if len(parts) > 2 or not all(part.isdecimal() and 0 < int(part) <= 1 << 16 for part in parts):
        raise InvalidArgument(f"{name}={text} of the transform is not a size; write {name}=224 or {name}=224x320")
    sizes = tuple(map(int, parts))
    if sizes[0] * sizes[-1] > MAX_PIXELS:
        raise InvalidArgument(f"{name}={text} of the transform is too large: at most {MAX_PIXELS} pixels are accepted")
    return sizes


def _resize(options: Mapping[str, str]) -> int | tuple[int, int] | None:
    if "resize" not in options:
        return None
    sizes = _sizes("resize", options["resize"])
    return (sizes[0], sizes[1]) if len(sizes) == 2 else sizes[0]


def _crop(options: Mapping[str, str], size: list[Dim], spec: TensorSpec) -> tuple[int, int] | None:
    if "crop" not in options:
        height, width = size
        if not isinstance(height, int) or not isinstance(width, int):
            return None
        if height * width > MAX_PIXELS:
            raise InvalidArgument(f"the input {spec} is too large for images; use an .npz")
        return height, width
    sizes = _sizes("crop", options["crop"])
    crop = (sizes[0], sizes[-1])
    if any(isinstance(have, int) and have != want for have, want in zip(size, crop, strict=True)):
        raise InvalidArgument(f"crop={options['crop']} of the transform does not fit the input {spec}")
    return crop


def _numbers(options: Mapping[str, str], name: str, default: float, count: int) -> tuple[float, ...]:
    if name not in options:
        return (default,)
    values = tuple(_number(name, part) for part in options[name].split("/"))
    if len(values) not in (1, count) or (name == "std" and 0 in values):
        raise InvalidArgument(
            f"{name}={options[name]} of the transform must be 1 or {count} numbers, as in 0.5/0.5/0.5"
        )
    return values


def _number(name: str, text: str) -> float:
    above, slash, below = text.partition("/")
    try:
        value = float(above) / (float(below) if slash else 1)
    except (ValueError, ZeroDivisionError):
        value = math.nan
    if not math.isfinite(value):
        raise InvalidArgument(f"{name}={text} of the transform is not a number; write it as 0.5 or 1/255")
    return value
