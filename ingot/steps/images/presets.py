"""The operations of timm's configurations, of torchvision's transforms, and of the usual classifier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.errors import InvalidArgument, Unsupported
from ingot.steps.images.operations import CenterCrop, Filter, Normalize, Operation, Rescale, Resize

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The division by 255 of torchvision's ToTensor: the same float32 for each of the 256 values.
_TO_UNIT = Rescale(factor=1 / 255)


def classifier(
    size: int | tuple[int, int],
    mean: Sequence[float] = IMAGENET[0],
    std: Sequence[float] = IMAGENET[1],
    *,
    resize: int | None = None,
    filter: Filter = "bilinear",  # noqa: A002 - as the operation calls it
) -> tuple[Operation, ...]:
    """Return the usual operations of a classifier, by hand.

    Args:
        size: of the model's input, in pixels: a side, or height and width.
        mean: of each channel, for values from 0 to 1.
        std: likewise.
        resize: the shorter side before the centre is cut out; by default the picture is stretched to ``size``.
        filter: of the resize.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if resize is None:
        return Resize(rule="exact", height=height, width=width, filter=filter), *_unit(mean, std)
    if resize < max(height, width):
        raise InvalidArgument(f"resize={resize} is smaller than the size {height} x {width} that is cut out")
    crop = CenterCrop(height=height, width=width, rounding="even")
    return Resize(rule="shortest_edge", edge=resize, filter=filter), crop, *_unit(mean, std)


def from_timm(config: Mapping[str, Any]) -> tuple[Operation, ...]:
    """Return the operations of ``timm.data.create_transform`` for a model's ``pretrained_cfg``.

    Raises:
        Unsupported: it crops in another way, or has another number of channels.
    """
    channels, height, width = config.get("input_size", (3, 224, 224))
    if channels != 3:
        raise Unsupported(f"the model reads pictures of {channels} channels; the steps make 3: send tensors")
    part = config.get("crop_pct") or 0.875
    name = config.get("interpolation") or "bicubic"
    filter_: Any = "bilinear" if name == "random" else name
    mode = config.get("crop_mode") or "center"
    before = int(height / part), int(width / part)
    if mode == "squash":
        resize = Resize(rule="exact", height=before[0], width=before[1], filter=filter_)
    elif mode == "center" and height == width:
        resize = Resize(rule="shortest_edge", edge=before[0], filter=filter_)
    else:
        raise Unsupported(f"timm's crop_mode '{mode}' for {height} x {width} is not known: declare the steps by hand")
    mean, std = config.get("mean", IMAGENET[0]), config.get("std", IMAGENET[1])
    return resize, CenterCrop(height=height, width=width, rounding="even"), *_unit(mean, std)


def from_torchvision(transforms: Any) -> tuple[Operation, ...]:
    """Return the operations of torchvision's transforms on a Pillow picture.

    Args:
        transforms: the ``transforms()`` of weights, or a ``Compose`` of Resize, CenterCrop, ToTensor, PILToTensor,
            ConvertImageDtype and Normalize. They are read by their attributes, without importing torchvision.

    Raises:
        Unsupported: one of them is another, or has an option that is not known.
    """
    if hasattr(transforms, "crop_size") and hasattr(transforms, "resize_size"):
        resize = Resize(**_torchvision_size(transforms.resize_size), filter=_torchvision_filter(transforms))
        [side] = transforms.crop_size
        crop = CenterCrop(height=side, width=side, rounding="even")
        return resize, crop, *_unit(transforms.mean, transforms.std)
    parts = getattr(transforms, "transforms", None)
    if parts is None:
        raise Unsupported(f"{type(transforms).__name__} is neither the transforms() of weights nor a Compose")
    return tuple(operation for part in parts for operation in torchvision_operations(part))


def torchvision_operations(part: Any) -> Iterator[Operation]:
    """Yield the operations of one transform, read by its class's name and its attributes.

    Raises:
        Unsupported: it is not one that :func:`from_torchvision` knows.
    """
    name = type(part).__name__
    if name == "Resize" and getattr(part, "max_size", None) is None:
        yield Resize(**_torchvision_size(part.size), filter=_torchvision_filter(part))
    elif name == "CenterCrop":
        height, width = (part.size, part.size) if isinstance(part.size, int) else part.size
        yield CenterCrop(height=height, width=width, rounding="even")
    elif name in ("ToTensor", "ConvertImageDtype"):
        yield _TO_UNIT
    elif name == "Normalize":
        yield _unit(part.mean, part.std)[1]
    elif name != "PILToTensor":
        raise Unsupported(f"torchvision's {part!r} is not known: declare the steps by hand")


def _torchvision_size(size: int | Sequence[int]) -> dict[str, Any]:
    sides = [size] if isinstance(size, int) else [*size]
    if len(sides) == 1:
        return {"rule": "shortest_edge", "edge": sides[0]}
    return {"rule": "exact", "height": sides[0], "width": sides[1]}


def _torchvision_filter(part: Any) -> Any:
    return getattr(part.interpolation, "value", part.interpolation)


def _unit(mean: Sequence[float], std: Sequence[float]) -> tuple[Operation, Normalize]:
    """Return the operations from bytes to values from 0 to 1, and to normalized ones."""
    return _TO_UNIT, Normalize.model_validate({"mean": tuple(mean), "std": tuple(std)})
