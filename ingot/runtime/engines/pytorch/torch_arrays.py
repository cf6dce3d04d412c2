"""Arrays as tensors of PyTorch, and back."""

from __future__ import annotations

import numpy as np
import torch

from ingot.errors import InvalidArgument
from ingot.tensors import Array, DType, TensorSpec


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return PyTorch's name of a type of numbers."""
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found


def to_torch(spec: TensorSpec, array: Array) -> torch.Tensor:
    """Return an array as a tensor, which shares its memory if that is writable and aligned."""
    if spec.dtype is DType.BYTES:
        raise InvalidArgument(f"input '{spec.name}' is text, which PyTorch tensors cannot hold")
    array = np.require(array, requirements=("C", "A", "W"))
    if spec.dtype is DType.BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def from_torch(tensor: torch.Tensor) -> Array:
    """Return a tensor as an array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DType.BF16.numpy)
    return tensor.numpy()
