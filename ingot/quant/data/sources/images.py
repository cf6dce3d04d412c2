"""A folder of images as rows of a model's input, and its sub-folders as labels."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, missing_package
from ingot.quant.data.sources.collect import MAX_BYTES, Source
from ingot.quant.data.sources.items import LABELS
from ingot.quant.data.sources.transform import MAX_PIXELS, ImageTransform
from ingot.tensors import Array, DType, Signature, TensorSpec

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")


def find(folder: Path) -> list[Path]:
    """Return the images below a folder, in order of their paths."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return sorted(path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts))


def open_folder(signature: Signature, folder: Path, files: list[Path], transform: str | None, limit: int) -> Source:
    """Return images as rows of the model's one input.

    If all images are in sub-folders, these are the classes: the extra "labels" numbers them in sorted order, empty
    ones included. If there are more images than the limit, every n-th is read, so that all classes are among them.

    Raises:
        InvalidArgument: the model does not have exactly one input that is an image, or the transform does not fit it.
        Unsupported: Pillow is not installed.
    """
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package("pillow", f"reading the images in {folder}", "images") from error
    (spec,) = signature.inputs if len(signature.inputs) == 1 else (None,)
    if spec is None:
        names = ", ".join(item.name for item in signature.inputs)
        raise InvalidArgument(f"{folder} contains images, but the model has several inputs ({names}); use an .npz")
    steps = ImageTransform.parse(transform or "", spec, signature.batch)
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if any(path.parent == folder for path in files):
        classes = ()
    count = min(limit, len(files))
    if steps.crop is not None:
        values = steps.crop[0] * steps.crop[1] * (1 if steps.color == "gray" else 3)
        count = min(count, max(1, MAX_BYTES // (values * spec.dtype.numpy.itemsize)))
    notes: tuple[str, ...] = ()
    if count < len(files):
        notes = (f"{count} of the {len(files)} images were read, evenly spaced",)
        files = [files[index * len(files) // count] for index in range(count)]
    items = _rows(folder, files, classes, steps, spec, signature.batch is None and len(spec.shape) == 4)
    return Source(items, f" in {folder}", single=True, classes=classes, notes=notes)


def _rows(
    folder: Path, files: list[Path], classes: tuple[str, ...], steps: ImageTransform, spec: TensorSpec, nested: bool
) -> Iterator[tuple[str, Any]]:
    for path in files:
        image = decode(path, steps, spec.dtype)
        row: dict[str, Any] = {spec.name: image[None] if nested else image}
        if classes:
            row[LABELS] = np.int64(classes.index(path.relative_to(folder).parts[0]))
        yield f"the image {path}", row


def decode(path: Path, steps: ImageTransform, dtype: DType) -> Array:
    """Return one image as the model accepts it, [C, H, W] or [H, W, C].

    Raises:
        InvalidArgument: the file is damaged, has more than 8 bits per value, or would be scaled to a huge image.
    """
    from PIL import Image

    try:
        with (
            warnings.catch_warnings(action="ignore"),
            Image.open(path) as image,
        ):  # of damaged EXIF data, which is unused
            if image.mode.startswith(("I", "F")):
                raise InvalidArgument(f"the image {path} has more than 8 bits per value; convert it, or use an .npz")
            picture = image.convert("L" if steps.color == "gray" else "RGB")
        return _values(_fit(picture, steps, path), steps, dtype)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidArgument(f"the image {path} cannot be read: {error}; repair it or remove it") from error
    except MemoryError as error:
        raise InvalidArgument(f"there is not enough memory for the image {path}; remove it") from error


def _values(picture: object, steps: ImageTransform, dtype: DType) -> Array:
    values: Array = np.asarray(picture, np.float32)  # [H, W] or [H, W, 3]
    values = values[..., None] if values.ndim == 2 else values
    if steps.color == "bgr":
        values = values[..., ::-1]
    if dtype is DType.UINT8:
        values = values.astype(np.uint8)
    else:
        values = (values * np.float32(steps.scale) - np.array(steps.mean, np.float32)) / np.array(steps.std, np.float32)
        values = values.astype(dtype.numpy)
    return np.ascontiguousarray(values if steps.layout == "nhwc" else values.transpose(2, 0, 1))


def _fit(picture: Any, steps: ImageTransform, path: Path) -> Any:
    """Scale a picture and crop its center."""
    from PIL import Image

    width, height = picture.size
    if steps.resize is not None:
        target = steps.resize
    elif steps.crop is not None:  # the smallest size that covers the crop
        factor = max(steps.crop[0] / height, steps.crop[1] / width)
        target = (max(round(height * factor), steps.crop[0]), max(round(width * factor), steps.crop[1]))
    else:
        return picture
    if isinstance(target, int):  # as in torchvision: the shorter side, the longer one rounded down
        short = min(height, width)
        target = (target * height // short, target * width // short)
    if target != (height, width):
        # Pillow scales the width first. A line of pixels scaled to cover a square would fill the memory.
        if max(target[0], height) * target[1] > MAX_PIXELS:
            raise InvalidArgument(
                f"the image {path} of {width} x {height} pixels would be scaled to {target[1]} x {target[0]}, which "
                "is too large; remove it, or choose another resize"
            )
        methods = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
        methods |= {"nearest": Image.Resampling.NEAREST, "lanczos": Image.Resampling.LANCZOS}
        picture = picture.resize((target[1], target[0]), methods[steps.interpolation])
    if steps.crop is None:
        return picture
    top, left = (round((size - part) / 2) for size, part in zip(target, steps.crop, strict=True))
    return picture.crop((left, top, left + steps.crop[1], top + steps.crop[0]))  # black outside of the picture
