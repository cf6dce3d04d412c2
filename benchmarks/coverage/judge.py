"""Compare a module with an exported form of it, at sizes and seeds that no exporter has seen.

The judge shares no code with Ingot's own proof and treats all exporters alike.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.coverage.case import Case, Sizes, Tensors, leaves, nest
from ingot.tensors import Array

Candidate = Callable[[Tensors], Sequence[Array]]
"""Answers one call from inputs by flat names, with the outputs in order; it may keep state between calls."""

# The largest difference, as a share of the largest magnitude of the output.
TOLERANCE = 1e-4
# An output whose magnitude stays below this is noise, and a relative error means nothing.
_FLOOR = 1e-3
SEEDS = (1, 2)


class Wrong(Exception):
    """The exported form's outputs differ from the module's."""


class Broken(Exception):
    """The exported form fails on inputs that are declared valid."""


def judge(case: Case, start: Callable[[], Candidate]) -> float:
    """Compare an exported form with the module.

    At each unseen size both start with fresh state and are called once per seed, which finds state lost between calls.

    Returns:
        The largest error.

    Raises:
        Wrong: an answer differs.
        Broken: a call fails.
    """
    module = case.module()
    worst = 0.0
    for sizes in case.unseen_sizes:
        reference, candidate = copy.deepcopy(module), start()
        for call, seed in enumerate(SEEDS, 1):
            inputs = case.make(sizes, seed)
            with torch.no_grad():
                expected = leaves(reference(**nest(_copies(inputs)), **case.constants))
            where = f"at {_shown(sizes)}, call {call}"
            try:
                actual = candidate(_copies(inputs))
            except Exception as error:  # an engine may raise anything
                raise Broken(f"{where}: {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error
            worst = max(worst, _compare([tensor.numpy() for tensor in expected], actual, where))
    return worst


def _compare(expected: Sequence[Array], actual: Sequence[Array], where: str) -> float:
    if len(expected) != len(actual):
        raise Wrong(f"{len(actual)} outputs instead of {len(expected)} {where}")
    return max(
        (compare(f"output {index}", *pair, where) for index, pair in enumerate(zip(expected, actual, strict=True))),
        default=0.0,
    )


def compare(
    name: str, expected: Array, actual: Array, where: str, tolerance: float = TOLERANCE, *, each: bool = False
) -> float:
    """Return the error of an output.

    Args:
        name: what the message calls the output.
        expected: the module's.
        actual: the exported form's.
        where: the sizes and values, for the message.
        tolerance: the largest error.
        each: errors are shares of each element instead of the largest one.

    Raises:
        Wrong: the shape or datatype differs, or the error exceeds the tolerance.
    """
    if expected.shape != actual.shape:
        raise Wrong(f"{name} has shape {list(actual.shape)} instead of {list(expected.shape)} {where}")
    if expected.dtype != actual.dtype:
        raise Wrong(f"{name} is {actual.dtype} instead of {expected.dtype} {where}")
    error = _error(expected, actual, each)
    if not error <= tolerance:
        raise Wrong(f"{name} departs by {error:.1e} of its {'own' if each else 'largest'} value {where}")
    return error


def _error(expected: Array, actual: Array, each: bool) -> float:
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, actual) else np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True):
        return np.inf
    left, right = expected[finite].astype(np.float64), actual[finite].astype(np.float64)
    largest = max(float(np.abs(left).max(initial=0.0)), _FLOOR)
    scale = np.maximum(np.abs(left), np.finfo(expected.dtype).smallest_normal) if each else largest
    return float((np.abs(left - right) / scale).max(initial=0.0))


def _copies(inputs: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _shown(sizes: Sizes) -> str:
    return ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
