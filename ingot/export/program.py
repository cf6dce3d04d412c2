"""The captured model: an FX program with its signature, and the eager model that it must equal."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ingot import foreign
from ingot.errors import ExportError
from ingot.export.arguments import Arguments, to_torch
from ingot.export.explain import places
from ingot.export.snapshot import Change, Snapshot, same
from ingot.export.torch_internals import pytree
from ingot.runtime.engines.pytorch.torch_arrays import from_torch
from ingot.tensors import Array, Signature

# Seconds after which a call may be endless, and how many times as long as an ordinary one it may take.
_ENDLESS, _SLOWER = 5.0, 100

NEXT = "_next"
"""The suffix of a state's new value: the input ``count`` has the output ``count_next``."""


Within = Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager[Any]]
"""Returns a context for a call of a module with the given tensors."""


class Runner(Protocol):
    """Named arrays in, named arrays out: the original model, and every later form that is compared with it."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run one batch."""
        ...


@runtime_checkable
class Stoppable(Protocol):
    """A runner whose call can be ended from another thread."""

    def terminate(self) -> None:
        """End the running call, which then raises EngineTimeout."""
        ...


@contextlib.contextmanager
def ended_if_endless(runner: Runner, ordinary: float) -> Iterator[None]:
    """End the call of a runner in the block if it seems to be endless, and the runner can be stopped.

    A loop whose condition is decided by chosen values may never end.

    Args:
        runner: makes the call, which raises EngineTimeout if it is ended.
        ordinary: the seconds of a call on ordinary values.
    """
    if not isinstance(runner, Stoppable):
        yield
        return
    timer = threading.Timer(max(_ENDLESS, _SLOWER * ordinary), runner.terminate)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@dataclass(frozen=True)
class Program:
    """A captured model and the log of what was done to it.

    ``exported`` takes the tensors of ``signature.inputs`` by position and returns those of ``signature.outputs`` as a
    flat tuple, whatever the structure of the user's module. ``options`` are the options of its trace.
    """

    exported: torch.export.ExportedProgram
    signature: Signature
    log: tuple[str, ...] = ()
    options: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class States:
    """State that a model changes when it runs, which becomes inputs and outputs of its graph.

    ``buffers`` are names of the module's buffers; they become inputs of these names. ``inputs`` are inputs that it
    changes in place. The new value of each is an output with ``_next`` after the name.
    """

    buffers: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.buffers or self.inputs)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.buffers, *self.inputs)


