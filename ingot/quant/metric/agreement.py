"""The agreement of a quantized model's outputs with the original's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ingot.model_store.format.evidence import Agreement
from ingot.quant.data.samples import Samples
from ingot.quant.metric.base import has_value, pairs_of
from ingot.quant.metric.centre import find_centre, move
from ingot.tensors import Array, DType, Signature, arrays

Outputs = Mapping[str, Array]

# JSON has no infinity, and float32 ends at some 140 dB.
_SQNR_LIMIT = 200.0


def agreement(expected: Sequence[Outputs], actual: Sequence[Outputs]) -> tuple[Agreement, ...]:
    """Compare two models' outputs for the same batches, for each floating-point output.

    Args:
        expected: the original's outputs, one mapping per batch; the first axis of an array is the rows. Outputs
            without a finite value are omitted.
        actual: the quantized model's.
    """
    floats = [name for name, array in expected[0].items() if DType.of(array).is_float]
    names = [name for name in floats if any(has_value(batch[name]) for batch in expected)]
    return tuple(_compare(name, _rows(expected, name), _rows(actual, name)) for name in names)


def by_output(
    signature: Signature, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples
) -> tuple[tuple[Agreement, ...], list[str]]:
    """Compare all outputs of two models, with rows along the axes that the signature states.

    Args:
        signature: the signature of both.
        expected: the first's outputs, one mapping per batch of ``samples.batches()``.
        actual: the second's.
        samples: the inputs of both.

    Returns:
        The agreement of each floating-point output, and remarks on outputs without one.
    """
    found: list[Agreement] = []
    notes: list[str] = []
    for spec in signature.outputs:
        pairs = pairs_of(expected, actual, spec.name, samples)
        if not spec.dtype.is_float:
            equal, size = sum(int((left == right).sum()) for left, right in pairs), sum(left.size for left, _ in pairs)
            notes.append(f"'{spec.name}' is equal in {equal} of {size} values")
            continue
        if not any(has_value(left) for left, _ in pairs):
            notes.append(f"the first has no finite value in '{spec.name}', so it cannot be compared")
            continue
        (item,) = agreement([{spec.name: left} for left, _ in pairs], [{spec.name: right} for _, right in pairs])
        if math.isfinite(item.cosine) and math.isfinite(item.error):
            found.append(item)
        else:
            notes.append(f"the second returns NaN or infinity in '{spec.name}' where the first does not")
    return tuple(found), notes


def _compare(name: str, expected: Sequence[Array], actual: Sequence[Array]) -> Agreement:
    left, right = _joined(expected), _joined(actual)
    error = arrays.departure(left, right)
    centre = find_centre(expected)
    sound = np.isfinite(left)
    seen = move(left, right, centre)
    if not sound.all():  # masked values, such as minus infinity, have no direction
        left, right = np.where(sound, left, 0.0), np.where(sound, right, 0.0)
    several = left.shape[1] > 1
    return Agreement(
        tensor=name,
        cosine=_cosine(*seen, joined=centre is not None or not several),
        error=error,
        top1=float((left.argmax(axis=1) == right.argmax(axis=1)).mean()) if several else None,
        sqnr=_sqnr(left, right),
    )


def _cosine(left: Array, right: Array, joined: bool) -> float:
    """Return the mean cosine of the rows, or that of all rows as one."""
    if joined:
        left, right = left.reshape(1, -1), right.reshape(1, -1)
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)  # [rows]
    same = (left == right).all(axis=1)  # rows of zeros have no direction, but may be equal
    return float(np.where(same, 1.0, (left * right).sum(axis=1) / np.maximum(norms, 1e-100)).mean())


def _sqnr(left: Array, right: Array) -> float | None:
    """Return the signal-to-noise ratio in dB, or None if the signal is zero or not finite."""
    signal, noise = np.square(left).sum(), np.square(left - right).sum()
    if not (np.isfinite(signal) and np.isfinite(noise)) or signal == 0:
        return None
    decibels = 10 * np.log10(signal / noise) if noise > 0 else _SQNR_LIMIT
    return float(min(decibels, _SQNR_LIMIT))


def _rows(batches: Sequence[Outputs], name: str) -> list[Array]:
    return [np.atleast_1d(batch[name]) for batch in batches]


def _joined(parts: Sequence[Array]) -> Array:
    """Return all rows [rows, values]; if they have several lengths, [values, 1], to compare values one by one."""
    flat = [part.reshape(len(part), -1) for part in parts]
    if len({part.shape[1] for part in flat}) > 1:
        flat = [part.reshape(-1, 1) for part in flat]
    return np.concatenate(flat).astype(np.float64)
