"""Sizes that a model runs at, found by running it, for declarations that are too wide."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from ingot.errors import ExportError
from ingot.export.program import Runner
from ingot.export.proof.examples import LARGEST, Examples
from ingot.export.proof.indices import failure, zeros_at
from ingot.tensors import Range

# Steps of models that halve images or cut them into windows and patches, the most likely first.
_FACTORS = (2, 4, 8, 16, 32, 64, 6, 12, 24, 48, 14, 28, 56, 112)


def stepped(runner: Runner, examples: Examples) -> Examples | None:
    """Return examples with steps or larger minimum sizes of dimensions, at which a model runs; None if none is found.

    Dimensions that are always the first are left unchanged, since batch sizes seldom have steps.
    """
    free = [dim for dim in examples.ranges if any(dim in spec.shape[1:] for spec in examples.inputs)]
    for factor in _FACTORS if free else ():
        ranges = {dim: _in_steps(examples.ranges[dim], factor) for dim in free}
        whole = {dim: bounds for dim, bounds in ranges.items() if bounds is not None}
        if len(whole) == len(free) and failure(runner, examples, examples.within(whole).default_sizes) is None:
            return _refined(runner, examples, whole)
    return None


def narrowed(runner: Runner, examples: Examples, *, strict: bool = True) -> tuple[Examples, list[str]]:
    """Return examples within the sizes that a model runs at, and a note on each dimension that it limits.

    The model must run at the examples' default sizes. Each dimension is tried at its smallest and largest case.

    Args:
        runner: the model.
        examples: inputs that it runs on.
        strict: refuse a declared end that the model rejects; otherwise it is lowered.

    Raises:
        ExportError: the model runs at one size only of a dimension that is declared dynamic, or rejects a declared end.
    """
    notes = []
    for dim, size in itertools.product(examples.ranges, (0, LARGEST)):
        bounds, default = examples.ranges[dim], examples.default_sizes
        case = {**default, dim: bounds.nearest(size * bounds.step)}
        if size == LARGEST and not examples.affordable(case):  # the proof leaves it out too
            continue
        if (error := failure(runner, examples, case)) is not None:
            together = {other: item.nearest(size * item.step) for other, item in examples.ranges.items()}
            if size == 0 and failure(runner, zeros_at(examples, dim), case) is None:
                examples = zeros_at(examples, dim)
            elif together != case and failure(runner, examples, together) is None:
                examples = examples.related().at([together])
                shown = ", ".join(f"{other}={item}" for other, item in default.items() if other != dim)
                notes.append(f"not proved at {dim}={case[dim]} with {shown}, where the model does not run ({error})")
            else:
                examples = examples.within({dim: _within(runner, examples, dim, case[dim], error)})
                reason, shown = (
                    f"the model does not run at {dim}={case[dim]} ({error})",
                    declared(examples.ranges, [dim]),
                )
                if strict and size == LARGEST and bounds.high is not None:
                    raise ExportError(f"{reason}; declare {shown}")
                notes.append(f"{reason}; the archive accepts {shown}")
    return examples, notes


def _within(runner: Runner, examples: Examples, dim: str, end: int, error: str) -> Range:
    """Return a dimension's range up to the last size before ``end`` at which the model runs."""
    bounds, default = examples.ranges[dim], examples.default_sizes
    last = _last(runner, examples, default, dim, end)
    low, high = (last, bounds.high) if end < default[dim] else (bounds.low, last)
    if low == high:
        raise ExportError(
            f"the model runs at {dim}={last} only, of the sizes that were tried ({error}): declare '{dim}' as a number "
            "or as a range that the model accepts, or pass real inputs with --example"
        )
    return Range(low, high, bounds.step)


def changes(before: Examples, after: Examples) -> list[str]:
    """Return a note on the dimensions whose ranges differ, if any do."""
    changed = [dim for dim, bounds in after.ranges.items() if bounds != before.ranges[dim]]
    if not changed:
        return []
    shown = declared(after.ranges, changed)
    return [f"the model does not run at all sizes; found by trying, the archive accepts {shown}"]


def declared(ranges: Mapping[str, Range], dims: Sequence[str]) -> str:
    """Return dimensions as the user declares them in ``--input``."""
    return ", ".join(f"{dim}={ranges[dim]}" for dim in dims)


def _in_steps(bounds: Range, factor: int) -> Range | None:
    step = bounds.step * factor
    low, high = -(-bounds.low // step) * step, None if bounds.high is None else bounds.high // step * step
    return None if high is not None and high < low else Range(low, high, step)


def _refined(runner: Runner, examples: Examples, ranges: Mapping[str, Range]) -> Examples | None:
    """Return examples with the smallest step and the smallest size of each dimension at which a model runs."""
    sizes = examples.within(ranges).default_sizes
    found = {}
    for dim, bounds in ranges.items():
        step = _least_step(runner, examples, sizes, dim, bounds.step)
        narrower = step and _in_steps(examples.ranges[dim], step // examples.ranges[dim].step)
        if not narrower:
            return None  # it runs at this size only
        least = _last(runner, examples.within({dim: narrower}), sizes, dim, narrower.low)
        found[dim] = Range(least, narrower.high, narrower.step)
    result = examples.within(found)
    # A model that rounds sizes up runs at some sizes between the steps, but not at all of them.
    return result if failure(runner, result, result.default_sizes) is None else examples.within(ranges)


def _least_step(runner: Runner, examples: Examples, sizes: Mapping[str, int], dim: str, most: int) -> int | None:
    """Return the smallest step, up to ``most``, from a dimension's size to another at which the model runs."""
    own = examples.ranges[dim]
    for step in range(own.step, most + 1, own.step):
        for size in (sizes[dim] + step, sizes[dim] - step):
            if most % step == 0 and size in own and failure(runner, examples, {**sizes, dim: size}) is None:
                return step
    return None


def _last(runner: Runner, examples: Examples, sizes: Mapping[str, int], dim: str, end: int) -> int:
    """Return the size closest to ``end`` at which a model runs."""
    if failure(runner, examples, {**sizes, dim: end}) is None:
        return end
    step = examples.ranges[dim].step
    accepted, rejected = sizes[dim] // step, end // step
    while abs(accepted - rejected) > 1:
        middle = (accepted + rejected) // 2
        if failure(runner, examples, {**sizes, dim: middle * step}) is None:
            accepted = middle
        else:
            rejected = middle
    return accepted * step
