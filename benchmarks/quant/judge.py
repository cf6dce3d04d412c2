"""Compare the answers of one way with those of the original model, on data that no way has seen.

The judge shares no code with Ingot's own metrics and treats all ways alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.quant.ways import Array

DROP = 0.005
COSINE = 0.99


@dataclass(frozen=True)
class Judgement:
    """Attributes:
    drop: the loss of the metric; half a point is 0.005.
    cosine: the mean over rows of the cosine between both answers.
    agreement: the share of rows with the same largest value.
    holds: whether the loss is within the budget.
    """

    drop: float
    cosine: float
    agreement: float
    holds: bool


def judge(metric: str, expected: Array, actual: Array, labels: Array | None = None) -> Judgement:
    """Judge answers [rows, values].

    Args:
        metric: ``accuracy`` needs labels and may drop by :data:`DROP`; ``similarity`` (rank correlation of the rows'
            similarities to each other) and ``cosine`` need a mean cosine of :data:`COSINE`.
        expected: answers of the model as it was.
        actual: the way's.
        labels: true classes.

    Raises:
        ValueError: the shapes differ, or labels are missing.
    """
    if expected.shape != actual.shape:
        raise ValueError(f"answers of shape {list(actual.shape)} instead of {list(expected.shape)}")
    cosine = float(cosines(expected, actual).mean())
    agreement = float((expected.argmax(1) == actual.argmax(1)).mean())
    if metric == "accuracy":
        if labels is None:
            raise ValueError("accuracy needs labels")
        drop = float((expected.argmax(1) == labels).mean() - (actual.argmax(1) == labels).mean())
        # Counts of rows make shares that floats cannot hold exactly.
        return Judgement(drop, cosine, agreement, bool(np.isfinite(actual).all()) and drop <= DROP + 1e-9)
    drop = 1 - (rank_correlation(similarities(expected), similarities(actual)) if metric == "similarity" else cosine)
    return Judgement(drop, cosine, agreement, cosine >= COSINE)


def cosines(left: Array, right: Array) -> Array:
    """Return the cosine of each row with its counterpart; NaN where a row has no direction."""
    left, right = left.astype(np.float64), right.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found: Array = (left * right).sum(1) / (np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1))
    return found


def similarities(embeddings: Array) -> Array:
    """Return the cosine of each pair of rows, once."""
    embeddings = embeddings.astype(np.float64)
    units = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    found: Array = (units @ units.T)[np.triu_indices(len(units), 1)]
    return found


def rank_correlation(left: Array, right: Array) -> float:
    """Return Spearman's correlation; equal values are so rare among similarities that their order does not count."""
    first, second = (
        values.argsort(kind="stable").argsort(kind="stable").astype(np.float64) for values in (left, right)
    )
    return float(np.corrcoef(first, second)[0, 1])
