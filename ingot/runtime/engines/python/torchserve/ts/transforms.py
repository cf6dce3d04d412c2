"""torchvision's transforms of the default handlers of pictures, for Pillow's, without torchvision."""

from __future__ import annotations

from typing import Any

from ingot.steps.images.presets import IMAGENET

RESIZED, SIZE = 256, 224
"""Pixels of the shorter side before the centre is cut out, and of the centre's sides."""


def to_tensor(picture: Any) -> Any:
    """Return a picture as ToTensor makes it: values from 0 to 1, float32[channels, height, width]."""
    import numpy as np
    import torch

    pixels = np.array(picture)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    values = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    return values.to(torch.float32).div(255) if values.dtype == torch.uint8 else values.to(torch.float32)


def imagenet(picture: Any) -> Any:
    """Return a picture as Resize(256), CenterCrop(224), ToTensor and Normalize make it, float32[3, 224, 224]."""
    import torch
    from PIL import Image

    width, height = picture.size
    long = int(RESIZED * max(width, height) / min(width, height))
    if min(width, height) != RESIZED:
        size = (RESIZED, long) if width <= height else (long, RESIZED)
        picture = picture.resize(size, Image.Resampling.BILINEAR)
    left, top = (round((side - SIZE) / 2.0) for side in picture.size)
    pixels = to_tensor(picture.crop((left, top, left + SIZE, top + SIZE)))
    mean, std = (torch.tensor(each)[:, None, None] for each in IMAGENET)
    return pixels.sub_(mean).div_(std)
