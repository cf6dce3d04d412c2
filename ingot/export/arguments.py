"""The arguments of ``forward``: flat named tensors for Ingot, nested dicts, tuples and keywords for the model.

A tensor's name is the path to it, joined by dots: the parameter of ``forward``, then keys of dicts and dataclasses and
positions in lists and tuples. ``forward(images, past)`` called with ``past=((k, v), (k, v))`` has the inputs
``images``, ``past.0.0``, ``past.0.1``, ``past.1.0`` and ``past.1.1``. Other values are constants of the graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from ingot.errors import ExportError, InvalidArgument
from ingot.export.torch_internals import positional_arguments, pytree
from ingot.tensors import Array, DType

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class FileArrays(dict[str, Array]):
    """The arrays of a file of examples, which may hold more than the inputs, such as labels."""


@dataclass(frozen=True)
class _Slot:
    """The place of a tensor among the arguments."""

    index: int


@dataclass(frozen=True)
class Arguments:
    """How named tensors become a call of ``forward``.

    ``names`` are the tensors' names, in order. The other fields are the call's structure with its constants.
    """

    names: tuple[str, ...]
    _leaves: tuple[Any, ...]
    _structure: pytree.TreeSpec

    @property
    def order(self) -> tuple[str, ...]:
        """The names in the order of their tensors in the call."""
        return tuple(self.names[leaf.index] for leaf in self._leaves if isinstance(leaf, _Slot))

    @property
    def constants(self) -> tuple[str, ...]:
        """The constants of the graph as ``name=value``, without those that are None."""
        items = pytree.tree_flatten_with_path(self._unflatten(self._leaves))[0]
        fixed = ((path, leaf) for path, leaf in items if leaf is not None and not isinstance(leaf, _Slot))
        return tuple(f"{'.'.join(map(_key, path[1:]))}={leaf!r}" for path, leaf in fixed)

    @property
    def fixed(self) -> dict[str, Any]:
        """The keywords that hold no tensor."""
        kwargs = self._unflatten(self._leaves)[1]
        return {
            name: value
            for name, value in kwargs.items()
            if not any(isinstance(leaf, _Slot) for leaf in pytree.tree_leaves(value))
        }

    def bind(self, tensors: Sequence[torch.Tensor]) -> Call:
        """Return the arguments of ``forward`` that hold ``tensors``, which are in the order of ``names``."""
        return self._unflatten([tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self._leaves])

    def _unflatten(self, leaves: Sequence[Any]) -> Call:
        args, kwargs = pytree.tree_unflatten(list(leaves), self._structure)
        return args, kwargs


def from_names(
    module: nn.Module, names: Sequence[str], constants: Mapping[str, Any], *, by_keyword: bool = False
) -> Arguments:
    """Return a call of ``module`` made from flat names.

    Names whose first parts are parameters of ``forward`` are passed as tuples where all keys are positions and as dicts
    otherwise: by position, as in most calls, up to a parameter that is left out, then by keyword. If no name is a
    parameter, all are passed by position, except to a ``forward`` that accepts keywords only. With ``by_keyword`` none
    is passed by position, unless the module requires that.

    Raises:
        InvalidArgument: only some names are parameters, or a constant is not a parameter.
    """
    known = parameters(module)
    slots = {name: _Slot(index) for index, name in enumerate(names)}
    if not _fit_by_name(module, names, known) and not (by_keyword and takes_any_keyword(module)):
        _check_constants(module, constants, known)
        return _build(names, (tuple(slots.values()), dict(constants)))
    _check_constants(module, constants, known)
    kwargs = {**_nest(slots), **constants}
    leading = 0 if by_keyword else _leading(module, kwargs, constants)
    return _build(names, _split(module, kwargs, known, leading))


def from_example(
    module: nn.Module, example: object, constants: Mapping[str, Any]
) -> tuple[Arguments, dict[str, torch.Tensor]]:
    """Return a call of ``module`` like an example, and the example's tensors by name.

    Args:
        module: what is called.
        example: a tensor or array, a sequence of arguments in the order of ``forward``, or a mapping of its keywords.
        constants: further keywords that are fixed in the graph.

    Raises:
        InvalidArgument: there are more arguments than parameters, or a keyword is not a parameter.
    """
    known = parameters(module)
    names, args, kwargs = _as_call(module, example, known)
    _check_constants(module, constants, known)
    call = pytree.tree_map(_tensor, (args, {**kwargs, **constants}))
    paths, structure = pytree.tree_flatten_with_path(call)
    tensors: dict[str, torch.Tensor] = {}
    leaves: list[Any] = []
    for path, leaf in paths:
        if not torch.is_tensor(leaf):
            leaves.append(leaf)
            continue
        leaves.append(_Slot(len(tensors)))
        name = _name(path, names)
        if name in tensors:
            raise InvalidArgument(f"two of the example inputs are called '{name}'; rename a key that contains a dot")
        tensors[name] = leaf
    if not tensors:
        raise InvalidArgument("the example inputs hold no tensor; pass tensors or arrays, not numbers or lists of them")
    return Arguments(tuple(tensors), tuple(leaves), structure), tensors


def to_torch(array: Array) -> torch.Tensor:
    """Return a copy of an array as a tensor, bfloat16 included.

    Raises:
        ExportError: the array holds text, for which PyTorch has no tensor.
    """
    dtype = DType.of(array)
    if dtype is DType.BYTES:
        raise ExportError("PyTorch has no text tensors; tokenize before the model")
    if dtype is DType.BF16:
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def parameters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``forward``, without ``self``."""
    if isinstance(module, torch.jit.ScriptModule):
        schema: Any = module.forward.schema  # type: ignore[attr-defined]
        return tuple(argument.name for argument in schema.arguments[1:])
    found = inspect.signature(module.forward).parameters.values()
    return tuple(item.name for item in found if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY))


