"""The model of digits on files of pictures, such as those that a person draws."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import torch
from torch import nn

from ingot.tensors import Array

INPUT = "pixel_values:float32[batch,3,8,8]"
SIZE = 8
_SCALE = 4  # the digits were scanned at 32 x 32; their values are counts in blocks of 4 x 4


class Pictures(nn.Module):
    """A model of grey images on the mean of three colours."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 10] for pixels [B, 3, 8, 8] from 0 to 1: white ink on black."""
        return self.model(pixel_values.mean(1, keepdim=True))  # type: ignore[no-any-return]


def files(images: Array) -> Array:
    """Return images [N, 1, 8, 8] from 0 to 1 as PNG files of 32 x 32 pixels, BYTES[N]."""
    from PIL import Image

    found = np.empty(len(images), object)
    for index, image in enumerate(np.rint(images[:, 0] * 255).astype(np.uint8)):
        file = BytesIO()
        Image.fromarray(image.repeat(_SCALE, 0).repeat(_SCALE, 1)).save(file, "PNG")
        found[index] = file.getvalue()
    return found
