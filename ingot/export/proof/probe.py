"""Observations of a running model: whether its outputs repeat, and which buffers and inputs it changes."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ingot.errors import ExportError, ParityError
from ingot.export.program import Eager, Runner, States, Within
from ingot.export.proof.examples import Examples, Limit
from ingot.export.proof.parity import unrepeated
from ingot.export.torch_internals import own_buffers, version
from ingot.tensors import Array, DType, TensorSpec


def find_states(eager: Eager, inputs: Mapping[str, Array]) -> States:
    """Run a model once and return the buffers and inputs that it changes. The module itself stays unchanged.

    Raises:
        ExportError: the model does not run, or changes a parameter.
    """
    tensors = eager.tensors(inputs)
    versions = {name: version(value) for name, value in eager.module.named_parameters()}
    before = [tensor.clone() for tensor in tensors]
    args, kwargs = eager.arguments.bind(tensors)
    with unchanged(eager.module) as saved, torch.no_grad():
        eager.module(*args, **kwargs)
        now = dict(eager.module.named_buffers())
        buffers = [name for name, value in saved.items() if name not in now or not same(value, now[name])]
    written = [name for name, value in eager.module.named_parameters() if version(value) != versions[name]]
    if written:
        raise ExportError(f"the model changes its parameter {written[0]} while it runs; make it a buffer")
    changed = [name for name, old, new in zip(eager.names, before, tensors, strict=True) if not same(old, new)]
    return States(tuple(buffers), tuple(changed))


def overwritten(eager: Eager, buffers: Sequence[str], inputs: Mapping[str, Array]) -> tuple[str, ...]:
    """Return those of the buffers that a model changes whose values before a call have no effect on it.

    The second call counts as well: a flag among the buffers may end the overwriting after the first.
    """

    def call(
        changed: Sequence[str], start: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, Array], dict[str, torch.Tensor]] | None:
        values = {**start, **{name: _other_values(eager.module.get_buffer(name)) for name in changed}}
        with unchanged(eager.module):
            for name, value in values.items():
                owner = eager.module.get_submodule(name.rpartition(".")[0])
                setattr(owner, name.rpartition(".")[2], value.clone())
            try:
                outputs = Eager(eager.module, eager.arguments, eager.output_names).run(inputs)
            except ExportError:
                return None
            return outputs, {name: eager.module.get_buffer(name).clone() for name in buffers}

    first = call((), {}) if buffers else None
    second = None if first is None else call((), first[1])
    if first is None or second is None:
        return ()

    def has_no_effect(changed: Sequence[str]) -> bool:
        for start, expected in (({}, first), (first[1], second)):
            found = call(changed, start)
            if found is None or not _alike(found[0], expected[0]):
                return False
            if not all(same(value, expected[1][name]) for name, value in found[1].items()):
                return False
        return True

    if has_no_effect(buffers):
        return tuple(buffers)
    return tuple(name for name in buffers if len(buffers) > 1 and has_no_effect([name]))


def _other_values(buffer: torch.Tensor) -> torch.Tensor:
    """Return values that show in any result that is computed with them."""
    if buffer.is_floating_point() or buffer.is_complex():
        return torch.full_like(buffer, math.nan)
    return ~buffer if buffer.dtype is torch.bool else buffer + 1


def _alike(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    return all(np.array_equal(value, right[name], equal_nan=value.dtype.kind in "fc") for name, value in left.items())


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@contextlib.contextmanager
def counting(module: nn.Module) -> Iterator[list[float]]:
    """Yield a list that collects the FLOPs of each call of a layer with weights; other products are not counted."""
    counts: list[float] = []

    def count(layer: nn.Module, args: tuple[Any, ...], output: object) -> None:
        weight: Any = layer.weight
        transposed = isinstance(layer, _LAYERS[-3:])
        value = args[0] if transposed and args else output
        if torch.is_tensor(value) and weight.ndim > 1:
            counts.append(2.0 * weight.numel() * value.numel() / weight.shape[0])

    handles = [part.register_forward_hook(count) for part in module.modules() if isinstance(part, _LAYERS)]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def index_limits(eager: Eager, inputs: Mapping[str, Array]) -> dict[str, Limit]:
    """Run a model once and return the number of rows of the embeddings that its integer inputs index."""
    tensors = eager.tensors(inputs)
    whole = {id(tensor): name for name, tensor in zip(eager.names, tensors, strict=True)}
    found: dict[str, int] = {}

    def watch(part: nn.Module, args: tuple[Any, ...]) -> None:
        name = whole.get(id(args[0])) if args else None
        if name is not None:
            rows = int(part.num_embeddings)  # type: ignore[arg-type]
            found[name] = min(rows, found.get(name, rows))

    layers = [part for part in eager.module.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    if not layers:
        return {}
    handles = [part.register_forward_pre_hook(watch) for part in layers]
    try:
        args, kwargs = eager.arguments.bind(tensors)
        with unchanged(eager.module), torch.no_grad():
            eager.module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: Limit(rows) for name, rows in found.items()}


def check_repeats(eager: Eager, examples: Examples) -> None:
    """Check that a model returns the same outputs for the same input after a call with another.

    Raises:
        ParityError: it is random, or keeps a state that is not a buffer.
    """
    with unchanged(eager.module):
        before = _attributes(eager.module)
        name = unrepeated(eager, examples)
        changed = [key for key, value in _attributes(eager.module).items() if before.get(key) != value]
        remembers = name is not None and not changed and _remembers(eager, examples)
    if name is None:
        return
    if remembers and isinstance(eager.module, torch.jit.ScriptModule):
        raise ParityError(
            f"the model returns different '{name}' for the same input each time: the TorchScript keeps a state between "
            "calls, which a graph would drop. Export its source code, with the state as an input and an output of "
            "forward, or an ONNX file of its authors that has them"
        )
    cause = "disable its randomness in eval mode, or make its state an input"
    if remembers:
        cause = "it keeps a state between calls; register it as a buffer and use --lift-state"
    if changed:
        cause = f"its attribute '{changed[0]}' changes at each call; register it as a buffer and use --lift-state"
    raise ParityError(f"the model returns different '{name}' for the same input each time; {cause}")


def _remembers(eager: Eager, examples: Examples) -> bool:
    """Return whether a model's outputs differ between two calls with the same random numbers."""
    inputs = examples.make(examples.default_sizes)
    runs = []
    with torch.random.fork_rng(devices=[]):
        for _ in range(2):
            torch.manual_seed(0)
            runs.append(eager.run(inputs))
    return any(not np.array_equal(array, runs[1][name]) for name, array in runs[0].items())


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Yield copies of a module's buffers, and restore them at the end."""
    owners = {path: (part, dict(own_buffers(part))) for path, part in module.named_modules()}
    saved = {name: value.clone() for name, value in module.named_buffers()}
    try:
        yield saved
    finally:
        with torch.no_grad():
            for path, (part, buffers) in owners.items():
                if not isinstance(part, torch.jit.ScriptModule):  # its buffers can be written in place only
                    own_buffers(part).clear()
                    own_buffers(part).update(buffers)
                for name, value in buffers.items():
                    copy = saved.get(f"{path}.{name}" if path else name)  # none where a buffer has two names
                    if value is not None and copy is not None and not same(value, copy):
                        value.copy_(copy)