def inputs_among(example: object, known: Collection[str]) -> tuple[Any, tuple[str, ...]]:
    """Return an example without the arrays of a file that are not inputs, and a remark on each of these.

    Args:
        example: any example; only :class:`FileArrays` may hold more than inputs.
        known: the names of the inputs, or of the parameters that they lie in.
    """
    if not isinstance(example, FileArrays):
        return example, ()
    used = {name: array for name, array in example.items() if {name, name.partition(".")[0]} & set(known)}
    if not used:  # no name matches: the arrays go to the inputs in order
        return dict(example), ()
    unused = [name for name in example if name not in used]
    return used, tuple(f"'{name}' in the example is not an input: it is not used" for name in unused)


def outside_parameters(module: nn.Module, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that are not parameters of ``forward``, but go to its ``**kwargs``, which may ignore them."""
    known = parameters(module) if takes_any_keyword(module) else ()
    return tuple(name for name in names if known and name.partition(".")[0] not in known)


def _build(names: Sequence[str], call: Call) -> Arguments:
    leaves, structure = pytree.tree_flatten(call)
    return Arguments(tuple(names), tuple(leaves), structure)


def _fit_by_name(module: nn.Module, names: Sequence[str], known: Sequence[str]) -> bool:
    tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
    strange = [name for name in tops if name not in known]
    if not strange or (takes_any_keyword(module) and len(strange) < len(tops)):
        return True
    if len(strange) < len(tops):
        raise InvalidArgument(f"the model has no parameter '{strange[0]}'; its parameters are {', '.join(known)}")
    return takes_any_keyword(module) and not known and not _takes_any_position(module)


def takes_any_keyword(module: nn.Module) -> bool:
    """Return whether ``forward`` has ``**kwargs``."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return any(item.kind is item.VAR_KEYWORD for item in inspect.signature(module.forward).parameters.values())


def _check_constants(module: nn.Module, constants: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in constants:
        if name not in known and not takes_any_keyword(module):
            raise InvalidArgument(f"the model has no parameter '{name}'; its parameters are {', '.join(known)}")


def _nest(items: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in items.items():
        *path, last = name.split(".")
        place = tree
        for part in path:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise InvalidArgument(f"input '{name}' lies inside another input")
        if last in place:
            raise InvalidArgument(f"input '{name}' has other inputs inside it")
        place[last] = value
    return {key: _tuples(value) for key, value in tree.items()}


def _tuples(value: object) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {str(index) for index in range(len(value))}:
        return tuple(_tuples(value[str(index)]) for index in range(len(value)))
    return {key: _tuples(item) for key, item in value.items()}


def _as_call(module: nn.Module, example: Any, known: Sequence[str]) -> tuple[Sequence[str], Any, Any]:
    """Return the names of positional arguments, and the arguments of both kinds."""
    if isinstance(example, Mapping):
        items = {str(name): value for name, value in example.items()}
        if not _fit_by_name(module, list(items), known):
            return list(items), tuple(items.values()), {}
        kwargs = _nest(items)
        return known, *_split(module, kwargs, known)
    single = isinstance(example, torch.Tensor | np.ndarray) or not isinstance(example, Sequence)
    args = (example,) if single else tuple(example)
    if len(args) > len(known) and not _takes_any_position(module):
        raise InvalidArgument(
            f"{len(args)} example inputs were given, but the model's parameters are {', '.join(known)}"
        )
    return known, args, {}


def calls_other_code(module: nn.Module) -> bool:
    """Return whether a call runs code that may treat arguments by position and by keyword differently.

    This is code of hooks, decorators, and classes that replace ``__call__``.
    """
    if isinstance(module, torch.jit.ScriptModule | fx.GraphModule):
        return False
    hooked = any(value for name, value in vars(module).items() if name in ("_forward_hooks", "_forward_pre_hooks"))
    replaced = type(module).__call__ is not nn.Module.__call__ or "forward" in vars(module)
    return hooked or replaced or hasattr(module.forward, "__wrapped__") or _takes_any_position(module)


def _leading(module: nn.Module, kwargs: Mapping[str, Any], constants: Mapping[str, Any]) -> int:
    """Return how many arguments a usual call passes by position."""
    if isinstance(module, torch.jit.ScriptModule | fx.GraphModule):
        return 0
    count = 0
    for item in inspect.signature(module.forward).parameters.values():
        if item.kind is not item.POSITIONAL_OR_KEYWORD or item.name not in kwargs or item.name in constants:
            break
        count += 1
    return count


def _split(module: nn.Module, kwargs: Mapping[str, Any], known: Sequence[str], leading: int = 0) -> Call:
    """Split keywords into arguments by position, which some kinds of module require, and by keyword."""
    if isinstance(module, torch.jit.ScriptModule):
        count = len(kwargs)
    else:
        count = positional_arguments(module.graph) if isinstance(module, fx.GraphModule) else leading
    first = known[:count]
    if not set(first) <= set(kwargs):
        raise ExportError(
            "the first arguments of this model are passed by position; describe its inputs from the first on: "
            f"{', '.join(known)}"
        )
    return tuple(kwargs[name] for name in first), {key: value for key, value in kwargs.items() if key not in first}


def _takes_any_position(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False
    return any(item.kind is item.VAR_POSITIONAL for item in inspect.signature(module.forward).parameters.values())


def _tensor(leaf: object) -> Any:
    return to_torch(leaf) if isinstance(leaf, np.ndarray) else leaf


def _name(path: tuple[Any, ...], known: Sequence[str]) -> str:
    side, *rest = (_key(key) for key in path)
    if side == "0":  # a positional argument has the name of its parameter
        first, *rest = rest
        index = int(first)
        return ".".join([known[index] if index < len(known) else f"input_{index}", *rest])
    return ".".join(rest)


def _key(key: object) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", ""))))
