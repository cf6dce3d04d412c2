"""Python's conversions and functions of numbers, which would fix a size that a capture keeps dynamic."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ingot.export import torch_internals

Globals = dict[str, Any]
_OF_TENSORS = ("log", "log2", "log10", "exp")


@contextlib.contextmanager
def watched() -> Iterator[list[Globals]]:
    """Yield a list that collects the globals of modules whose code calls ``float`` with a size.

    Python calls ``__index__`` of the size, which fixes it.
    """
    found: list[Globals] = []
    size_type: Any = torch.SymInt
    index = size_type.__index__

    def noted(size: torch.SymInt) -> Any:
        current = inspect.currentframe()
        frame = current.f_back if current is not None else None
        if frame is not None and "float" in frame.f_code.co_names:
            own = str(frame.f_globals.get("__name__")).partition(".")[0] in ("torch", "ingot")
            if not own and not any(module is frame.f_globals for module in found):
                found.append(frame.f_globals)
        return index(size)

    size_type.__index__ = noted
    try:
        yield found
    finally:
        size_type.__index__ = index


@contextlib.contextmanager
def dynamic(modules: Sequence[Globals]) -> Iterator[None]:
    """Let the code of modules, given by their globals, call ``float`` with a size that stays dynamic."""
    changed = [module for module in modules if "float" not in module]
    for module in changed:
        module["float"] = _Float
    try:
        yield
    finally:
        for module in changed:
            del module["float"]


class _Type(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, float)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, float)

    def __call__(cls, value: Any = 0.0) -> Any:
        return torch_internals.sym_float(value) if isinstance(value, torch.SymInt | torch.SymFloat) else float(value)


class _Float(float, metaclass=_Type):
    """Stands for ``float`` in the code of a module, also in ``isinstance``."""


@contextlib.contextmanager
def functions() -> Iterator[None]:
    """Let functions of Python's math module accept sizes that stay dynamic; ``torch.export`` fixes them."""
    module: Any = math
    functions = {**torch_internals.SIZE_FUNCTIONS, **{name: _by_tensor(name) for name in _OF_TENSORS}}
    originals = {name: getattr(math, name) for name in functions}
    for name, function in functions.items():
        setattr(module, name, _accepting_sizes(originals[name], function))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(module, name, original)


def _accepting_sizes(original: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
    def call(*values: Any) -> Any:
        if not any(isinstance(value, torch.SymInt | torch.SymFloat) for value in values):
            return original(*values)
        return symbolic(*map(torch_internals.sym_float, values))

    return call


def _by_tensor(name: str) -> Callable[..., Any]:
    """Return a function of numbers by PyTorch's function of tensors: a captured graph has none of numbers for it."""

    def compute(*values: Any) -> Any:
        results = [getattr(torch, name)(torch.scalar_tensor(value, dtype=torch.float64)) for value in values]
        return (results[0] / results[1] if len(results) > 1 else results[0]).item()  # math.log accepts a base

    return compute
