"""The subject of an export: the module, its described inputs and examples of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ingot import foreign
from ingot.errors import ExportError, InvalidArgument
from ingot.export import arguments
from ingot.export.arguments import Arguments
from ingot.export.program import Eager
from ingot.export.proof import draws, indices, misdeclared, probe, sizes, states, tables
from ingot.export.proof.examples import Examples, infer_specs
from ingot.export.snapshot import Snapshot
from ingot.export.source import defaults
from ingot.runtime.engines.pytorch.torch_arrays import from_torch
from ingot.tensors import Array, DType, Range, Signature, TensorSpec, check_inputs, parse_spec, symbols


@dataclass(frozen=True)
class Subject:
    """A module to export, how it is called, and ``notes`` on its behaviour."""

    eager: Eager
    inputs: tuple[TensorSpec, ...]
    ranges: Mapping[str, Range]
    examples: Examples
    output_names: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def example(self) -> dict[str, Array]:
        """Inputs with every dimension at its default size."""
        return self.examples.make(self.examples.default_sizes)


@dataclass(frozen=True)
class Description:
    """The description of a model's inputs, by the user or, with ``own``, by the model, with ``notes`` on it."""

    example: Any
    inputs: tuple[TensorSpec, ...]
    ranges: Mapping[str, Range]
    constants: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    own: bool = False


def describe(
    module: nn.Module,
    example_inputs: Any,
    inputs: str | Sequence[str | TensorSpec],
    constants: Mapping[str, Any] | None,
) -> Description:
    """Return the description of a model's inputs; the arguments are those of :func:`ingot.export.export_model`.

    Raises:
        InvalidArgument: a description is malformed, or there is none.
    """
    own = defaults.of(module)
    specs, ranges = parse_inputs(inputs)
    by_user = bool(specs)
    if example_inputs is None and not specs:
        example_inputs = own.example
        specs, ranges = parse_inputs(own.inputs)
    if example_inputs is None and not specs:
        raise InvalidArgument(
            "the model's inputs are not described; pass inputs (--input), such as image:float32[batch,3,224,224], "
            "or example inputs (--example)"
        )
    notes: tuple[str, ...] = ()
    if specs or not arguments.takes_any_keyword(module):
        known = [spec.name for spec in specs] or arguments.parameters(module)
        example_inputs, notes = arguments.inputs_among(example_inputs, known)
    if specs or isinstance(example_inputs, Mapping):
        notes = (*notes, *own.left_out([spec.name for spec in specs] or list(example_inputs)))
    return Description(example_inputs, specs, ranges, {**own.constants, **(constants or {})}, notes, own=not by_user)


def parse_inputs(inputs: str | Sequence[str | TensorSpec]) -> tuple[tuple[TensorSpec, ...], dict[str, Range]]:
    """Return the descriptions of inputs, and the ranges in them.

    Raises:
        InvalidArgument: one is malformed, an input is described twice, or a dimension has two ranges.
    """
    specs: list[TensorSpec] = []
    ranges: dict[str, Range] = {}
    for item in [inputs] if isinstance(inputs, str) else inputs:
        spec, stated = parse_spec(item) if isinstance(item, str) else (item, {})
        for symbol, bounds in stated.items():
            if ranges.setdefault(symbol, bounds) != bounds:
                raise InvalidArgument(f"dimension '{symbol}' has two ranges: {ranges[symbol]} and {bounds}")
        if spec.name in {other.name for other in specs}:
            raise InvalidArgument(f"input '{spec.name}' is described twice")
        specs.append(spec)
    return tuple(specs), ranges


def bind(module: nn.Module, description: Description) -> Subject:
    """Bind a description to a module, as for an export, but without running it.

    Raises:
        InvalidArgument: the description does not fit the module.
    """
    inputs, ranges = description.inputs, description.ranges
    if description.example is None:
        call = arguments.from_names(module, [spec.name for spec in inputs], description.constants)
        return Subject(Eager(module, call), inputs, ranges, Examples(inputs, ranges), ())
    call, tensors = arguments.from_example(module, description.example, description.constants)
    if inputs:
        return Subject(Eager(module, call), inputs, ranges, Examples(inputs, ranges), ())
    given = {name: from_torch(tensor) for name, tensor in tensors.items()}
    specs = infer_specs(call.names, given, "batch")
    return Subject(Eager(module, call), specs, ranges, Examples(specs, ranges, given), ())


