"""Proof that a lowered model equals the one it came from, and that its rows do not touch each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ingot import arrays
from ingot.errors import ParityError
from ingot.export.examples import Examples
from ingot.export.program import Runner
from ingot.model_store import Golden, ParityEvidence
from ingot.tensors import Array, DType, Signature

# The largest error that rounding alone explains, as a share of the tensor's largest value.
TOLERANCE = {DType.FP64: 1e-8, DType.FP32: 1e-4, DType.FP16: 5e-3, DType.BF16: 4e-2}


def tolerance(signature: Signature) -> float:
    """Return the tolerance of a signature's least exact floating-point tensor; integers must always be equal."""
    dtypes = {spec.dtype for spec in (*signature.inputs, *signature.outputs)}
    return max((TOLERANCE[dtype] for dtype in dtypes if dtype in TOLERANCE), default=TOLERANCE[DType.FP32])


def prove(
    reference: Runner, candidate: Runner, signature: Signature, examples: Examples
) -> tuple[tuple[ParityEvidence, ...], tuple[Golden, ...]]:
    """Compare two models at every case of ``examples``.

    Returns:
        The worst error of each output, and the first two cases as goldens (the candidate's answers).

    Raises:
        ParityError: an output differs by more than the tolerance, or the reference itself is not deterministic.
    """
    limit = tolerance(signature)
    worst = dict.fromkeys((spec.name for spec in signature.outputs), 0.0)
    goldens: list[Golden] = []
    count = 0
    for seed, sizes in enumerate(examples.cases()):
        inputs = examples.make(sizes, seed)
        expected, actual = reference.run(inputs), candidate.run(inputs)
        for name, error in ((name, arrays.departure(expected[name], actual[name])) for name in expected):
            worst[name] = max(worst[name], error)
            if error > limit:
                if arrays.departure(expected[name], reference.run(inputs)[name]) > limit:
                    raise ParityError(
                        f"the model gives different '{name}' for the same input each time; "
                        "switch its randomness off in eval mode, or make its state an input"
                    )
                raise ParityError(_report(name, error, limit, expected[name], actual[name], inputs))
        count += 1
        if len(goldens) < 2:
            goldens.append(Golden(inputs, actual))
    evidence = tuple(
        ParityEvidence(tensor=name, error=error, tolerance=limit, cases=count) for name, error in worst.items()
    )
    return evidence, tuple(goldens)


def rows_touch(reference: Runner, signature: Signature, batch: str, examples: Examples) -> str | None:
    """Say why requests must not be joined along ``batch``, or return None when they may.

    A batch is compared with its rows run one by one: a model that, say, subtracts the batch's mean would otherwise
    answer each client with a share of the others' data.
    """
    for spec in signature.outputs:
        if spec.shape.count(batch) != 1:
            return f"output '{spec.name}' has {spec.shape.count(batch)} dimensions '{batch}', not one"
    sizes = examples.default_sizes
    if sizes[batch] < 2:
        return f"dimension '{batch}' is never more than 1"
    if 1 not in signature.range(batch):
        return f"dimension '{batch}' is never 1, so rows cannot be asked one by one"
    inputs = examples.make(sizes, seed=101)
    whole = reference.run(inputs)
    axes = replace(signature, batch=batch).batch_axes((*signature.inputs, *signature.outputs))
    limit = 10 * tolerance(signature)
    for row in range(sizes[batch]):
        alone = reference.run(_row(inputs, axes, row))
        name, error = arrays.worst_error(_row(whole, axes, row), alone)
        if error > limit:
            return f"output '{name}' of a row depends on the other rows (by {error:.1e} of its size)"
    return None


def _row(arrays: Mapping[str, Array], axes: Mapping[str, int], row: int) -> dict[str, Array]:
    return {name: array.take([row], axes[name]) if name in axes else array for name, array in arrays.items()}


def _report(name: str, error: float, limit: float, expected: Array, actual: Array, inputs: Mapping[str, Array]) -> str:
    shapes = ", ".join(f"{key} {list(array.shape)}" for key, array in inputs.items())
    head = f"the exported graph does not equal the PyTorch model: output '{name}'"
    if expected.shape != actual.shape:
        return f"{head} has shape {list(actual.shape)} instead of {list(expected.shape)} (inputs: {shapes})"
    if expected.dtype != actual.dtype:
        return f"{head} is {actual.dtype} instead of {expected.dtype} (inputs: {shapes})"
    where = _worst_element(expected, actual)
    values = f"{expected[where]!s} became {actual[where]!s} at {[int(index) for index in where]}"
    return f"{head} departs by {error:.2e} of its largest value, tolerance {limit:.0e}; {values} (inputs: {shapes})"


def _worst_element(expected: Array, actual: Array) -> tuple[np.intp, ...]:
    left, right = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isfinite(left) & np.isfinite(right), np.abs(left - right), np.where(left == right, 0, np.inf))
    return np.unravel_index(int(np.argmax(gap)), gap.shape)
