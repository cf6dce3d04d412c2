"""Proof that padding does not change a model's outputs, once these are cut back to the original sizes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ingot.bounds.samples import mixing_of, numbers_of
from ingot.errors import IngotError, ParityError
from ingot.export.program import Runner
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import tolerance
from ingot.tensors import Array, DType, Signature, arrays
from ingot.tensors.padding import Padder, Padding

# Cases with sizes next to numbers of the graph.
_MOST_NEAR = 8
# The number of cases, each padded by these numbers of steps and to these multiples.
_CASES = 6
_MORE = (1, 7)
_TIMES = (2, 4)


class Neutral(NamedTuple):
    """Paddings that change no output.

    Attributes:
        paddings: by dimension, with the masks of which a row that hides everything prevents padding.
        tried: the dimensions that only examples show, not the graph.
        remarks: a sentence on each proof.
    """

    paddings: dict[str, Padding]
    tried: tuple[str, ...]
    remarks: list[str]


def prove(
    runner: Runner, signature: Signature, paddings: Mapping[str, Padding], examples: Examples, graph: Path | None
) -> Neutral:
    """Prove that padding along each dimension, alone and together with the others, changes no output.

    The graph proves it where positions along a dimension never influence each other. Otherwise examples are padded:
    with ordinary and negative values, at sizes next to the graph's numbers, and with masks that hide all positions.

    Args:
        runner: the packed model.
        signature: the model's signature.
        paddings: the declared paddings, by dimension.
        examples: the source of the cases.
        graph: the packed ONNX graph, if there is one.

    Raises:
        ParityError: an output changes, or the model fails on padded inputs; the message names dimension and output.
    """
    remarks, found = [], dict(paddings)
    numbers = numbers_of(graph) if graph is not None and paddings else ()
    limit = tolerance(signature, examples.computed)
    apart = [dim for dim in paddings if graph is not None and mixing_of(graph, signature, dim) is None]
    remarks += [f"padding along '{dim}' changes no output: its positions never influence each other" for dim in apart]
    left = {dim: padding for dim, padding in paddings.items() if dim not in apart}
    sets = [{dim: padding} for dim, padding in left.items()]
    for chosen in [*sets, dict(left)] if len(sets) > 1 else sets:
        padder = Padder(signature, chosen)
        shown = " and ".join(f"'{dim}'" for dim in chosen)
        cases, worst = 0, 0.0
        for inputs in _cases(padder, examples, numbers):
            try:
                expected = runner.run(inputs)
            except IngotError:
                continue  # the model rejects these values; the proof of parity skipped the sizes too
            for target in _targets(padder, inputs):
                worst = max(worst, _error(runner, padder, inputs, expected, target, limit))
                cases += 1
        if not cases:
            raise ParityError(f"padding along {shown} cannot be proved: no example could be enlarged")
        masks = _masks(runner, padder, examples, limit)
        for dim, padding in chosen.items():
            known = {*found[dim].masks, *(name for name in masks if name in padding.values)}
            found[dim] = replace(padding, masks=tuple(sorted(known)))
        except_for = f", except for rows that {' or '.join(masks)} hides whole, which are not padded" if masks else ""
        remarks.append(
            f"padding along {shown} changes no output in {cases} cases, largest error {worst:.1e} "
            f"(tolerance {limit:.0e}){except_for}; its graph does not prove it for all values"
        )
    return Neutral(found, tuple(left), remarks)


def _cases(padder: Padder, examples: Examples, numbers: Sequence[int]) -> Iterator[dict[str, Array]]:
    """Yield inputs: ordinary ones, the same with negative values, and with sizes next to the numbers of the graph."""
    near = [
        {**examples.default_sizes, dim: size}
        for dim in padder.dims
        for number in numbers
        for size in (number - 1, number)
        if size in padder.signature.range(dim)
    ]
    near = [sizes for sizes in near if examples.affordable(sizes)][:_MOST_NEAR]
    for seed, sizes in enumerate((*itertools.islice(examples.cases(), _CASES), *near)):
        try:
            inputs = examples.make(sizes, seed)
        except IngotError:
            continue
        yield inputs
        if any(_is_free(examples, name, array) for name, array in inputs.items()):
            negative = {
                name: -np.abs(array) - array.dtype.type(1) if _is_free(examples, name, array) else array
                for name, array in inputs.items()
            }
            yield examples.fitted(negative)


def _is_free(examples: Examples, name: str, array: Array) -> bool:
    """Return whether an input may have any values, and so negative ones."""
    return DType.of(array).is_float and not examples.is_limited(name)


def _masks(runner: Runner, padder: Padder, examples: Examples, limit: float) -> list[str]:
    """Return the masks with which the outputs change by padding if a row of them hides all positions."""
    found = []
    values = {name: value for padding in padder.paddings.values() for name, value in padding.values.items()}
    for name in (flag for flag in examples.flags if flag in values):
        inputs = examples.make(examples.default_sizes, 1)
        hiding = inputs[name].copy()
        hiding[:1] = values[name]
        inputs[name] = hiding
        with contextlib.suppress(IngotError):  # the model may reject such a row
            expected = runner.run(inputs)
            try:
                for target in _targets(padder, inputs):
                    _error(runner, padder, inputs, expected, target, limit)
            except ParityError:
                found.append(name)
    return found


def _targets(padder: Padder, inputs: Mapping[str, Array]) -> list[tuple[int, ...]]:
    """Return the sizes to pad inputs to, within the ranges of the signature."""
    sizes = padder.sizes(inputs)
    ranges = [padder.signature.range(dim) for dim in padder.dims]
    wanted = [[size + more * bounds.step for size, bounds in zip(sizes, ranges, strict=True)] for more in _MORE]
    wanted += [[size * times for size in sizes] for times in _TIMES]
    found = [
        tuple(max(size, bounds.nearest(item)) for size, bounds, item in zip(sizes, ranges, larger, strict=True))
        for larger in wanted
    ]
    return [target for target in dict.fromkeys(found) if target != sizes]


def _error(
    runner: Runner,
    padder: Padder,
    inputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    target: tuple[int, ...],
    limit: float,
) -> float:
    """Return the largest error of the outputs for padded inputs.

    Raises:
        ParityError: it is over ``limit``.
    """
    steps = zip(padder.dims, padder.sizes(inputs), target, strict=True)
    where = ", ".join(f"'{dim}' from {size} to {larger}" for dim, size, larger in steps)
    remedy = "the model does not mask the padding, or not with that value; leave out --pad, or pass a value per input"
    try:
        actual = padder.cut(inputs, runner.run(padder.pad(inputs, target)))
    except IngotError as failure:
        raise ParityError(f"the model fails when it is padded along {where}: {failure}") from failure
    worst = 0.0
    for name, value in expected.items():
        if value.shape != actual[name].shape:
            raise ParityError(
                f"padded along {where}, output '{name}' has shape {list(actual[name].shape)} instead of "
                f"{list(value.shape)}: no named dimension of it shows how to cut it back; leave out --pad"
            )
        error = arrays.departure(value, actual[name])
        if not error <= limit:
            raise ParityError(
                f"padding along {where} changes the model's outputs: '{name}' differs by {error:.2e}, "
                f"tolerance {limit:.0e}; {remedy}"
            )
        worst = max(worst, error)
    return worst
