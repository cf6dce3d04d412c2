"""Confidence intervals by resampling rows, always the same ones for the same number of rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from ingot.quant.metric.base import Comparison, Score
from ingot.tensors import Array

Statistic = Callable[[Array], Array]
"""Maps row numbers [resamples, rows] to the metric of each resample [resamples]."""

RESAMPLES = 1000
SLOW_RESAMPLES = 200
"""For statistics that are not a mean, which compute each resample separately."""

_ROUNDING = 1e-9
_AT_ONCE = 1 << 20  # row numbers held in memory at a time
_DRAWN = 20_000_000  # row numbers drawn in all: with very many rows, fewer resamples suffice


def compare(
    before: Statistic,
    after: Statistic,
    rows: int,
    resamples: int = RESAMPLES,
    lower_is_better: bool = False,
    groups: Array | None = None,
) -> Comparison:
    """Return a metric of two models with 95 % intervals (percentile bootstrap, both on the same resampled rows).

    Args:
        before: the original's metric.
        after: the other's.
        rows: the number of rows.
        resamples: how many times rows are drawn.
        lower_is_better: the direction of the metric.
        groups: the number of each row's group [rows], where whole groups are drawn; None draws rows singly.
    """
    whole = np.arange(rows)[None]
    resamples = min(resamples, max(100, _DRAWN // rows))
    drawn: list[tuple[Array, Array]] = [(before(whole), after(whole))]
    drawn += [(before(index), after(index)) for index in _draw(rows, resamples, groups)]
    left, right = (np.concatenate(values) for values in zip(*drawn, strict=True))
    drop = right - left if lower_is_better else left - right
    return Comparison(_score(left), _score(right), _score(drop))


def _draw(rows: int, resamples: int, groups: Array | None) -> Iterator[Array]:
    """Yield the row numbers of resamples [resamples, rows], some resamples at a time."""
    rng = np.random.default_rng(0)
    if groups is not None:
        members = np.split(np.argsort(groups, kind="stable"), np.cumsum(np.bincount(groups))[:-1])
        for _ in range(resamples):  # one by one: groups differ in size, and so do the resamples
            yield np.concatenate([members[group] for group in rng.integers(0, len(members), len(members))])[None]
        return
    step = max(1, _AT_ONCE // rows)
    for start in range(0, resamples, step):
        yield rng.integers(0, rows, (min(step, resamples - start), rows))


def mean(columns: Array, combine: Callable[[Array], Array] = lambda means: means[:, 0]) -> Statistic:
    """Return the statistic ``combine(means of columns)``.

    Args:
        columns: [rows] or [rows, columns].
        combine: from means [resamples, columns] to values [resamples]; by default the first column's mean.
    """
    table = columns.reshape(len(columns), -1)
    return lambda index: combine(np.stack([column[index].mean(1) for column in table.T], axis=1))


def constant(value: float) -> Statistic:
    """Return the statistic that is the same for all rows."""
    return lambda index: np.full(len(index), value)


def each(function: Callable[[Array], float]) -> Statistic:
    """Return the statistic that calls ``function`` with the row numbers of each resample."""
    return lambda index: np.array([function(rows) for rows in index], np.float64)


def _score(values: Array) -> Score:
    """Return the first value, with the interval of the others; a resample may have no value (NaN).

    An interval that does not contain the value is not valid for the metric, and is replaced by NaN.
    """
    others = values[1:][np.isfinite(values[1:])]
    value = float(values[0])
    low, high = np.percentile(others, (2.5, 97.5)) if others.size else (value, value)
    rounding = _ROUNDING * max(1.0, abs(value)) if math.isfinite(value) else 0.0
    if not low - rounding <= value <= high + rounding:
        return Score(value, math.nan, math.nan)
    return Score(value, min(float(low), value), max(float(high), value))