def check_batch_dim(batch: str, inputs: Sequence[TensorSpec]) -> None:
    """Raise InvalidArgument if no input has a dimension of this name."""
    known = symbols(inputs)
    if batch not in known:
        raise InvalidArgument(f"no input has a dimension '{batch}'; the dynamic ones are: {', '.join(known) or 'none'}")


def prepare(
    module: nn.Module,
    description: Description,
    output_names: Sequence[str] = (),
    *,
    snapshot: Snapshot,
    lift_state: bool = False,
) -> Subject:
    """Bind a description to a module, and run it. Each call starts from the state in ``snapshot``.

    Raises:
        InvalidArgument: the description does not fit the module, or contradicts itself.
        ExportError: the module has no weights yet, does not run, or changes its state and ``lift_state`` is not set.
        ParityError: its outputs differ for the same input.
    """
    inputs, ranges, constants = description.inputs, description.ranges, description.constants
    if empty := next((name for name, weight in module.named_parameters() if is_lazy(weight)), None):
        raise ExportError(
            f"the parameter {empty} gets its size and values from the first call: call the module once on real inputs "
            "before it is exported, for example in the function that returns it"
        )
    given: dict[str, Array] | None = None
    remarks: tuple[str, ...] = ()
    if description.example is None:
        call, remarks = _called(module, description, snapshot)
        described = inputs
    else:
        call, tensors = arguments.from_example(module, description.example, constants)
        call, given = _called_as_described(call, tensors, inputs, by_name=isinstance(description.example, Mapping))
        described = _in_order(inputs, call.names) if inputs else infer_specs(call.names, given, "batch")
    eager = Eager(module, call, output_names, snapshot=snapshot)
    examples, notes = Examples(described, ranges, given), [*remarks]
    if given is None:
        examples, more = _fitted(eager, examples, strict=not description.own)
        notes += more
    else:  # first of all, so that a failure on the user's inputs is reported by itself
        examples = _weighed(eager, examples)
    examples, more = tables.bounded(eager, examples, strict=not description.own)
    notes += more
    calls = states.Calls(eager, examples)
    kept = states.find(calls)
    if kept.states and not lift_state:
        raise states.refused(calls, kept.states)
    if kept.scratch:
        notes.append(
            f"the model overwrites {', '.join(kept.scratch)} before it reads the value, so the graph does not keep it"
        )
    if kept.states:
        values = {name: from_torch(module.get_buffer(name)) for name in kept.states.buffers}
        described += tuple(TensorSpec(name, DType.of(value), value.shape) for name, value in values.items())
        examples = examples.with_states(described, values)
    if kept.states or kept.scratch:
        eager = Eager(module, call, output_names, kept.states, kept.scratch, snapshot)
        calls = states.Calls(eager, examples)
    notes += states.check(calls, kept)
    eager.caches = kept.filled
    named = calls.outputs[0]
    shared = {spec.name for spec in described} & set(named)
    if shared:
        raise InvalidArgument(f"'{min(shared)}' names an input and an output; choose other names of the outputs")
    ranges = {dim: bounds for dim, bounds in examples.ranges.items() if dim in ranges or bounds != Range()}
    return Subject(eager, described, ranges, examples, tuple(named), tuple(notes))


def _called(module: nn.Module, description: Description, snapshot: Snapshot) -> tuple[Arguments, tuple[str, ...]]:
    """Return how a module is called with inputs that have names only, and a remark if it matters.

    Raises:
        ExportError: the order of the inputs is not known, and matters.
    """
    names, constants = [spec.name for spec in description.inputs], description.constants
    call = arguments.from_names(module, names, constants)
    if not arguments.calls_other_code(module):
        return call, ()
    other = arguments.from_names(module, names, constants, by_keyword=True)
    examples = Examples(description.inputs, description.ranges)
    inputs = examples.make(examples.default_sizes)
    ways = [foreign.attempt(lambda: Eager(module, way, snapshot=snapshot).run(inputs)) for way in (call, other)]  # noqa: B023
    positional, keyword = ways
    if keyword is None or (positional is not None and states.alike(positional, keyword)):
        return call, ()
    if positional is None:
        return other, ()
    choice = "pass example inputs: a sequence to call it by position, or a mapping to call it by keyword"
    if len(names) > 1 and not arguments.parameters(module):
        raise ExportError(f"the model returns other values by position ({', '.join(names)}) than by keyword; {choice}")
    return call, (f"the model is called by position; by keyword it returns other values, for which {choice}",)


