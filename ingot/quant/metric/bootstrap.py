"""Confidence intervals by resampling rows, always the same ones for the same number of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ingot.quant.metric.base import Comparison, Score
from ingot.tensors import Array

Statistic = Callable[[Array], Array]
"""From the numbers of rows [resamples, rows] to the metric of each resample [resamples]."""

RESAMPLES = 1000
SLOW_RESAMPLES = 200
"""For statistics that are not a mean, and take each resample by itself."""

_AT_ONCE = 1 << 20  # row numbers held in memory at a time
_DRAWN = 20_000_000  # row numbers drawn in all: of very many rows, fewer resamples say as much


def compare(
    before: Statistic, after: Statistic, rows: int, resamples: int = RESAMPLES, lower_is_better: bool = False
) -> Comparison:
    """Return a metric of two models with 95 % intervals (percentile bootstrap, both on the same resampled rows)."""
    rng = np.random.default_rng(0)
    whole = np.arange(rows)[None]
    resamples = min(resamples, max(100, _DRAWN // rows))
    drawn: list[tuple[Array, Array]] = [(before(whole), after(whole))]
    step = max(1, _AT_ONCE // rows)
    for start in range(0, resamples, step):
        index = rng.integers(0, rows, (min(step, resamples - start), rows))
        drawn.append((before(index), after(index)))
    left, right = (np.concatenate(values) for values in zip(*drawn, strict=True))
    drop = right - left if lower_is_better else left - right
    return Comparison(_score(left), _score(right), _score(drop))


def mean(columns: Array, combine: Callable[[Array], Array] = lambda means: means[:, 0]) -> Statistic:
    """Return the statistic ``combine(means of columns)``.

    Args:
        columns: [rows] or [rows, columns].
        combine: from means [resamples, columns] to values [resamples]; by default the first column's mean.
    """
    table = columns.reshape(len(columns), -1)
    return lambda index: combine(np.stack([column[index].mean(1) for column in table.T], axis=1))


def constant(value: float) -> Statistic:
    """Return the statistic that is the same whatever the rows."""
    return lambda index: np.full(len(index), value)


def each(function: Callable[[Array], float]) -> Statistic:
    """Return the statistic that calls ``function`` with the row numbers of each resample."""
    return lambda index: np.array([function(rows) for rows in index], np.float64)


def _score(values: Array) -> Score:
    """Return the first value, with the interval of the others; a resample may have no value (NaN)."""
    others = values[1:][np.isfinite(values[1:])]
    value = float(values[0])
    low, high = np.percentile(others, (2.5, 97.5)) if others.size else (value, value)
    return Score(value, float(low), float(high))
