"""Metrics that compare outputs with labels."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ingot.errors import InvalidArgument, QuantizationError
from ingot.quant.data.samples import Samples
from ingot.quant.metric import bootstrap
from ingot.quant.metric.base import Comparison, Metric, Outputs, Score, comparable_pairs, find_output, flat_rows
from ingot.quant.metric.fidelity import decide, threshold
from ingot.quant.metric.ranks import spearman
from ingot.tensors import Array, DType, Signature


class Labelled(Metric):
    """A metric of one output and labels.

    Args:
        name: its name.
        signature: the model's signature.
        labels: the extra with the labels.
        output: the output; by default the only floating-point one.
    """

    lower_is_better = False
    resamples = bootstrap.RESAMPLES

    def __init__(self, name: str, signature: Signature, labels: str, output: str | None):
        self.name = f"{name}:labels={labels}" + (f",output={output}" if output else "")
        self.kind = name
        self.labels: str = labels
        self.output = find_output(signature, output, name)
        spec = next(spec for spec in signature.outputs if spec.name == self.output)
        sizes = [dim for dim in spec.shape if dim != signature.batch]
        self.width = math.prod(dim for dim in sizes if isinstance(dim, int))
        self.width_known = all(isinstance(dim, int) for dim in sizes)
        self.integer = not spec.dtype.is_float

    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        labels = self.read_labels(samples)
        pairs = comparable_pairs(expected, actual, self.output, samples)
        before, after = (flat_rows([pair[side] for pair in pairs], self.output, self.kind) for side in (0, 1))
        left, right = self.statistics(before, after, labels)
        return bootstrap.compare(left, right, samples.rows, self.resamples, self.lower_is_better)

    def check(self, samples: Samples) -> None:
        self.read_labels(samples)

    @abstractmethod
    def read_labels(self, samples: Samples) -> Array:
        """Return the labels [rows] or [rows, values], checked."""

    @abstractmethod
    def statistics(self, before: Array, after: Array, labels: Array) -> tuple[bootstrap.Statistic, bootstrap.Statistic]:
        """Return the metric of both models' outputs [rows, values]."""

    def column(self, samples: Samples) -> Array:
        """Return the labels as they are in the data."""
        try:
            return samples.column(self.labels)
        except InvalidArgument as error:
            raise InvalidArgument(f"{error}; name the labels with {self.kind}:labels=NAME") from None

    def wrong(self, samples: Samples, text: str) -> InvalidArgument:
        """Return an error that describes a fault of the labels."""
        return InvalidArgument(f"the labels '{self.labels}' of the {samples.purpose}{samples.where} {text}")


class Classes(Labelled):
    """Accuracy, top-5 accuracy and macro F1 of classes.

    A row's class is the index of its largest value; for one value per row, 1 if it exceeds 0, or 0.5 if all of the
    original's are from 0 to 1; for an integer output, the value itself. A row with NaN is wrong.
    """

    def __init__(self, name: str, signature: Signature, labels: str, output: str | None):
        super().__init__(name, signature, labels, output)
        spec = next(spec for spec in signature.outputs if spec.name == self.output)
        if sum(dim not in (1, signature.batch) for dim in spec.shape) > 1:
            raise InvalidArgument(
                f"{name} needs one class per row; the output {spec} has more: write your own metric, module:function"
            )

    def read_labels(self, samples: Samples) -> Array:
        labels = self.column(samples)
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = labels[:, 0]
        if labels.dtype.kind not in "biu":
            raise self.wrong(
                samples,
                f"are of type {DType.of(labels).torch_name}; they must be the number of each row's class, as int64",
            )
        if labels.ndim != 1:
            raise self.wrong(samples, f"have the shape {list(labels.shape)}; there must be one class per row")
        if labels.dtype.kind == "u" and labels.max() > np.iinfo(np.int64).max:
            raise self.wrong(samples, f"contain the class {labels.max()}, which exceeds int64; count classes from 0")
        labels = labels.astype(np.int64)
        if (labels == labels[0]).all():
            raise self.wrong(samples, f"contain only one class ({labels[0]}), so they cannot measure accuracy")
        if self.width_known and not self.integer:
            self._check_range(labels, self.width, samples)
        return labels

    def _check_range(self, labels: Array, width: int, samples: Samples) -> None:
        classes = max(width, 2)
        if labels.min() < 0 or labels.max() >= classes:
            odd = labels.min() if labels.min() < 0 else labels.max()
            raise self.wrong(
                samples, f"contain the class {odd}; the output '{self.output}' has {classes}, from 0 to {classes - 1}"
            )

    def notes(self, expected: Sequence[Outputs], before: Score, samples: Samples) -> tuple[str, ...]:
        """Note an original that is no better than the most frequent class."""
        if self.kind == "f1":  # macro F1 does not reward that
            return ()
        count, which = (5, "five most frequent classes") if self.kind == "top5" else (1, "most frequent class")
        _, counts = np.unique(self.read_labels(samples), return_counts=True)
        if before.value > np.sort(counts)[-count:].sum() / samples.rows + 1e-9:
            return ()
        share = f"{100 * before.value:.0f} % of the rows"
        return (f"the original is right in {share}, no better than always choosing the {which}: it cannot show a drop",)

    def statistics(self, before: Array, after: Array, labels: Array) -> tuple[bootstrap.Statistic, bootstrap.Statistic]:
        if self.kind == "top5":
            return bootstrap.mean(self._among(before, labels)), bootstrap.mean(self._among(after, labels))
        chosen = [*self._decide(before, after)]
        if self.kind == "accuracy":
            return bootstrap.mean(chosen[0] == labels), bootstrap.mean(chosen[1] == labels)
        if self.integer:  # whose classes may be any numbers, such as -1 and 1
            _, places = np.unique(np.concatenate([labels, *chosen]), return_inverse=True)
            labels, *chosen = np.split(places, 3)
        left, right = (bootstrap.each(_MacroF1(labels, answers)) for answers in chosen)
        return left, right

    def _decide(self, before: Array, after: Array) -> tuple[Array, Array]:
        if self.integer:
            if before.shape[1] != 1:
                raise InvalidArgument(
                    f"the integer output '{self.output}' has {before.shape[1]} values per row, not one"
                )
            return before[:, 0].astype(np.int64), after[:, 0].astype(np.int64)
        edge = threshold([before])
        return decide(before, edge), decide(after, edge)

    def _among(self, scores: Array, labels: Array) -> Array:
        if self.integer or scores.shape[1] <= 5:
            raise InvalidArgument(f"top5 needs more than 5 classes; the output '{self.output}' has {scores.shape[1]}")
        best = np.argsort(-scores, axis=1, kind="stable")[:, :5]
        right: Array = (best == labels[:, None]).any(1) & ~np.isnan(scores).any(1)
        return right


