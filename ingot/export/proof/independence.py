"""Tests whether the samples of a batch influence each other, so that requests must not share one."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Mapping
from dataclasses import replace

import numpy as np

from ingot.errors import InvalidArgument
from ingot.export.program import Runner
from ingot.export.proof import extremes
from ingot.export.proof.examples import Examples
from ingot.export.proof.parity import TOLERANCE
from ingot.tensors import Array, DType, Signature, arrays


def unbatchable(reference: Runner, signature: Signature, batch: str, examples: Examples) -> str | None:
    """Return the reason why requests must not share a batch along ``batch``, or None if they may.

    A batch is compared with its samples run one by one: with a model that, say, subtracts the batch's mean, each
    response would otherwise depend on other clients' data.
    """
    for spec in signature.outputs:
        if spec.shape.count(batch) != 1:
            return f"output '{spec.name}' has {spec.shape.count(batch)} dimensions '{batch}', not one"
    sizes = examples.default_sizes
    if not examples.affordable(sizes) and 2 in signature.range(batch):
        sizes = {**sizes, batch: 2}
    if sizes[batch] < 2:
        return f"dimension '{batch}' is never more than 1"
    if 1 not in signature.range(batch):
        return f"dimension '{batch}' is never 1, so samples cannot be run one by one"
    axes = replace(signature, batch=batch).batch_axes((*signature.inputs, *signature.outputs))
    try:
        inputs, others = examples.make(sizes, seed=101), examples.make(sizes, seed=102)
        whole = reference.run(inputs)
    except InvalidArgument:  # the model may reject values that are not the user's
        inputs = others = examples.make(sizes)
        whole = reference.run(inputs)
    samples = [_sample(inputs, axes, index) for index in range(sizes[batch])]
    if all(_equal(samples[0], sample) for sample in samples):
        integer = next((spec for spec in signature.inputs if spec.dtype.is_integer and spec.name in axes), None)
        values = (
            f"declare a range of values, such as --input '{replace(integer, values=None)}=0..120', or "
            if integer
            else ""
        )
        return (
            "the samples of the example are all equal, so they cannot be proved independent; "
            f"{values}pass an --example with different samples"
        )
    if (output := _influenced_by_extremes(reference, whole, inputs, axes, signature.values)) is not None:
        return f"output '{output}' of a sample depends on the other samples"
    for index, own in enumerate(samples):
        mixed = {
            name: _with_sample(others[name], array, axes[name], index) for name, array in own.items() if name in axes
        }
        with contextlib.suppress(InvalidArgument):  # the model may reject this combination of samples
            among = _sample(reference.run({**inputs, **mixed}), axes, index)
            name, share = _most(_sample(whole, axes, index), among, 0.1)
            if share > 1:
                return f"output '{name}' of a sample depends on the other samples"
        name, share = _most(_sample(whole, axes, index), reference.run(own), 2)
        if share > 1:
            return f"output '{name}' of a sample depends on the other samples, or on how many there are"
    return None


def _influenced_by_extremes(
    reference: Runner,
    whole: Mapping[str, Array],
    inputs: Mapping[str, Array],
    axes: Mapping[str, int],
    limited: Container[str],
) -> str | None:
    """Return an output whose first sample changes when all other samples are extreme, if there is one.

    Inputs in ``limited`` keep their values.
    """
    for applies, change in extremes.KINDS.values():
        rng = np.random.default_rng(103)
        changed = {
            name: change(array, rng) if name in axes and name not in limited and applies(DType.of(array)) else array
            for name, array in inputs.items()
        }
        own = _sample(inputs, axes, 0)
        first = {name: _with_sample(changed[name], own[name], axes[name], 0) for name in inputs if name in axes}
        with contextlib.suppress(InvalidArgument):  # the model may reject extreme values
            actual = _sample(reference.run({**inputs, **changed, **first}), axes, 0)
            name, share = _most(_sample(whole, axes, 0), actual, 0.1)
            if share > 1:
                return name
    return None


def _most(expected: Mapping[str, Array], actual: Mapping[str, Array], times: float) -> tuple[str, float]:
    """Return the output with the largest error, and this error relative to ``times`` the tolerance of its datatype."""
    shares = {}
    for name, value in expected.items():
        allowed = times * TOLERANCE.get(DType.of(value), TOLERANCE[DType.FP32])
        shares[name] = arrays.departure(value, actual[name]) / allowed
    worst = max(shares, key=lambda name: shares[name])
    return worst, shares[worst]


def _with_sample(array: Array, sample: Array, axis: int, index: int) -> Array:
    changed = np.moveaxis(array.copy(), axis, 0)
    changed[index] = np.moveaxis(sample, axis, 0)[0]
    return np.moveaxis(changed, 0, axis)


def _equal(left: Mapping[str, Array], right: Mapping[str, Array]) -> bool:
    return all(np.array_equal(value, right[name]) for name, value in left.items())


def _sample(arrays: Mapping[str, Array], axes: Mapping[str, int], index: int) -> dict[str, Array]:
    return {name: array.take([index], axes[name]) if name in axes else array for name, array in arrays.items()}