class Eager:
    """A PyTorch module called with named arrays, each time as for the first time.

    Outputs are flattened: one tensor is ``output``; a tuple becomes ``output_0``, ``output_1``; a dict or a dataclass
    keeps its keys; an output with the name of an input has ``_next`` after its name. With ``states``, their values are
    read from the inputs and returned as outputs.

    Args:
        module: in evaluation mode; inputs are moved to its device.
        arguments: how named tensors become a call of it.
        output_names: overrides the outputs' names.
        states: the state to lift into inputs and outputs.
        scratch: buffers that it overwrites before it reads them.
        snapshot: the module's state before each call; without one, calls leave their traces.

    Attributes:
        caches: attributes and buffers that its first call fills.
        refills: whether a capture starts with empty caches and drops what the code assigns to them, instead of holding
            what a first call fills.
        written: the inputs that calls have changed in place.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: Arguments,
        output_names: Sequence[str] = (),
        states: States | None = None,
        scratch: Sequence[str] = (),
        snapshot: Snapshot | None = None,
    ):
        self.module = module
        self.arguments = arguments
        self.states = states or States()
        self.scratch = tuple(scratch)
        self.output_names = output_names
        self.snapshot = snapshot
        self.caches: tuple[str, ...] = ()
        self.refills = False
        self.written: set[str] = set()
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        self.device = first.device if first is not None else torch.device("cpu")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all inputs, in order."""
        return (*self.arguments.names, *self.states.buffers)

    def tensors(self, inputs: Mapping[str, Array]) -> tuple[torch.Tensor, ...]:
        """Return copies of the inputs on the module's device, in order."""
        return tuple(to_torch(inputs[name]).to(self.device) for name in self.names)

    def run(self, inputs: Mapping[str, Array], within: Within | None = None) -> dict[str, Array]:
        """Run the module without gradients.

        Args:
            inputs: the inputs by name.
            within: returns a context for the call of the module.

        Raises:
            ExportError: the module fails on these inputs, or its outputs cannot be named; see :func:`name_outputs`.
        """
        return self.run_in_a_row([inputs], within=within)[0][0]

    def run_in_a_row(
        self,
        calls: Sequence[Mapping[str, Array]],
        start: Mapping[str, Any] | None = None,
        within: Within | None = None,
    ) -> tuple[list[dict[str, Array]], tuple[Change, ...]]:
        """Run the module several times, and return the outputs of each call and what all calls changed.

        Args:
            calls: the inputs of each.
            start: values of attributes and buffers, by path, before the first call.
            within: returns a context for each call of the module.

        Raises:
            ExportError: as :meth:`run`.
        """
        changes: tuple[Change, ...] = ()
        with self.undone():
            for path, value in (start or {}).items():
                owner, _, name = path.rpartition(".")
                setattr(self.module.get_submodule(owner), name, value)
            outputs = [self._run(inputs, within) for inputs in calls]
            if self.snapshot is not None:
                changes = self.snapshot.undo()
                self.snapshot.changed |= {change.path: change.kind for change in changes}
        return outputs, changes

    def undone(self) -> contextlib.AbstractContextManager[None]:
        """Undo at the end what a block changes in the module; see :class:`ingot.export.snapshot.Snapshot`."""
        return contextlib.nullcontext() if self.snapshot is None else self.snapshot.undone()

    @contextlib.contextmanager
    def filled(self, inputs: Mapping[str, Array]) -> Iterator[None]:
        """Hold what a first call fills, such as tables, during a block, which may capture the module.

        With :attr:`refills`, only undo what the block changes.
        """
        changes: tuple[Change, ...] = ()
        if self.snapshot is not None and self.snapshot.changed and not self.refills:
            changes = self.run_in_a_row([inputs])[1]
        with self.undone():
            for change in changes:
                if change.path not in self.scratch:
                    change.put()
            yield

    def _run(self, inputs: Mapping[str, Array], within: Within | None) -> dict[str, Array]:
        tensors = self.tensors(inputs)

        def failed(error: Exception) -> str:
            shapes = ", ".join(f"{name} {list(inputs[name].shape)}" for name in self.names)
            place = places.find_place(error)
            where = f" (at {place.file}:{place.line} in {place.function})" if place is not None else ""
            return f"the model does not run on the example inputs ({shapes}): {foreign.typed(error)}{where}"

        context = contextlib.nullcontext() if within is None else within(tensors)
        with foreign.reported_as(ExportError, failed, keep=ExportError), torch.no_grad():
            named = self._call(tensors, context)
        return {name: from_torch(tensor) for name, tensor in named.items()}

    def _call(
        self, tensors: Sequence[torch.Tensor], context: contextlib.AbstractContextManager[Any]
    ) -> dict[str, torch.Tensor]:
        own = tensors[: len(self.arguments.names)]
        before = [tensor.clone() for tensor in own]
        args, kwargs = self.arguments.bind(own)
        with _holding(self.module, self.states.buffers, tensors[len(own) :]), context:
            named = name_outputs(self.module(*args, **kwargs), self.output_names)
            if not self.output_names:  # a cache goes in and comes out under one name
                _check_names(names := [f"{name}{NEXT}" if name in self.names else name for name in named])
                named = dict(zip(names, named.values(), strict=True))
            buffers = [self.module.get_buffer(name).clone() for name in self.states.buffers]
        written = zip(self.arguments.names, before, own, strict=True)
        self.written |= {name for name, old, new in written if not same(old, new)}
        changed = [own[self.arguments.names.index(name)] for name in self.states.inputs]
        return named | _next_values(self.states, [*buffers, *changed])

    def in_double(self) -> Eager:
        """Return a copy of the model in double precision, which also accepts inputs in single precision.

        Raises:
            ExportError: the module cannot be copied.
        """
        with foreign.reported_as(ExportError, "the model cannot be copied"):
            module = copy.deepcopy(self.module).double()
        return _Double(module, self.arguments, self.output_names, self.states, self.scratch)

    def flat(self, constants: Mapping[str, tuple[Any, torch.dtype]] | None = None) -> nn.Module:
        """Return a module of flat tensors, as :class:`Program` has them, for tracing.

        Args:
            constants: values and types of buffers that are constants of the code, which may branch on them.
        """
        return _Flat(self, constants or {})


class _Double(Eager):
    def tensors(self, inputs: Mapping[str, Array]) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in super().tensors(inputs))


class _Flat(nn.Module):
    """The user's module behind positional tensors and a tuple of tensors, its states lifted."""

    def __init__(self, eager: Eager, constants: Mapping[str, tuple[Any, torch.dtype]]):
        super().__init__()
        self.ingot_wrapped = eager.module
        self._constants = constants
        self._arguments = eager.arguments
        self._states = eager.states
        self._scratch = eager.scratch
        self._caches = tuple(dict.fromkeys(path.partition("[")[0] for path in eager.caches)) if eager.refills else ()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = list(tensors[: len(self._arguments.names)])
        for index, name in enumerate(self._arguments.names):
            if name in self._states.inputs:
                own[index] = own[index].clone()
        args, kwargs = self._arguments.bind(own)
        fixed = {name: torch.tensor(value, dtype=dtype) for name, (value, dtype) in self._constants.items()}
        # The graph shows a use of a copy: see :func:`ingot.export.capture.exported.check_scratch`.
        fixed |= {name: self.ingot_wrapped.get_buffer(name).clone() for name in self._scratch}
        # PyTorch refuses tensors that the code has assigned to attributes once it returns.
        fixed |= {name: _fresh(self.ingot_wrapped, name) for name in self._caches}
        lifted = zip(self._states.buffers, tensors[len(own) :], strict=True)
        held = {name: value.clone() for name, value in lifted}
        with _holding(self.ingot_wrapped, [*fixed], [*fixed.values()]) if fixed else contextlib.nullcontext():
            if held:  # functional_call writes new values back into its argument
                outputs = torch.func.functional_call(self.ingot_wrapped, held, args, kwargs)
            else:
                outputs = self.ingot_wrapped(*args, **kwargs)
        leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        changed = [own[self._arguments.names.index(name)] for name in self._states.inputs]
        return (*leaves, *held.values(), *changed)


