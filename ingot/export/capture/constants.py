"""Branches on buffers that never change: the capture treats their values as constants, like Python numbers."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ingot import foreign
from ingot.export.program import Eager
from ingot.export.torch_internals import constants_of

# The most elements of a buffer whose values are known: enough for a mask of features, not for a table.
_MOST = 1024


def of(eager: Eager) -> dict[str, tuple[Any, torch.dtype]]:
    """Return the values and types of a model's small buffers, except its states, and of tensors kept as attributes."""
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
    """Return whether a capture failed because the code branches on a tensor's values."""
    return any(
        isinstance(cause, GuardOnDataDependentSymNode) or "data-dependent" in str(cause).lower()
        for cause in foreign.causes(error)
    )


def known() -> contextlib.AbstractContextManager[None]:
    """Let a capture track values computed from constants alone; PyTorch does so only for single numbers."""
    return constants_of(_MOST)
