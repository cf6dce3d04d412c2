"""The captured model: an FX program with its signature, and the eager model that it must equal."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ingot.errors import ExportError, InvalidArgument
from ingot.tensors import Array, DType, Signature


class Runner(Protocol):
    """Named arrays in, named arrays out: the original model, and every later form that is held against it."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch."""
        ...


@dataclass(frozen=True)
class Program:
    """A captured model and the log of what was done to it."""

    exported: torch.export.ExportedProgram
    signature: Signature
    log: tuple[str, ...] = field(default=())


class Eager:
    """A PyTorch module called with named arrays.

    Inputs go to the parameters of ``forward`` that have their names, or, when none of them fits, by position.
    Outputs are flattened: one tensor is ``output``; a tuple gives ``output_0``, ``output_1``; a dict or a dataclass
    gives its keys.

    Args:
        module: in evaluation mode; inputs are moved to its device.
        names: the inputs' names, in order.
        output_names: overrides the outputs' names.
    """

    def __init__(self, module: nn.Module, names: Sequence[str], output_names: Sequence[str] = ()):
        self.module = module
        self._names = names
        own = parameters(module)
        self._by_name = _fit_by_name(names, own)
        if self._by_name and isinstance(module, torch.jit.ScriptModule):
            # The converter of TorchScript takes arguments by position only.
            if tuple(names) != own[: len(names)]:
                raise ExportError(f"describe the inputs of a TorchScript model in their order: {', '.join(own)}")
            self._by_name = False
        self._output_names = output_names
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        self._device = first.device if first is not None else torch.device("cpu")

    def bind(self, inputs: Mapping[str, Array]) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Return the positional and keyword arguments of ``forward``; tensors are copies."""
        values = {name: to_torch(inputs[name]).to(self._device) for name in self._names}
        return ((), values) if self._by_name else (tuple(values.values()), {})

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the module without gradients.

        Raises:
            ExportError: the module fails on these inputs, or its output holds no tensor.
        """
        args, kwargs = self.bind(inputs)
        try:
            with torch.no_grad():
                outputs = self.module(*args, **kwargs)
        except Exception as error:  # the user's code may raise anything
            shapes = ", ".join(f"{name} {list(inputs[name].shape)}" for name in self._names)
            raise ExportError(
                f"the model does not run on the example inputs ({shapes}): {type(error).__name__}: "
                f"{' '.join(str(error).split())[:500]}"
            ) from error
        named = name_outputs(outputs, self._output_names)
        return {name: from_torch(tensor) for name, tensor in named.items()}


def _fit_by_name(names: Sequence[str], known: Sequence[str]) -> bool:
    """Tell whether inputs go to parameters by name. None may fit, but not some: that is a slip of the pen.

    Raises:
        InvalidArgument: some names are parameters of ``forward`` and some are not.
    """
    strange = [name for name in names if name not in known]
    if strange and len(strange) < len(names):
        raise InvalidArgument(f"the model has no parameter '{strange[0]}'; its forward takes {', '.join(known)}")
    return not strange


def parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``forward``, without ``self``."""
    if isinstance(module, torch.jit.ScriptModule):
        schema: Any = module.forward.schema  # type: ignore[attr-defined]
        return tuple(argument.name for argument in schema.arguments[1:])
    found = inspect.signature(module.forward).parameters.values()
    return tuple(item.name for item in found if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY))


def name_outputs(outputs: Any, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Flatten a module's output into named tensors.

    Raises:
        ExportError: it holds no tensor, or ``names`` are not as many as its tensors.
    """
    leaves = [(path, leaf) for path, leaf in pytree.tree_flatten_with_path(outputs)[0] if torch.is_tensor(leaf)]
    if not leaves:
        raise ExportError(f"the model returns {type(outputs).__name__}, which holds no tensor")
    if names and len(names) != len(leaves):
        raise ExportError(f"the model has {len(leaves)} outputs, but {len(names)} names were given: {', '.join(names)}")
    if len(set(names)) < len(names):
        raise ExportError(f"the outputs' names must differ: {', '.join(names)}")
    return {name: leaf for name, (_, leaf) in zip(names or [_name(path) for path, _ in leaves], leaves, strict=True)}


def _name(path: tuple[Any, ...]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
    if not parts:
        return "output"
    return f"output_{'_'.join(parts)}" if parts[0].isdecimal() else ".".join(parts)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch's exporters tell their own developers; failures are exceptions."""
    names = ("torch.onnx", "torch.export", "torch._export", "torch.fx", "onnxscript", "onnx_ir")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        # torch.export prints the graph so far when it fails.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array as a tensor.

    Raises:
        ExportError: the array holds text, which PyTorch has no tensor for.
    """
    dtype = DType.of(array)
    if dtype is DType.BYTES:
        raise ExportError("PyTorch models take no text tensors; tokenize before the model")
    if dtype is DType.BF16:
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def from_torch(tensor: torch.Tensor) -> Array:
    """Return a tensor as an array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(DType.BF16.numpy)
    return tensor.numpy()
