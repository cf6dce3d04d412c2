"""Proof that padding does not change a model's outputs, once these are cut back to the original sizes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ingot import arrays
from ingot.errors import IngotError, ParityError
from ingot.export.program import Runner
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import tolerance
from ingot.padding import Padder, Padding
from ingot.tensors import Array, Signature

# The number of cases, each padded by these numbers of steps and to these multiples.
_CASES = 6
_MORE = (1, 7)
_TIMES = (2, 4)


def prove(runner: Runner, signature: Signature, paddings: Mapping[str, Padding], examples: Examples) -> list[str]:
    """Pad examples along each dimension, alone and together with the others, and compare the outputs.

    Args:
        runner: the packed model.
        signature: the model's signature.
        paddings: the declared paddings, by dimension.
        examples: the source of the cases.

    Returns:
        One remark per dimension: the number of cases and the largest error.

    Raises:
        ParityError: an output changes, or the model fails on padded inputs; the message names dimension and output.
    """
    remarks = []
    sets = [{dim: padding} for dim, padding in paddings.items()]
    for chosen in [*sets, dict(paddings)] if len(sets) > 1 else sets:
        padder = Padder(signature, chosen)
        shown = " and ".join(f"'{dim}'" for dim in chosen)
        cases, worst = 0, 0.0
        for seed, sizes in enumerate(itertools.islice(examples.cases(), _CASES)):
            try:
                inputs = examples.make(sizes, seed)
                expected = runner.run(inputs)
            except IngotError:
                continue  # the model rejects these values; the proof of parity skipped the sizes too
            for target in _targets(padder, inputs):
                worst = max(worst, _error(runner, padder, inputs, expected, target, tolerance(signature)))
                cases += 1
        if not cases:
            raise ParityError(f"padding along {shown} cannot be proved: no example could be enlarged")
        remarks.append(
            f"padding along {shown} changes no output in {cases} cases, largest error {worst:.1e} "
            f"(tolerance {tolerance(signature):.0e})"
        )
    return remarks


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