def user_path(path: str) -> str:
    """Return the path of a module or weight in the user's module, without the wrappers that it was traced in."""
    return re.sub(r"^(L\['self'\]\.?)?(ingot_wrapped\.?)*", "", path)


class Captured:
    """A graph module of flat tensors as a :class:`Runner`."""

    def __init__(self, graph: Callable[..., Any], signature: Signature, device: torch.device | str = "cpu"):
        self._graph = graph
        self._signature = signature
        self._device = device

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the graph without gradients.

        Raises:
            ExportError: it fails on these inputs.
        """
        tensors = [to_torch(inputs[spec.name]).to(self._device) for spec in self._signature.inputs]
        with foreign.reported_as(ExportError, foreign.typed), torch.no_grad():
            outputs = self._graph(*tensors)
        return {spec.name: from_torch(tensor) for spec, tensor in zip(self._signature.outputs, outputs, strict=True)}


_ABSENT: Any = object()


def _fresh(module: nn.Module, name: str) -> Any:
    """Return an attribute of a part of a module, of a container a copy, which a call may change."""
    value = getattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], _ABSENT)
    return value.copy() if isinstance(value, dict | list) else value


@contextlib.contextmanager
def _holding(module: nn.Module, names: Sequence[str], values: Sequence[Any]) -> Iterator[None]:
    """Set a module's buffers and attributes to other values, and restore their own, or remove them, afterwards."""
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    before = [getattr(owner, name, _ABSENT) for owner, name in places]

    def put(values: Sequence[Any]) -> None:
        for (owner, name), value in zip(places, values, strict=True):
            if value is not _ABSENT:
                setattr(owner, name, value)
            elif hasattr(owner, name):
                delattr(owner, name)

    put(values)
    try:
        yield
    finally:
        put(before)


def _next_values(states: States, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name}{NEXT}": value for name, value in zip(states.names, values, strict=True)}


def name_outputs(outputs: object, names: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """Flatten a module's output into named tensors.

    Raises:
        ExportError: it holds no tensor, or values other than tensors; or the number of ``names`` differs from that of
            its tensors; or two outputs have one name, or a name is empty.
    """
    paths = pytree.tree_flatten_with_path(outputs)[0]
    leaves = [(path, leaf) for path, leaf in paths if torch.is_tensor(leaf)]
    others = [leaf for _, leaf in paths if leaf is not None and not torch.is_tensor(leaf)]
    if not leaves:
        raise ExportError(f"the model returns {type(outputs).__name__}, which holds no tensor; return tensors")
    if others:
        shown = repr(others[0]) if isinstance(others[0], bool | int | float | str) else type(others[0]).__name__
        raise ExportError(f"the model returns {shown} as well as tensors, which a graph cannot; return tensors only")
    if names and len(names) != len(leaves):
        raise ExportError(f"the model has {len(leaves)} outputs, but {len(names)} names were given: {', '.join(names)}")
    _check_names(names := list(names) or [_name(path) for path, _ in leaves])
    return {name: leaf for name, (_, leaf) in zip(names, leaves, strict=True)}


def _check_names(names: Sequence[str]) -> None:
    shown = ", ".join(f"'{name}'" for name in names)
    remedy = "rename them in what the model returns, or name all outputs with --output-name (in Python output_names)"
    if "" in names:
        raise ExportError(f"an output of the model has the empty name (its outputs are {shown}); {remedy}")
    if len(set(names)) < len(names):
        raise ExportError(f"two outputs of the model have one name (its outputs are {shown}); {remedy}")


def _name(path: tuple[Any, ...]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", "")))) for key in path]
    if not parts:
        return "output"
    return f"output_{'_'.join(parts)}" if parts[0].isdecimal() else ".".join(parts)


_EXPORTERS = ("torch", "onnxscript", "onnx_ir")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of torch's exporters, which is for their developers; failures are exceptions."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _EXPORTERS]
    # Not by their levels: setting hundreds of those clears every logger's cache each time.
    loggers = [logger for name in names if not (logger := logging.getLogger(name)).disabled]
    try:
        for logger in loggers:
            logger.disabled = True
        # torch.export prints the graph so far when it fails.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger in loggers:
            logger.disabled = False
