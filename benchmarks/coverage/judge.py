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
    worst = 0.0
    for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
        if left.shape != right.shape:
            raise Wrong(f"output {index} has shape {list(right.shape)} instead of {list(left.shape)} {where}")
        if left.dtype != right.dtype:
            raise Wrong(f"output {index} is {right.dtype} instead of {left.dtype} {where}")
        error = _error(left, right)
        if not error <= TOLERANCE:
            raise Wrong(f"output {index} departs by {error:.1e} of its largest value {where}")
        worst = max(worst, error)
    return worst


def _error(expected: Array, actual: Array) -> float:
    if expected.dtype.kind != "f":
        return 0.0 if np.array_equal(expected, actual) else np.inf
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True):
        return np.inf
    scale = max(float(np.abs(expected[finite]).max(initial=0.0)), _FLOOR)
    return float(np.abs(expected[finite] - actual[finite]).max(initial=0.0)) / scale


def _copies(inputs: Tensors) -> Tensors:
    return {name: tensor.clone() for name, tensor in inputs.items()}


def _shown(sizes: Sizes) -> str:
    return ", ".join(f"{symbol} {size}" for symbol, size in sizes.items())
