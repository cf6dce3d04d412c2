"""Ranks, and the correlation of ranks."""

from __future__ import annotations

import numpy as np

from ingot.tensors import Array


def rank(values: Array) -> Array:
    """Return the rank of each value, from 1; equal values share their mean rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]


def spearman(left: Array, right: Array) -> float:
    """Return Spearman's rank correlation, NaN if all values of one side are equal."""
    x, y = (ranks - ranks.mean() for ranks in (rank(left), rank(right)))
    spread = np.sqrt((x * x).sum() * (y * y).sum())
    return float((x * y).sum() / spread) if spread > 0 else np.nan
