"""A device for PyTorch with numpy arrays as memory: importing this module registers it as the ``PrivateUse1`` backend.

Only the operators of the test's model are implemented.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils import backend_registration

from ingot.errors import Unsupported
from ingot.tensors import Array

_Function = TypeVar("_Function", bound=Callable[..., Any])

backend_registration._setup_privateuseone_for_python_backend("paper")

calls: list[str] = []
"""The operators that the device has run."""


class PaperTensor(torch.Tensor):
    """A tensor on the device; ``data_`` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    data_: Array

    @staticmethod
    def __new__(cls, data: Array) -> PaperTensor:
        made: Any = torch._C._acc.create_empty_tensor(data.shape, torch.from_numpy(data).dtype)
        made.__class__ = cls
        return made  # type: ignore[no-any-return]

    def __init__(self, data: Array):
        self.data_ = data


def _implements(operator: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        torch.library.impl(f"aten::{operator}", "privateuseone", function)
        return function

    return register


@_implements("empty_strided")
def _empty_strided(size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, **_: Any) -> PaperTensor:
    return PaperTensor(torch.empty(size, dtype=dtype).numpy())


@_implements("_copy_from")
def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    data = _values(source)
    if isinstance(target, PaperTensor):
        target.data_ = np.array(data)
    else:
        target.copy_(torch.from_numpy(data))
    return target


@_implements("detach")
def _detach(tensor: PaperTensor) -> PaperTensor:
    return PaperTensor(tensor.data_)


@_implements("mul.Tensor")
def _multiply(one: torch.Tensor, other: torch.Tensor) -> PaperTensor:
    calls.append("mul")
    return PaperTensor(_values(one) * _values(other))


@_implements("add.Tensor")
def _add(one: torch.Tensor, other: torch.Tensor, alpha: float = 1) -> PaperTensor:
    calls.append("add")
    return PaperTensor(_values(one) + alpha * _values(other))


def _values(tensor: Any) -> Array:
    if isinstance(tensor, PaperTensor):
        return tensor.data_
    return tensor.detach().numpy()  # type: ignore[no-any-return]


def open_paper(index: int) -> object:
    """Refuse to be used without PyTorch."""
    raise Unsupported("only PyTorch runs models on paper")