def _fitted(eager: Eager, examples: Examples, *, strict: bool) -> tuple[Examples, list[str]]:
    """Return generated examples that a model runs on, and notes on its sizes.

    Raises:
        ExportError: it runs on none of those tried, or with ``strict`` rejects a declared end.
    """
    notes: list[str] = []
    try:
        examples = _weighed(eager, examples)
    except ExportError as error:
        if "does not run" not in str(error):
            raise
        indices.check_ranges(eager, examples)
        fitting = _running(eager, examples)
        if fitting is None:
            remedy = misdeclared.remedy(eager, examples)
            raise ExportError(f"{error}; {remedy}" if remedy else str(error)) from error
        notes = sizes.changes(examples, fitting)
        examples = _weighed(eager, fitting)
    known = probe.index_limits(eager, examples.make(examples.default_sizes))
    examples = examples.limited(known)
    if eager.device.type == "cpu":  # on CUDA an index out of range makes the device unusable for the process
        examples = examples.limited(indices.find(eager, examples, known))
    indices.check_ranges(eager, examples)
    _check_flags(eager, examples)
    examples = draws.settled(eager, examples)
    examples, more = sizes.narrowed(eager, examples, strict=strict)
    return examples, [*notes, *more]


def _check_flags(eager: Eager, examples: Examples) -> None:
    """Check that a model that does not run on all integers of 0 and 1, as divisors, is not taken to limit its sizes.

    Raises:
        ExportError: it does not run on some of them, but on all values of a range.
    """
    seeds = range(1, 4) if examples.flags else ()
    reasons = (indices.failure(eager, examples, examples.default_sizes, seed) for seed in seeds)
    reason = next(filter(None, reasons), None)
    if reason is not None and (advice := misdeclared.by_values(eager, examples)):
        raise ExportError(f"the model does not run on some values of its inputs: {reason}; {advice}")


def _weighed(eager: Eager, examples: Examples) -> Examples:
    """Run a model at the examples' default sizes, and return examples with the FLOPs of that call."""
    example = examples.make(examples.default_sizes)
    with probe.counting(eager.module) as flops, contextlib.suppress(ExportError):
        eager.run(example)
        return examples.with_work(sum(flops))
    eager.run(example)  # torch.cond accepts no hooks of layers in its branches
    return examples


def _running(eager: Eager, examples: Examples) -> Examples | None:
    """Return examples at whose default sizes a model runs, with zeros for integers or with other sizes, or None."""
    zeros = indices.zeros(examples)
    if indices.failure(eager, zeros, zeros.default_sizes) is None:
        return zeros
    return sizes.stepped(eager, examples)


def _called_as_described(
    call: Arguments, tensors: Mapping[str, torch.Tensor], inputs: Sequence[TensorSpec], by_name: bool
) -> tuple[Arguments, dict[str, Array]]:
    """Return the example with the names of the description; positional arguments get its names in order."""
    arrays = {name: from_torch(tensor) for name, tensor in tensors.items()}
    names = [spec.name for spec in inputs]
    if not inputs or set(names) == set(arrays):
        return call, arrays
    if by_name or len(names) != len(arrays):
        check_inputs(Signature(tuple(inputs), ()), arrays)  # names the missing or unknown one
    return replace(call, names=tuple(names)), dict(zip(names, arrays.values(), strict=True))


def _in_order(inputs: Sequence[TensorSpec], names: Sequence[str]) -> tuple[TensorSpec, ...]:
    by_name = {spec.name: spec for spec in inputs}
    return tuple(by_name[name] for name in names)
