"""Branches on buffers that never change: the capture knows their values, as it does those of Python's numbers."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ingot.export.program import Eager

# No public setting changes CONSTANT_NUMEL_LIMIT, the most elements of a tensor whose values a capture tracks:
# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_subclasses/fake_tensor.py#L85
_FAKE: Any = importlib.import_module("torch._subclasses.fake_tensor")
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


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Let what is computed from constants alone be known while a model is captured; PyTorch knows single numbers."""
    most = _FAKE.CONSTANT_NUMEL_LIMIT
    _FAKE.CONSTANT_NUMEL_LIMIT = _MOST
    try:
        yield
    finally:
        _FAKE.CONSTANT_NUMEL_LIMIT = most
