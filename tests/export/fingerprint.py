"""Everything that code which runs a module could change, as text, to compare before and after."""

from __future__ import annotations

import hashlib
import os
import random
import warnings
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

_DEEPEST = 12


def of_module(module: nn.Module) -> dict[str, str]:
    """Return the attributes of a module's parts with the contents of tensors and containers, by path."""
    found: dict[str, str] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for name, value in vars(part).items():
            found[f"{path}.{name}"] = _text(value, {id(part)}, 0)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        found[f"tensor {name}"] = _text(tensor, set(), 0)
    return found


def of_process() -> dict[str, str]:
    """Return the settings of the process that a module or an export may change."""
    return {
        "random": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(repr(np.random.get_state(legacy=False)).encode()),
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
        "environment": repr(sorted(os.environ.items())),
        "warnings": repr(warnings.filters),
        "gradients": repr(torch.is_grad_enabled()),
        "type": repr(torch.get_default_dtype()),
        "deterministic": repr(torch.are_deterministic_algorithms_enabled()),
    }


def _text(value: Any, seen: set[int], depth: int) -> str:
    if is_lazy(value):
        return f"{type(value).__name__} {id(value)}"
    if isinstance(value, torch.Tensor):
        data = value.detach()
        content = "" if data.is_meta else _digest(data.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return f"{type(value).__name__} {id(value)} {value.dtype} {[*value.shape]} {value.requires_grad} {content}"
    if isinstance(value, np.ndarray):
        return f"{id(value)} {_digest(value.tobytes())}"
    if id(value) in seen or depth > _DEEPEST or isinstance(value, nn.Module):
        return f"{type(value).__name__} {id(value)}"
    seen = {*seen, id(value)}
    if isinstance(value, dict):
        items = (OrderedDict if isinstance(value, OrderedDict) else dict).items(value)
        return f"{id(value)} {{{', '.join(f'{key!r}: {_text(item, seen, depth + 1)}' for key, item in items)}}}"
    bases: tuple[Any, ...] = (list, tuple, deque)
    for base in bases:  # a subclass can have another __iter__
        if isinstance(value, base):
            return f"{id(value)} [{', '.join(_text(item, seen, depth + 1) for item in base.__iter__(value))}]"
    if isinstance(value, torch.Generator):
        return _digest(value.get_state().numpy().tobytes())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return _digest(repr(value.getstate()).encode())
    if hasattr(value, "__dict__") and not callable(value):
        return f"{id(value)} {_text(vars(value), seen, depth + 1)}"
    return repr(value)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
