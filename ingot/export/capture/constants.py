"""Branches on buffers that never change: the capture knows their values, as it does those of Python's numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ingot.export.program import Eager
from ingot.export.torch_internals import constants_of

# Elements of a buffer whose values are known: a mask of features, not a table.
_MOST = 1024


def of(eager: Eager) -> dict[str, tuple[Any, torch.dtype]]:
    """Return the values and types of a model's small buffers, but for its states, and of tensors kept as attributes."""
    found = dict(eager.module.named_buffers())
    for path, part in eager.module.named_modules():
        own = {name: value for name, value in vars(part).items() if torch.is_tensor(value)}
        found |= {f"{path}.{name}" if path else name: value for name, value in own.items()}
    return {
        name: (value.tolist(), value.dtype)
        for name, value in found.items()
        if value.numel() <= _MOST and name not in eager.states.names and not value.is_complex()
    }


def decides(error: BaseException) -> bool:
    """Tell whether a capture failed as the code decides by a tensor's values."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, GuardOnDataDependentSymNode) or "data-dependent" in str(seen).lower():
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def known() -> contextlib.AbstractContextManager[None]:
    """Track the values of what is computed from constants alone; PyTorch tracks single numbers."""
    return constants_of(_MOST)
