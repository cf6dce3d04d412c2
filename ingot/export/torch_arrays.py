"""Arrays to tensors and back, bfloat16 included."""

from __future__ import annotations

import torch

from ingot.errors import ExportError
from ingot.runtime.engines.torch_engine import from_torch as from_torch
from ingot.tensors import Array, DType


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array as a tensor.

    Raises:
        ExportError: the array holds text, for which PyTorch has no tensor.
    """
    dtype = DType.of(array)
    if dtype is DType.BYTES:
        raise ExportError("PyTorch has no text tensors; tokenize before the model")
    if dtype is DType.BF16:
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
