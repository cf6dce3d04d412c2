"""Limits of integer inputs that are used as indices, found by running the model."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ingot.errors import ExportError, InvalidArgument, RejectedInputs
from ingot.export.program import Runner
from ingot.export.proof.examples import Examples, Limit
from ingot.tensors import Array, TensorSpec
from ingot.tensors.values import ValueRange

# A value beyond most limits; if the model accepts it, the input is not treated as an index.
_FAR = 1000
# A larger size of a dimension, to see whether a limit grows with it.
_GROWN = 47

_Trial = Callable[[int, Mapping[str, int]], bool]


def find(runner: Runner, examples: Examples, known: Container[str] = ()) -> dict[str, Limit]:
    """Return the limits of integer inputs that are indices, except those ``known`` and those of a declared range.

    An index may select rows of a table, whose number is fixed, or of another input, whose number is a dimension. The
    model must run at the examples' default sizes.
    """
    found = {}
    for spec in examples.inputs:
        if spec.dtype.is_integer and spec.values is None and spec.name not in known:
            limit = _limit(runner, examples, spec)
            if limit is not None and _holds(runner, examples.limited({spec.name: limit})):
                found[spec.name] = limit
    return found


def check_ranges(runner: Runner, examples: Examples) -> None:
    """Check that a model that runs on one value of each declared range runs on others too, and on the ends.

    Examples that the model may reject anyway are not checked.

    Raises:
        ExportError: it does not.
    """
    declared = [spec for spec in examples.inputs if spec.values is not None]
    if not declared or examples.stretched:
        return
    sizes = examples.default_sizes
    reasons = (failure(runner, examples, sizes, seed) for seed in range(3))  # ordinary values, and those with an end
    reason = next(filter(None, reasons), None)
    if reason is None or not any(_runs_on(runner, examples.make(sizes), declared, end) for end in ("least", "high")):
        return
    shown = ", ".join(map(str, declared))
    raise ExportError(
        f"the model does not run on all values of {shown}: {reason}; declare a range that it accepts, "
        "or pass real inputs with --example"
    )


def _runs_on(runner: Runner, inputs: Mapping[str, Array], declared: Sequence[TensorSpec], end: str) -> bool:
    """Return whether a model runs where each declared input holds one value: that nearest to 0, or the upper end."""
    same = dict(inputs)
    for spec in declared:
        high = None if spec.values is None else spec.values.high
        same[spec.name] = np.full_like(
            inputs[spec.name], spec.nearest_to_zero if end == "least" or high is None else high
        )
    return _failure(runner, same) is None


def proved(runner: Runner, examples: Examples, ranges: Mapping[str, ValueRange]) -> dict[str, ValueRange]:
    """Return the ranges, derived from a graph, that the original has too: it runs on both ends, and not beyond.

    The original may refuse negative indices where the graph counts them from the end: then the range begins at 0.

    Args:
        runner: the original.
        examples: inputs that it runs on.
        ranges: by input; those of inputs with a declared range are left out.
    """
    found = {}
    inputs = examples.make(examples.default_sizes)
    for spec in examples.inputs:
        span = ranges.get(spec.name)
        if span is None or spec.values is not None or spec.name in examples.states or not inputs[spec.name].size:
            continue

        def runs(value: float, name: str = spec.name) -> bool:
            """Return whether the original runs on the example with one value replaced."""
            changed = inputs[name].copy()
            changed.flat[0] = value
            return _failure(runner, {**inputs, name: changed}) is None

        low, high, limits = int(span.low or 0), int(span.high or 0), np.iinfo(spec.dtype.numpy)
        if low < 0 <= high and not runs(low):
            low = 0
        # Of a range that begins at 0 an engine may refuse negative indices, also if the original does not.
        beyond = [high + 1, *([] if span.low == 0 else [low - 1])]
        beyond = [value for value in beyond if limits.min <= value <= limits.max]
        if runs(low) and runs(high) and not any(map(runs, beyond)):
            found[spec.name] = replace(span, low=low)
    return found


def zeros(examples: Examples) -> Examples:
    """Return examples whose integers without a known limit are zero."""
    return examples.limited({name: Limit(rows=1) for name in _unknown(examples)})


def zeros_at(examples: Examples, dim: str) -> Examples:
    """Return examples whose integers without a known limit are zero where ``dim`` is 1."""
    return examples.limited({name: Limit(rows=2, dims=(dim,)) for name in _unknown(examples)})


def _unknown(examples: Examples) -> Sequence[str]:
    return [spec.name for spec in examples.inputs if spec.dtype.is_integer and not examples.is_limited(spec.name)]


def _limit(runner: Runner, examples: Examples, spec: TensorSpec) -> Limit | None:
    def accepts(value: int, sizes: Mapping[str, int]) -> bool:
        inputs = examples.make(sizes)
        return _failure(runner, {**inputs, spec.name: np.full_like(inputs[spec.name], value)}) is None

    sizes = examples.default_sizes
    far = min(_FAR, int(np.iinfo(spec.dtype.numpy).max))
    if accepts(far, sizes) or not accepts(0, sizes):
        return None
    dims: list[str] = []
    rows: int | None = _first_rejected(accepts, sizes, far)
    while same := [dim for dim, size in sizes.items() if dim not in dims and size == rows]:
        dims += same
        grown = {dim: examples.ranges[dim].nearest(_GROWN * examples.ranges[dim].step) for dim in same}
        sizes = {**sizes, **grown}
        if all(sizes[dim] == rows for dim in same):
            return Limit(dims=tuple(dims))
        rows = None if accepts(far, sizes) else _first_rejected(accepts, sizes, far)
        if rows is None or rows in grown.values():
            return Limit(dims=tuple(dims))
    return Limit(rows, tuple(dims))


def _first_rejected(accepts: _Trial, sizes: Mapping[str, int], far: int) -> int:
    """Return the smallest rejected value, assuming that all below it are accepted; ``far`` is rejected."""
    low, high = 0, 1
    while high < far and accepts(high, sizes):
        low, high = high, 2 * high
    high = min(high, far)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle, sizes) else (low, middle)
    return high


def _holds(runner: Runner, examples: Examples) -> bool:
    """Return whether the model accepts random values below the limits, at the default and at the minimum sizes."""
    least = {dim: bounds.nearest(0) for dim, bounds in examples.ranges.items()}
    if failure(runner, examples, examples.default_sizes, seed=1) is not None:
        return False
    return failure(runner, zeros(examples), least) is not None or failure(runner, examples, least, seed=1) is None


def failure(runner: Runner, examples: Examples, sizes: Mapping[str, int], seed: int = 0) -> str | None:
    """Return the model's error on inputs of the given sizes, or None if it runs."""
    return _failure(runner, examples.make(sizes, seed))


def _failure(runner: Runner, inputs: Mapping[str, Array]) -> str | None:
    return failure_of(lambda: runner.run(inputs))


def failure_of(call: Callable[[], object]) -> str | None:
    """Return the error of a call that runs the model, or None if it runs."""
    try:
        call()
    except RejectedInputs as error:
        return " ".join(error.reason.split())[:200]
    except InvalidArgument as error:  # ExportError of a module
        cause = error.__cause__
        return f"{type(cause).__name__}: {' '.join(str(cause).split())[:200]}" if cause else str(error)
    return None
