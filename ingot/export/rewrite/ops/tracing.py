"""A Python function of tensors as an exported program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import nn

from ingot.export.program import quiet
from ingot.export.torch_internals import pytree


def trace(
    function: Callable[..., Any], arguments: Mapping[str, Any], dynamic: Sequence[Sequence[int]]
) -> torch.export.ExportedProgram:
    """Export a function. Arguments other than tensors are constants.

    Args:
        function: called with ``arguments`` as keywords.
        arguments: tensors, which may be fake, lists of tensors, and anything else.
        dynamic: for each tensor, in order, the axes whose size may change.

    Raises:
        Exception: of any kind, from ``torch.export`` or the function.
    """
    module = _Flat(function, arguments)
    shapes = tuple(dict.fromkeys(axes, torch.export.Dim.AUTO) for axes in dynamic)
    with quiet(), torch.no_grad():
        return torch.export.export(module, tuple(module.tensors), dynamic_shapes=(shapes,))


class _Flat(nn.Module):
    """A function as a module whose arguments are tensors."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]):
        super().__init__()
        self._function = _called_forward(function)
        self._leaves, self._spec = pytree.tree_flatten(dict(arguments))

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return self._function(**pytree.tree_unflatten(leaves, self._spec))


def _called_forward(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of a function with the name ``forward``: nodes record the lines of such functions only."""
    if not isinstance(function, FunctionType):
        return function
    code = function.__code__.replace(co_name="forward")
    copied = FunctionType(code, function.__globals__, "forward", function.__defaults__, function.__closure__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied
