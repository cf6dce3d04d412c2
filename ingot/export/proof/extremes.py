"""Comparison on values outside the proof of parity: very large floats, NaN, wide integers.

Engines differ on them, and few models rely on them, so a difference is reported and does not fail the export.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from ingot.errors import EngineTimeout, IngotError
from ingot.export import torch_internals
from ingot.export.program import Runner, ended_if_endless
from ingot.export.proof.examples import Examples
from ingot.export.proof.watch import OperatorLimit
from ingot.tensors import Array, DType, arrays

Change = Callable[[Array, np.random.Generator], Array]
WIDE = (-5, -2, -1, 0, 1, 2, 3, 7, 100, (1 << 24) + 1, (1 << 31) + 3, (1 << 33) + 7, (1 << 53) + 1)
"""Integers that include some that float16, float32 and int32 cannot represent."""


def remarks(reference: Runner, candidate: Runner, examples: Examples, tolerance: float) -> Iterator[str]:
    """Yield one sentence for each kind of extreme values on which the outputs of two models differ.

    Args:
        reference: the original; kinds of values that it rejects are skipped.
        candidate: the graph.
        examples: ordinary inputs, which are modified.
        tolerance: a tenth of the largest error that is not reported.
    """
    ordinary = examples.make(examples.default_sizes, seed=7)
    for kind, (applies, change) in KINDS.items():
        rng = np.random.default_rng(7)
        changed = {
            name: change(array, rng) if applies(DType.of(array)) and not examples.is_limited(name) else array
            for name, array in ordinary.items()
        }
        if all(changed[name] is array for name, array in ordinary.items()):
            continue
        start = time.monotonic()
        if (expected := _expected(reference, changed)) is None:
            continue
        seconds = time.monotonic() - start
        if (different := _difference(candidate, changed, expected, tolerance, seconds)) is not None:
            yield f"{kind}, {different}"


def _expected(reference: Runner, inputs: Mapping[str, Array]) -> dict[str, Array] | None:
    """Return the outputs of the original, or None if it rejects the inputs or does not end on them."""
    limit = OperatorLimit()
    with contextlib.suppress(IngotError), limit:
        return reference.run(inputs)
    if limit.exceeded:
        return None
    torch_internals.forget_compiled()  # torch.cond does not run under the limit, and keeps what it compiled
    with contextlib.suppress(IngotError):
        return reference.run(inputs)
    return None


def _difference(
    candidate: Runner, inputs: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float, seconds: float
) -> str | None:
    """Return how the graph differs on inputs on which the original ran for so many seconds; None if it does not."""
    try:
        with ended_if_endless(candidate, seconds):
            actual = candidate.run(inputs)
    except EngineTimeout:
        return "the graph does not end where the model does"
    except IngotError:
        return "the graph fails where the model does not"
    for name, value in expected.items():
        error = arrays.departure(value, actual[name])
        if error <= 10 * tolerance:
            continue
        if np.isfinite(error):
            return f"the graph's '{name}' differs from the model's by {error:.0e} of its largest value"
        return f"the graph's '{name}' differs from the model's"
    return None


def larger(array: Array, rng: np.random.Generator) -> Array:
    """Return values some 50 times as large, including zeros and equal values."""
    changed = np.asarray(50 * array.astype(np.float64))
    changed[rng.random(array.shape) < 0.1] = 0
    changed[rng.random(array.shape) < 0.1] = 100
    return changed.astype(array.dtype)


def with_nan(array: Array, rng: np.random.Generator) -> Array:
    """Return the values with some replaced by NaN."""
    changed = array.copy()
    changed.reshape(-1)[rng.random(array.size) < 0.1] = np.nan
    changed.reshape(-1)[-1:] = np.nan
    return changed


def wide(array: Array, rng: np.random.Generator) -> Array:
    """Return integers of all magnitudes of the type."""
    limits = np.iinfo(array.dtype)
    values = [number for number in WIDE if limits.min <= number <= limits.max]
    return rng.choice(np.array(values, dtype=array.dtype), array.shape)


KINDS: dict[str, tuple[Callable[[DType], bool], Change]] = {
    "at inputs 50 times as large": (lambda dtype: dtype.is_float, larger),
    "with a NaN among the inputs": (lambda dtype: dtype.is_float, with_nan),
    "at integers up to 2^53": (lambda dtype: dtype.is_integer, wide),
}
