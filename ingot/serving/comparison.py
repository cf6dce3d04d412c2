"""How much the answers of two models differ, and how they are counted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ingot.tensors import Array

# Latencies kept of each model: the last ones.
_LATENCIES = 1000
# Of a normal distribution: a bound holds in 95 of 100 cases.
_Z = 1.96


@dataclass(slots=True)
class Side:
    """The requests that one of the two models answered."""

    answered: int = 0
    failed: int = 0
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))

    @property
    def total(self) -> int:
        return self.answered + self.failed

    def latency(self, share: float) -> float:
        """Return a quantile of the last latencies in seconds; NaN without any."""
        return float(np.quantile(self.seconds, share)) if self.seconds else math.nan


@dataclass(slots=True)
class Drift:
    """The outcome of comparisons."""

    compared: int = 0
    differed: int = 0
    dropped: int = 0
    worst: float = 0.0
    total: float = 0.0

    def add(self, error: float, tolerance: float) -> bool:
        """Count a comparison; return whether the answers agree."""
        self.compared += 1
        self.worst = max(self.worst, error)
        self.total += min(error, 1.0)
        self.differed += error > tolerance
        return error <= tolerance


def error_of(reference: Mapping[str, Array], found: Mapping[str, Array]) -> float:
    """Return the largest error of outputs.

    Numbers with a fraction count by their difference as a share of the output's largest finite value; other values, and
    those that are not finite, must be equal. The error is infinite where they are not, or where a shape differs.
    """
    return max((_error(array, found[name]) for name, array in reference.items()), default=0.0)


def _error(reference: Array, found: Array) -> float:
    if reference.shape != found.shape:
        return math.inf
    if reference.dtype.kind not in "fV":  # V: bfloat16
        return 0.0 if np.array_equal(reference, found) else math.inf
    expected, actual = reference.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True) or not np.isfinite(actual[finite]).all():
        return math.inf
    difference = float(np.abs(expected[finite] - actual[finite]).max(initial=0.0))
    largest = float(np.abs(expected[finite]).max(initial=0.0))
    return difference / largest if largest else difference


def at_least(count: int, total: int) -> float:
    """Return the lower bound of a share in percent: Wilson's interval of 95 %."""
    if not total:
        return 0.0
    share, z2 = count / total, _Z * _Z
    middle = share + z2 / (2 * total)
    spread = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return max(0.0, 100 * (middle - spread) / (1 + z2 / total))
