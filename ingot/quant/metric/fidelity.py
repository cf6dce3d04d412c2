"""Metrics of agreement with the original model, which need no labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ingot.errors import InvalidArgument
from ingot.quant.data.samples import Samples
from ingot.quant.metric import bootstrap
from ingot.quant.metric.base import (
    Comparison,
    Metric,
    Outputs,
    Score,
    comparable_pairs,
    find_output,
    finite_pair,
    flat_rows,
    float_outputs,
    has_value,
    rows_of,
)
from ingot.quant.metric.centre import find_centre, move
from ingot.quant.metric.ranks import rank
from ingot.tensors import Array, DType, Signature

Pairs = list[tuple[Array, Array]]

_SQNR_LIMIT = 100.0  # dB: far better than any 8-bit model, and as good as equal


class Agreement(Metric):
    """A metric of each output's agreement with the original's; the worst output counts.

    Args:
        name: its name.
        best: the value of perfect agreement.
        measure: from an output's name and both models' batches of it to a statistic.
        outputs: the names of the outputs that are compared.
    """

    def __init__(
        self, name: str, best: float, measure: Callable[[str, Pairs], bootstrap.Statistic], outputs: Sequence[str]
    ):
        self.name = name
        self._best = best
        self._measure = measure
        self._outputs = outputs

    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        found = [
            bootstrap.compare(
                bootstrap.constant(self._best),
                self._measure(name, comparable_pairs(expected, actual, name, samples)),
                samples.rows,
            )
            for name in self._outputs
        ]
        return max(found, key=lambda item: item.drop.value)

    def notes(self, expected: Sequence[Outputs], before: Score, samples: Samples) -> tuple[str, ...]:
        """Note rows without a finite value: they count as equal for any output of the other model."""
        found: list[str] = []
        for name in self._outputs:
            rows = [row for part in rows_of(expected, name, samples.signature) for row in part]
            lost = sum(not has_value(row) for row in rows)
            if lost:
                found.append(f"the original has no finite value in '{name}' for {lost} of {len(rows)} rows")
        return tuple(found)


def cosine(signature: Signature, output: str | None) -> Metric:
    """Mean cosine similarity of the rows, each flattened.

    For one value per row, and if the original's rows hardly vary, it is that of all rows as one vector, after the
    original's mean is subtracted from both; see :func:`ingot.quant.metric.centre.find_centre`.
    """
    return Agreement(_titled("cosine", output), 1.0, _cosine, _floats(signature, output, "cosine"))


def top1(signature: Signature, output: str | None) -> Metric:
    """Share of rows whose largest value (on the last axis) is at the same index.

    For one value per row, the share on the same side of 0, or of 0.5 if all of the original's are from 0 to 1; for
    integers and text, the share of equal values.
    """
    names = [spec.name for spec in signature.outputs]
    names = names if output is None else [find_output(signature, output, "top1")]
    return Agreement(_titled("top1", output), 1.0, _top1, names)


def sqnr(signature: Signature, output: str | None) -> Metric:
    """Signal to quantization noise in dB over all values, at most 100; the drop is the difference to 100."""
    return Agreement(_titled("sqnr", output), _SQNR_LIMIT, _sqnr, _floats(signature, output, "sqnr"))


def _titled(name: str, output: str | None) -> str:
    return name if output is None else f"{name}:output={output}"


def _floats(signature: Signature, output: str | None, metric: str) -> list[str]:
    names = float_outputs(signature)
    if output is not None:
        names = [name for name in names if name == find_output(signature, output, metric)]
    if not names:
        raise InvalidArgument(f"the metric {metric} needs a floating-point output; use top1, or name another output")
    return names


def _cosine(name: str, pairs: Pairs) -> bootstrap.Statistic:
    parts: list[Array] = []
    centre = find_centre([before for before, _ in pairs])
    single = centre is not None or all(before[0].size == 1 for before, _ in pairs)
    for before, after in pairs:
        left, right = move(before, finite_pair(name, before, after)[1], centre)
        sums = [(left * right).sum(1), (left * left).sum(1), (right * right).sum(1), (left != right).any(1)]
        parts.append(np.stack(sums, axis=1))  # [rows, 4]
    columns = np.concatenate(parts)
    return bootstrap.mean(columns, _direction) if single else bootstrap.mean(_direction(columns))


def _direction(sums: Array) -> Array:
    """Return the cosine of [n, (product, square, square, share that differs)]; equal zeros agree."""
    norms = np.sqrt(sums[:, 1]) * np.sqrt(sums[:, 2])
    return np.where(sums[:, 3] == 0, 1.0, sums[:, 0] / np.maximum(norms, 1e-100))


def _top1(name: str, pairs: Pairs) -> bootstrap.Statistic:
    kind = DType.of(pairs[0][0])
    if not kind.is_float:
        return bootstrap.mean(_equal([(before, after) for before, after in pairs]))
    edge = threshold([before for before, _ in pairs])
    return bootstrap.mean(_equal([(decide(before, edge), decide(after, edge)) for before, after in pairs]))


def _equal(pairs: Pairs) -> Array:
    """Return the share of equal values of each row."""
    return np.concatenate([(before == after).reshape(len(before), -1).mean(1) for before, after in pairs])


def threshold(parts: Sequence[Array]) -> float:
    """Return the threshold of one value per row between no and yes: 0.5 for probabilities, otherwise 0."""
    return 0.5 if all(not ((part < 0) | (part > 1)).any() for part in parts) else 0.0


def decide(values: Array, edge: float) -> Array:
    """Return the index of the largest value on the last axis, or for one value per row, whether it exceeds ``edge``.

    A row with NaN yields -1, which equals no label.
    """
    values = values.reshape(len(values), -1) if values[0].size == max(values.shape[1:], default=1) else values
    if values.shape[-1] == 1:
        chosen: Array = (values[..., 0] > edge).astype(np.int64)
    else:
        chosen = values.argmax(-1)
    return np.where(np.isnan(values).any(-1), -1, chosen)


def _sqnr(name: str, pairs: Pairs) -> bootstrap.Statistic:
    parts: list[Array] = []
    for left, right in (finite_pair(name, *pair) for pair in pairs):
        parts.append(np.stack([(left * left).sum(1), ((left - right) ** 2).sum(1)], axis=1))

    def decibels(sums: Array) -> Array:
        ratio = np.maximum(sums[:, 0], 1e-30) / np.maximum(sums[:, 1], 1e-30)
        exact = np.where(sums[:, 1] == 0, _SQNR_LIMIT, 10 * np.log10(ratio))
        return np.clip(exact, -_SQNR_LIMIT, _SQNR_LIMIT)

    return bootstrap.mean(np.concatenate(parts), decibels)


class Similarity(Metric):
    """Spearman's rank correlation of the rows' pairwise cosine similarities with the original's.

    It shows whether an embedding model still finds the same rows similar. The interval resamples rows, leaves pairs of
    a row with itself out, and keeps the ranks of the whole set.
    """

    MOST = 1500  # rows: their pairs are already more than a million

    def __init__(self, signature: Signature, output: str | None = None):
        self.name = _titled("similarity", output)
        self._output = find_output(signature, output, "similarity")

    def check(self, samples: Samples) -> None:
        if samples.rows < 4:
            raise InvalidArgument(
                f"the metric similarity compares pairs of rows and needs at least 4; the {samples.purpose} has "
                f"{samples.rows}"
            )

    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        self.check(samples)
        name = self._output
        pairs = [finite_pair(name, *pair) for pair in comparable_pairs(expected, actual, name, samples)]
        left, right = (flat_rows([pair[side] for pair in pairs], name, "similarity") for side in (0, 1))
        if len(left) > self.MOST:
            chosen = np.sort(np.random.default_rng(0).permutation(len(left))[: self.MOST])
            left, right = left[chosen], right[chosen]
        after = _pair_correlation(_ranks(left), _ranks(right))
        return bootstrap.compare(bootstrap.constant(1.0), after, len(left), bootstrap.SLOW_RESAMPLES)


def _ranks(embeddings: Array) -> Array:
    """Return the ranks of all pairs' similarities, centered, as a symmetric matrix with a diagonal of 0."""
    units = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    upper = np.triu_indices(len(units), 1)
    # Rounding keeps the similarities of equal rows equal; the last bits of a matrix product would rank them by chance.
    ranks = rank(np.round((units @ units.T)[upper], 9))
    matrix = np.zeros((len(units), len(units)))
    matrix[upper] = ranks - ranks.mean()
    return matrix + matrix.T


def _pair_correlation(left: Array, right: Array) -> bootstrap.Statistic:
    """Return Pearson's correlation of two matrices' pairs, each weighted by how often its rows were drawn."""
    off = 1.0 - np.eye(len(left))
    tables = (off, left, right, left * right, left * left, right * right)

    def correlate(index: Array) -> Array:
        weights = np.stack([np.bincount(rows, minlength=len(left)) for rows in index]).astype(np.float64)
        total, x, y, xy, xx, yy = (((weights @ table) * weights).sum(1) for table in tables)
        total = np.maximum(total, 1.0)
        spread = np.sqrt(np.maximum(xx - x * x / total, 0) * np.maximum(yy - y * y / total, 0))
        same = np.isclose(xx, xy) & np.isclose(yy, xy)  # no spread in either is agreement
        found: Array = np.where(spread > 0, (xy - x * y / total) / np.where(spread > 0, spread, 1), same)
        return found

    return correlate
