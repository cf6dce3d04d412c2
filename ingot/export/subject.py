"""The subject of an export: the module, its described inputs and examples of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ingot.errors import ExportError, InvalidArgument
from ingot.export import arguments, probe
from ingot.export.arguments import Arguments
from ingot.export.examples import Examples, infer_specs
from ingot.export.program import Eager, States
from ingot.export.torch_arrays import from_torch
from ingot.tensors import Array, DType, Range, Signature, TensorSpec, check_inputs


@dataclass(frozen=True)
class Subject:
    """What is exported and how it is called."""

    eager: Eager
    inputs: tuple[TensorSpec, ...]
    ranges: Mapping[str, Range]
    examples: Examples
    output_names: tuple[str, ...]

    @property
    def example(self) -> dict[str, Array]:
        """Inputs with every dimension at its default size."""
        return self.examples.make(self.examples.default_sizes)


def prepare(
    module: nn.Module,
    example_inputs: Any,
    inputs: Sequence[TensorSpec],
    ranges: Mapping[str, Range],
    constants: Mapping[str, Any],
    output_names: Sequence[str],
    lift_state: bool,
) -> Subject:
    """Bind descriptions and examples to a module, and run it on them.

    Raises:
        InvalidArgument: they do not fit the module or each other, or there are none.
        ExportError: the module does not run on them, or changes its state and ``lift_state`` is not set.
        ParityError: it does not repeat itself.
    """
    given: dict[str, Array] | None = None
    if example_inputs is not None:
        call, tensors = arguments.from_example(module, example_inputs, constants)
        call, given = _called_as_described(call, tensors, inputs, by_name=isinstance(example_inputs, Mapping))
        described = _in_order(inputs, call.names) if inputs else infer_specs(call.names, given, "batch")
    elif inputs:
        call = arguments.from_names(module, [spec.name for spec in inputs], constants)
        described = tuple(inputs)
    else:
        raise InvalidArgument(
            "nothing says what the model takes; give inputs (--input), such as image:float32[batch,3,224,224], "
            "or example inputs (--example)"
        )
    eager = Eager(module, call, output_names)
    examples = Examples(described, ranges, given)
    example = examples.make(examples.default_sizes)
    with probe.unchanged(module):
        eager.run(example)  # before anything else: this failure is the user's, and reads best by itself
    limits = probe.index_limits(eager, example) if given is None else {}
    if limits:
        examples = Examples(described, ranges, limits=limits)
        example = examples.make(examples.default_sizes)
    states = _states(eager, example, lift_state)
    if states:
        values = {name: from_torch(module.get_buffer(name)) for name in states.buffers}
        described += tuple(TensorSpec(name, DType.of(value), value.shape) for name, value in values.items())
        eager = Eager(module, call, output_names, states)
        examples = Examples(described, ranges, given, limits, values)
    probe.check_repeats(eager, examples)
    named = eager.run(examples.make(examples.default_sizes))
    taken = {spec.name for spec in described} & set(named)
    if taken:
        raise InvalidArgument(f"'{min(taken)}' names an input and an output; give the outputs other names")
    return Subject(eager, described, ranges, examples, tuple(named))


def _called_as_described(
    call: Arguments, tensors: Mapping[str, torch.Tensor], inputs: Sequence[TensorSpec], by_name: bool
) -> tuple[Arguments, dict[str, Array]]:
    """Return the example under the names of the description; arguments given in order take its names in order."""
    arrays = {name: from_torch(tensor) for name, tensor in tensors.items()}
    names = [spec.name for spec in inputs]
    if not inputs or set(names) == set(arrays):
        return call, arrays
    if by_name or len(names) != len(arrays):
        check_inputs(Signature(tuple(inputs), ()), arrays)  # says which is missing or unknown
    return replace(call, names=tuple(names)), dict(zip(names, arrays.values(), strict=True))


def _in_order(inputs: Sequence[TensorSpec], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    by_name = {spec.name: spec for spec in inputs}
    return tuple(by_name[name] for name in names)


def _states(eager: Eager, example: Mapping[str, Array], lift: bool) -> States:
    """Return what the module changes, or refuse it."""
    states = probe.find_states(eager, example)
    if states and not lift:
        raise ExportError(
            f"the model changes {', '.join(sorted(states.names))} while it runs, which a served graph would silently "
            "drop; return the new value as an output and take the old one as an input, or let --lift-state do that"
        )
    return states
