"""Inputs on which the original defines its outputs: it accepts them, and returns no NaN that a graph need not return.

A mask that hides all positions of a row has no defined result: the original returns NaN or fails, and the graph may
return anything. Other values of the flags are drawn then, with the opposite meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ingot.errors import InvalidArgument
from ingot.export.program import Runner
from ingot.export.proof.examples import Examples
from ingot.tensors import Array, DType

# The most flags whose meaning is changed one by one, after that of all together.
_FLAGS = 4


def settled(runner: Runner, examples: Examples) -> Examples:
    """Return examples whose flags have the meaning with which a model is defined at its smallest sizes."""
    default, ranges = examples.default_sizes, examples.ranges
    least = [{**default, dim: bounds.nearest(0)} for dim, bounds in ranges.items()] if examples.flags else []
    for drawn in _meanings(examples):
        if all(_is_defined(runner, drawn.make(sizes)) for sizes in least):
            return drawn
    return examples


def accepted(
    reference: Runner,
    examples: Examples,
    sizes: Mapping[str, int],
    seed: int,
    states: Mapping[str, Array],
    *,
    needed: bool,
) -> Iterator[tuple[dict[str, Array], dict[str, Array]]]:
    """Yield inputs of these sizes that the original accepts, and its outputs, until the caller stops.

    ``states`` are inputs that continue from another case.

    Raises:
        InvalidArgument: it accepts none, and ``needed`` is set.
    """
    failures: list[InvalidArgument] = []
    found = False
    for inputs in _drawn(examples, sizes, seed):
        inputs |= states
        try:
            expected = reference.run(inputs)
        except InvalidArgument as failure:  # ExportError of a module, its parent of an ONNX file
            failures.append(failure)
            continue
        found = True
        yield inputs, expected
    if needed and not found:
        raise failures[0]


def defined(inputs: Mapping[str, Array], expected: Array, actual: Array) -> Array:
    """Return the expected output of the graph: any number where the original returns NaN, unless an input holds NaN."""
    if expected.shape != actual.shape or not DType.of(expected).is_float:
        return expected
    free = np.isnan(expected) & ~np.isnan(actual)
    if not free.any() or any(map(_holds_nan, inputs.values())):
        return expected
    return np.where(free, actual, expected)


def _drawn(examples: Examples, sizes: Mapping[str, int], seed: int) -> Iterator[dict[str, Array]]:
    for drawn in _meanings(examples):
        yield drawn.make(sizes, seed)
        if examples.stretched:  # the model may reject perturbed values
            yield drawn.make(sizes, seed, varied=False)
    for fill in (np.zeros_like, np.ones_like) if examples.flags else ():
        inputs = examples.make(sizes, seed)
        yield inputs | {name: fill(inputs[name]) for name in examples.flags}


def _meanings(examples: Examples) -> Iterator[Examples]:
    yield examples
    flags = examples.flags[:_FLAGS]
    if flags:
        yield examples.opposite(flags)
    for flag in flags if len(flags) > 1 else ():
        yield examples.opposite([flag])


def _is_defined(runner: Runner, inputs: Mapping[str, Array]) -> bool:
    try:
        return not any(map(_holds_nan, runner.run(inputs).values()))
    except InvalidArgument:
        return False


def _holds_nan(array: Array) -> bool:
    return DType.of(array).is_float and bool(np.isnan(array).any())
