"""What running a module can change: recorded once, so that each call starts from the same state and leaves no trace.

A module is not copied: closures, such as hooks, would still refer to the original, and some modules cannot be copied.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.torch_internals import version

PARAMETER, BUFFER, ATTRIBUTE = "parameter", "buffer", "attribute"
_KINDS = {"_parameters": PARAMETER, "_buffers": BUFFER, "_modules": ATTRIBUTE}
# The values of larger tensors are compared where PyTorch has counted a write, and at the end of the export.
_LARGE = 1 << 16
# Larger containers among the global variables of a file are tables of constants.
_LARGE_TABLE = 100
_CONSTANT = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type, types.ModuleType)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Change:
    """A value that calls changed: its path in the module, its kind, and its value after the calls."""

    path: str
    kind: str
    value: Any
    _holder: Any = field(repr=False)
    _key: Any = field(repr=False)

    def put(self) -> None:
        """Give the module the changed value until the next :meth:`Snapshot.undo`."""
        if isinstance(self._holder, list) and self._key >= list.__len__(self._holder):
            list.append(self._holder, self.value)
        elif isinstance(self._holder, dict | list):
            _base(self._holder).__setitem__(self._holder, self._key, self.value)


class Snapshot:
    """The state of a module: attributes of its parts, containers and objects in them, tensors, hooks and closures.

    Args:
        module: the module. Its parts in TorchScript are recorded by their parameters and buffers only.
        earlier: another snapshot, whose copies of tensors that are still equal are shared.

    Attributes:
        changed: the kind of each path that any call of the module has changed.
    """

    def __init__(self, module: nn.Module, earlier: Snapshot | None = None):
        self.changed: dict[str, str] = {}
        self._copies = {} if earlier is None else {id(record.tensor): record.copy for record in earlier._tensors}
        self._places: list[_Place] = []
        self._tensors: list[_Tensor] = []
        self._seen: set[object] = set()
        self._pending: list[tuple[str | _Place, str, Any, Any, Any]] = [("", ATTRIBUTE, module, None, None)]
        while self._pending:
            # Values that cannot be read or copied, such as a weak reference to a deleted object, are not recorded.
            foreign.attempt(functools.partial(self._visit, *self._pending.pop()))
        self._hooks = [place for place in self._places if place.path.endswith("_hooks")]

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Undo at the end what the block changes in the module, and in the process except for random numbers."""
        for place in self._hooks:  # hooks that watch this block belong to it
            place.before = place.read()
        with _undoing(self), _settings():
            yield

    def undo(self, *, thorough: bool = False) -> tuple[Change, ...]:
        """Restore the module, and return what had changed.

        Args:
            thorough: compare the values of large tensors too where PyTorch has counted no write.

        Raises:
            ExportError: a value cannot be restored; all others are.
        """
        changes: list[Change] = []
        failed: list[tuple[str, Exception]] = []
        records: list[_Tensor | _Place] = [*self._tensors, *self._places]
        for record in records:
            outcome = foreign.outcome(functools.partial(record.restored, thorough))
            if isinstance(outcome, Exception):
                failed.append((record.path, outcome))
            else:
                changes += outcome
        if failed:
            path, error = failed[0]
            raise ExportError(
                f"a call of the model changes {path or 'the model'} in a way that cannot be undone "
                f"({foreign.typed(error)}); keep such values in tensors, or create them in forward"
            ) from error
        return tuple(changes)

    def _visit(self, place: str | _Place, kind: str, value: Any, holder: Any, key: Any) -> None:
        if isinstance(value, _CONSTANT) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        path = place if isinstance(place, str) else place.path_of(key)
        if isinstance(value, torch.Tensor):
            self._tensors.append(_Tensor(path, kind, value, holder, key, self._copies.get(id(value))))
        elif isinstance(value, torch.jit.ScriptModule):
            for name, tensor in (*value.named_parameters(), *value.named_buffers()):
                self._visit(joined(path, name), kind, tensor, None, None)
        elif isinstance(value, nn.Module):
            self._visit_module(path, value)
        elif isinstance(value, tuple | frozenset):
            members = _base(value).__iter__(value)
            self._pending += [(f"{path}[{index}]", kind, item, None, None) for index, item in enumerate(members)]
        elif (content := _content(value)) is not None:
            self._add(_Place(path, kind, *content))
        else:
            self._visit_code(path, value)

    def _visit_module(self, path: str, part: nn.Module) -> None:
        own = vars(part)
        self._add(_Place(path, ATTRIBUTE, *_of_container(own), is_namespace=True), without=_KINDS)
        for name, kind in _KINDS.items():
            self._add(_Place(path, kind, *_of_container(own.get(name, {})), is_namespace=True))
        for cls in type(part).__mro__:
            if _is_known(cls.__module__) or cls in self._seen:
                continue
            self._seen.add(cls)
            self._add(_Place(path, ATTRIBUTE, *_of_class(cls), is_namespace=True))
            functions = [item for item in vars(cls).values() if isinstance(item, types.FunctionType)]
            self._pending += [(path, ATTRIBUTE, item, None, None) for item in functions]

    def _visit_code(self, path: str, value: Any) -> None:
        """Visit the variables of a function, and the attributes of an object."""
        parts: tuple[Any, ...] = ()
        if isinstance(value, types.MethodType):
            parts = (value.__self__, value.__func__)
        elif isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
        elif isinstance(value, types.FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if id(cell) not in self._seen:
                    self._seen.add(id(cell))
                    self._add(_Place("", ATTRIBUTE, *_of_cell(name, cell), is_namespace=True))
            self._visit_globals(value)
        elif isinstance(getattr(value, "__dict__", None), dict) and not _is_known(type(value).__module__):
            self._add(_Place(path, ATTRIBUTE, *_of_container(vars(value)), is_namespace=True))
        self._pending += [(path, ATTRIBUTE, part, None, None) for part in parts]

    def _visit_globals(self, function: types.FunctionType) -> None:
        """Record the global variables that a function names, if they are numbers, tensors or small containers."""
        names = function.__globals__
        if _is_known(str(names.get("__name__"))):
            return
        used = [name for name in function.__code__.co_names if (id(names), name) not in self._seen]
        self._seen |= {(id(names), name) for name in used}
        own = _data({name: names[name] for name in used if name in names})
        small = [name for name, item in own.items() if _length(item) <= _LARGE_TABLE]
        if small:
            self._add(_Place("", ATTRIBUTE, *_of_globals(names, small), is_namespace=True))

    def _add(self, place: _Place, without: Mapping[str, str] | None = None) -> None:
        self._places.append(place)
        for key, item in place.before.items() if place.is_container else ():
            if key not in (without or {}):
                self._pending.append((place, place.kind, item, place.holder, key))


class _Tensor:
    """A tensor, with a copy of its values."""

    def __init__(self, path: str, kind: str, tensor: torch.Tensor, holder: Any, key: Any, copy: torch.Tensor | None):
        self.tensor = tensor
        self.path = path
        self._kind = kind
        self._in = (holder, key)
        self._own = tensor.data  # keeps the memory of a tensor whose .data is replaced
        if tensor.is_meta or tensor.layout is not torch.strided:
            raise ValueError("a tensor whose values cannot be compared")
        self.copy = copy if copy is not None and same(self._own, copy) else self._own.clone()
        if type(tensor) not in (torch.Tensor, nn.Parameter) and not same(self._own, self.copy):
            raise ValueError("a tensor whose copy differs")
        self._writes = self._version()
        self._requires_grad = tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf else None

    def restored(self, thorough: bool) -> list[Change]:
        """Restore the tensor, and return the change of its values if there is one."""
        tensor, own = self.tensor, self._own
        if tensor.is_leaf:
            if tensor.requires_grad is not self._requires_grad:
                tensor.requires_grad_(self._requires_grad)
            if tensor.grad is not self._grad:
                tensor.grad = self._grad
        moved = tensor.data_ptr() != own.data_ptr() or tensor.shape != own.shape or tensor.stride() != own.stride()
        if not moved and own.numel() > _LARGE and not thorough and self._version() == self._writes:
            return []
        if not moved and same(own, self.copy):
            return []
        now = tensor.detach().clone()
        if moved:
            tensor.data = own
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():
            own.copy_(self.copy)
        self._writes = self._version()
        return [] if same(now, self.copy) else [Change(self.path, self._kind, now, *self._in)]

    def _version(self) -> int:
        return 0 if self.tensor.is_inference() else version(self.tensor)


class _Place:
    """Something that holds values by key: how it is read and rewritten, and its values before."""

    def __init__(
        self,
        path: str,
        kind: str,
        holder: Any,
        read: Callable[[], dict[Any, Any]],
        write: Callable[[dict[Any, Any]], object],
        *,
        is_namespace: bool = False,
    ):
        self.path = path
        self.kind = kind
        self.holder = holder
        self.read = read
        self.before = read()
        self._write = write
        self._is_namespace = is_namespace
        self.is_container = is_namespace or holder is not None

    def path_of(self, key: Any) -> str:
        """Return the path of one of the values."""
        if self._is_namespace:
            return joined(self.path, str(key))
        if self.holder is None:
            return self.path
        shown = foreign.attempt(lambda: repr(key))
        return f"{self.path}[{type(key).__name__ if shown is None else shown}]"

    def _holds(self, now: dict[Any, Any]) -> bool:
        """Return whether all values are the same objects as before."""
        before = self.before
        same_size = dict.__len__(now) == len(before)
        return same_size and all(dict.get(now, key, _Place) is value for key, value in before.items())

    def restored(self, thorough: bool) -> list[Change]:
        """Restore the values, and return those that differ from the ones before."""
        if isinstance(self.holder, dict) and self._holds(self.holder):  # without a copy
            return []
        before, now = self.before, self.read()
        if self._holds(now):
            return []
        changed = [
            key
            for key in {**before, **now}
            if not (key in before and key in now and foreign.attempt(functools.partial(equal, before[key], now[key])))
        ]
        if changed or self.is_container:  # a container must hold the same objects again, an array the same values
            self._write(before)
        return [
            Change(self.path_of(key), self.kind, now.get(key), self.holder, key)
            for key in changed
            if not (key in _KINDS and self._is_namespace)
        ]


_Access = tuple[Any, Callable[[], dict[Any, Any]], Callable[[dict[Any, Any]], object]]
"""A container of values, and functions that read and rewrite them."""


def _content(value: Any) -> _Access | None:
    """Return the access to the values of a container, an array or a generator of random numbers, or None."""
    if isinstance(value, dict | list | deque | set):
        return _of_container(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _of_array(value)
    if isinstance(value, torch.Generator):
        return None, lambda: {"state": value.get_state()}, lambda before: value.set_state(before["state"])
    if isinstance(value, random.Random):
        return None, lambda: {"state": value.getstate()}, lambda before: value.setstate(before["state"])
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return None, lambda: {"state": bits.state}, lambda before: setattr(bits, "state", before["state"])
    return None


def _of_container(container: Any) -> _Access:
    base = _base(container)

    def write(before: dict[Any, Any]) -> None:
        base.clear(container)
        if issubclass(base, dict):
            for key, item in before.items():
                base.__setitem__(container, key, item)
        elif base is set:
            base.update(container, before)
        else:
            base.extend(container, before.values())

    return container, lambda: _entries(container), write


def _of_array(array: np.ndarray[Any, Any]) -> _Access:
    def write(before: dict[str, Any]) -> None:
        if array.shape != before["values"].shape:
            array.resize(before["values"].shape, refcheck=False)
        np.copyto(array, before["values"])

    return None, lambda: {"values": array.copy()}, write


def _entries(container: Any) -> dict[Any, Any]:
    """Return the values of a container by key or index, or the members of a set as keys."""
    base = _base(container)
    if issubclass(base, dict):
        return dict(base.items(container))
    members = base.__iter__(container)
    return dict.fromkeys(members) if issubclass(base, set | frozenset) else dict(enumerate(members))


def _base(container: Any) -> Any:
    """Return Python's own type of a container, whose methods read and write it; subclasses can replace those.

    For example, a dictionary of transformers has a ``get`` with one argument.
    """
    return next(base for base in (OrderedDict, dict, list, deque, tuple, set, frozenset) if isinstance(container, base))


def _length(value: Any) -> int:
    """Return the number of entries of a container or rows of a tensor, or 1."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else 1
    if isinstance(value, dict | list | deque | tuple | set):
        return int(_base(value).__len__(value))
    return 1


def _of_class(cls: type) -> _Access:
    def write(before: dict[str, Any]) -> None:
        for name in _data(vars(cls)):
            if name not in before:
                delattr(cls, name)
        for name, value in before.items():
            setattr(cls, name, value)

    return None, lambda: _data(vars(cls)), write


def _of_cell(name: str, cell: types.CellType) -> _Access:
    def read() -> dict[str, Any]:
        try:
            return {name: cell.cell_contents}
        except ValueError:  # the variable has no value yet
            return {}

    return None, read, lambda before: setattr(cell, "cell_contents", before[name]) if before else None


def _of_globals(names: dict[str, Any], used: list[str]) -> _Access:
    return None, lambda: {name: names[name] for name in used if name in names}, names.update


def _data(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of a class or a file that hold data, not code."""
    kinds = (bool, int, float, complex, str, type(None), list, tuple, dict, set, deque, torch.Tensor, np.ndarray)
    return {name: value for name, value in variables.items() if isinstance(value, kinds) and not name.startswith("__")}


def _is_known(module: str) -> bool:
    """Return whether code belongs to Python, PyTorch or numpy, whose objects keep no state of a model."""
    first = module.partition(".")[0]
    return first in ("torch", "numpy", "sympy", "onnx", "ingot") or (
        first in sys.stdlib_module_names and module != types.SimpleNamespace.__module__
    )


def joined(path: str, name: str) -> str:
    """Return the path of an attribute."""
    return f"{path}.{name}" if path else name


def equal(left: Any, right: Any) -> bool:
    """Return whether two values are the same object, or data of equal values; NaN equals itself."""
    try:
        return _equal(left, right)
    except RecursionError:  # containers that hold themselves
        return False


def _equal(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return same(left.detach(), right.detach())
    if isinstance(left, np.ndarray):
        alike = (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and left.tobytes() == right.tobytes()
    if isinstance(left, dict | list | tuple | deque | set):
        left, right = _entries(left), _entries(right)
        return left.keys() == right.keys() and all(_equal(value, right[key]) for key, value in left.items())
    return isinstance(left, _CONSTANT) and bool(left == right or (left != left and right != right))


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits, so that a NaN equals itself and -0.0 differs from 0.0."""
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    integers = _INTEGERS.get(left.dtype.itemsize)
    if left.is_complex() or left.is_floating_point():
        left, right = (torch.view_as_real(item.resolve_conj()) if item.is_complex() else item for item in (left, right))
        integers = _INTEGERS[left.dtype.itemsize]
        return bool(torch.equal(left.view(integers), right.view(integers)))
    return bool(torch.equal(left, right))


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Restore at the end the settings of the process that a block changes."""
    environment, dtype, gradients = dict(os.environ), torch.get_default_dtype(), torch.is_grad_enabled()
    deterministic = torch.get_deterministic_debug_mode()
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name in {**environment, **os.environ}:
            if name not in environment:
                del os.environ[name]
            elif os.environ.get(name) != environment[name]:
                os.environ[name] = environment[name]
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(gradients)
        if torch.get_deterministic_debug_mode() != deterministic:
            torch.set_deterministic_debug_mode(deterministic)


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[Snapshot]:
    """Yield a snapshot of a module, and restore the module and the settings of the process at the end.

    Random numbers that are drawn afterwards are those that would have been drawn without the block.
    """
    snapshot = Snapshot(module)
    states = random.getstate(), np.random.get_state()
    with _undoing(snapshot, thorough=True):
        try:
            with _settings(), torch.random.fork_rng():
                yield snapshot
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def _undoing(snapshot: Snapshot, *, thorough: bool = False) -> Iterator[None]:
    """Undo at the end what the block changes in the module; an error of the block has priority over one of that."""
    try:
        yield
    except BaseException:  # whatever ended the block
        foreign.attempt(lambda: snapshot.undo(thorough=thorough))
        raise
    snapshot.undo(thorough=thorough)