@dataclass(frozen=True)
class _MacroF1:
    """The mean F1 of all classes among the labels or outputs of the resampled rows."""

    labels: Array
    answers: Array

    def __call__(self, index: Array) -> float:
        labels, answers = self.labels[index], self.answers[index]
        size = int(max(labels.max(), answers.max())) + 1
        real = np.bincount(labels, minlength=size)
        said = np.bincount(answers[answers >= 0], minlength=size)
        hits = np.bincount(labels[labels == answers], minlength=size)
        present = real + said > 0
        return float((2 * hits[present] / (real + said)[present]).mean())


class Errors(Labelled):
    """Mean absolute error, mean squared error and its root, in the labels' unit; lower is better."""

    lower_is_better = True

    def read_labels(self, samples: Samples) -> Array:
        return _numbers(self, samples)

    def statistics(self, before: Array, after: Array, labels: Array) -> tuple[bootstrap.Statistic, bootstrap.Statistic]:
        wanted = labels.reshape(len(labels), -1)
        if wanted.shape != before.shape:
            raise InvalidArgument(
                f"the labels '{self.labels}' have {wanted.shape[1]} values per row, the output '{self.output}' has "
                f"{before.shape[1]}"
            )
        left, right = (self._measure(answers, wanted) for answers in _finite(self, before, after))
        return left, right

    def _measure(self, answers: Array, wanted: Array) -> bootstrap.Statistic:
        if self.kind == "mae":
            return bootstrap.mean(np.abs(answers - wanted).mean(1))
        root: Callable[[Array], Array] = np.sqrt if self.kind == "rmse" else np.positive
        return bootstrap.mean(((answers - wanted) ** 2).mean(1), lambda means: root(means[:, 0]))


class RankCorrelation(Labelled):
    """Spearman's rank correlation of one value per row with the labels."""

    resamples = bootstrap.SLOW_RESAMPLES

    def read_labels(self, samples: Samples) -> Array:
        labels = _numbers(self, samples).reshape(samples.rows, -1)
        if labels.shape[1] != 1:
            raise self.wrong(samples, f"have {labels.shape[1]} values per row; there must be one")
        if (labels == labels[0]).all():
            raise self.wrong(samples, f"are all {labels[0, 0]:g}, so they cannot measure accuracy")
        return labels[:, 0]

    def statistics(self, before: Array, after: Array, labels: Array) -> tuple[bootstrap.Statistic, bootstrap.Statistic]:
        if before.shape[1] != 1:
            raise InvalidArgument(f"spearman needs one value per row; the output '{self.output}' has {before.shape[1]}")
        left, right = (self._measure(answers[:, 0], labels) for answers in _finite(self, before, after))
        return left, right

    def _measure(self, answers: Array, labels: Array) -> bootstrap.Statistic:
        constant = bool((answers == answers[0]).all())  # such outputs have no ranking
        return bootstrap.constant(0.0) if constant else bootstrap.each(lambda i: spearman(answers[i], labels[i]))


def _numbers(metric: Labelled, samples: Samples) -> Array:
    labels = metric.column(samples)
    if DType.of(labels) is DType.BYTES:
        raise metric.wrong(samples, "are text; they must be numbers")
    labels = labels.astype(np.float64)
    if not np.isfinite(labels).all():
        raise metric.wrong(samples, "contain NaN or infinity")
    return labels


def _finite(metric: Labelled, before: Array, after: Array) -> tuple[Array, Array]:
    """Return both models' outputs; NaN is an error."""
    for answers, whose in ((before, "original"), (after, "quantized model")):
        if not np.isfinite(answers).all():
            raise QuantizationError(
                f"the {whose} returns NaN or infinity in '{metric.output}', for which {metric.kind} is undefined"
            )
    return before.astype(np.float64), after.astype(np.float64)