Attributes = dict[nn.Module, dict[str, Any]]
"""The attributes of each part of a module."""


def attributes(module: nn.Module) -> Attributes:
    """Return the attributes of a module's parts, to compare or restore them later; TorchScript has none."""
    return {part: dict(vars(part)) for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)}


def reset(module: nn.Module, before: Attributes) -> list[str]:
    """Restore the attributes of a module's parts, and return the paths of those that had changed."""
    changed = []
    for path, part in module.named_modules():
        now, old = vars(part), before.get(part, vars(part))
        changed += [f"{path}.{name}" if path else name for name in now if now[name] is not old.get(name, before)]
        if now is not old:
            now.clear()
            now.update(old)
    return changed


class Forgetful(Eager):
    """A module whose attributes are restored before each call, so that no call depends on an earlier one."""

    def __init__(self, eager: Eager, before: Attributes):
        super().__init__(eager.module, eager.arguments, eager.output_names, eager.states, eager.caches)
        self._before = before

    def run(self, inputs: Mapping[str, Array], within: Within | None = None) -> dict[str, Array]:
        """Run the module as for the first time."""
        reset(self.module, self._before)
        return super().run(inputs, within)


def output_specs(runner: Runner, examples: Examples, budget: float = 60.0) -> tuple[TensorSpec, ...]:
    """Describe a model's outputs by running it at several sizes, for graphs without output shapes.

    A dimension that always has the size of a named dimension gets its name; one that varies otherwise gets a new name.
    After ``budget`` seconds no further case begins, except the first three. The cases are those of the proof of parity.
    """
    cases: list[Mapping[str, int]] = []
    runs: list[dict[str, Array]] = []
    end = time.monotonic() + budget
    for seed, sizes in enumerate(examples.cases()):
        if len(cases) >= 3 and time.monotonic() > end:
            break
        try:
            runs.append(runner.run(examples.make(sizes, seed)))
        except ExportError:
            if not runs or not examples.stretched:
                raise
            try:
                runs.append(runner.run(examples.make(sizes, seed, varied=False)))
            except ExportError:
                continue
        cases.append(sizes)
    specs = []
    for name, value in runs[0].items():
        shape: list[int | str] = []
        for axis in range(value.ndim):
            seen = [run[name].shape[axis] for run in runs]
            symbols = [symbol for symbol in cases[0] if seen == [sizes[symbol] for sizes in cases]]
            fixed = len(set(seen)) == 1 and (len(cases) > 1 or not cases[0])
            shape.append(symbols[0] if symbols else seen[0] if fixed else f"{name}_{axis}")
        specs.append(TensorSpec(name, DType.of(value), tuple(shape)))
    return tuple(specs)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes of a module's parts: numbers by value, tensors by identity, lists by length."""
    found: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.startswith("_") or name == "training":
                continue
            full = f"{path}.{name}" if path else name
            if isinstance(value, bool | int | float | str):
                found[full] = value
            elif torch.is_tensor(value):
                found[full] = (id(value), version(value))
            elif isinstance(value, list):
                found[full] = len(value)
    return found


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal, NaNs included."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return left is right or bool(torch.equal(left.nan_to_num(), right.nan_to_num()))
