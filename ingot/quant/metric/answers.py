"""Metrics of final answers, which the steps after the graph make of its outputs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ingot.errors import InvalidArgument
from ingot.quant.data.samples import Samples
from ingot.quant.data.sources.items import LABELS
from ingot.quant.data.sources.raw import PAIRS
from ingot.quant.metric import bootstrap, fidelity
from ingot.quant.metric.base import Comparison, Metric, Outputs, Score
from ingot.quant.metric.ranks import spearman
from ingot.steps import OpenedSteps
from ingot.steps.after.classify import Classify
from ingot.steps.after.dense import Dense
from ingot.steps.after.normalize import Normalize
from ingot.steps.after.pool import Pool
from ingot.tensors import Array, DType, Signature


class Answers(Metric):
    """The agreement of final answers with the original's: the share of equal best labels, or the cosine of vectors.

    Args:
        steps: the model's steps.
    """

    name = "answers"

    def __init__(self, steps: OpenedSteps):
        self._steps = steps
        self._signature = _answered(steps)
        labels = any(isinstance(step, Classify) and step.labels for step in steps.config.after)
        self._inner = (fidelity.top1 if labels else fidelity.cosine)(self._signature, _main(steps))

    def check(self, samples: Samples) -> None:
        check_raw(self.name, self._steps, samples)

    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        view = copy.copy(samples)
        view.signature = self._signature
        both = [answers_of(self._steps, outputs, samples) for outputs in (expected, actual)]
        return self._inner.compare(both[0], both[1], view)

    def notes(self, expected: Sequence[Outputs], before: Score, samples: Samples) -> tuple[str, ...]:
        return ()


class Pairs(Metric):
    """Spearman's correlation of the cosine similarities of pairs of texts with their scores."""

    name = "pairs"
    labels = LABELS
    groups = PAIRS

    def __init__(self, steps: OpenedSteps):
        self._steps = steps
        self._vectors = _main(steps)

    def check(self, samples: Samples) -> None:
        check_raw(self.name, self._steps, samples)
        if PAIRS not in samples.extras or LABELS not in samples.extras:
            raise InvalidArgument(
                f"the metric {self.name} needs texts, a second text and a score in each row: the columns text, "
                f"text_pair and label; the {samples.purpose}{samples.where} has not all of them"
            )
        if len(np.unique(samples.column(LABELS))) < 2:
            raise InvalidArgument(f"all pairs of the {samples.purpose}{samples.where} have the same score")

    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        numbers, scores = samples.column(PAIRS).reshape(-1), samples.column(LABELS).reshape(-1)
        found, counts = np.unique(numbers, return_counts=True)
        whole = np.isin(numbers, found[counts == 2])  # the limit of rows may divide a pair
        order = np.flatnonzero(whole)[np.argsort(numbers[whole], kind="stable")].reshape(-1, 2)
        wanted = scores[order[:, 0]]
        before, after = (self._similar(outputs, samples, order) for outputs in (expected, actual))
        return bootstrap.compare(
            bootstrap.each(lambda index: spearman(before[index], wanted[index])),
            bootstrap.each(lambda index: spearman(after[index], wanted[index])),
            len(order),
            bootstrap.SLOW_RESAMPLES,
        )

    def _similar(self, outputs: Sequence[Outputs], samples: Samples, order: Array) -> Array:
        """Return the cosine similarity of each pair."""
        answers = answers_of(self._steps, outputs, samples)
        vectors = np.concatenate([batch[self._vectors] for batch in answers]).astype(np.float64)
        units = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        similar: Array = (units[order[:, 0]] * units[order[:, 1]]).sum(1)
        return similar


def default(steps: OpenedSteps, samples: Samples) -> str | None:
    """Return the metric of raw data: of labels where there are some, otherwise the agreement of final answers.

    None if answers have no fixed size, such as the boxes of a picture: then the graph's outputs are compared.
    """
    classify = next((step for step in steps.config.after if isinstance(step, Classify)), None)
    if PAIRS in samples.extras and LABELS in samples.extras:
        return Pairs.name
    if LABELS in samples.extras and classify is not None:
        return f"{'accuracy' if classify.labels else 'spearman'}:output={classify.logits}"
    fixed = all(isinstance(step, Classify | Pool | Dense | Normalize) for step in steps.config.after)
    return Answers.name if fixed else None


def check_raw(name: str, steps: OpenedSteps, samples: Samples) -> None:
    """Check that samples were made of raw data.

    Raises:
        InvalidArgument: they were not.
    """
    if not samples.raw:
        raise InvalidArgument(
            f"the metric {name} needs raw data, such as texts in a CSV file or a folder of pictures; the "
            f"{samples.purpose}{samples.where} has tensors"
        )


def answers_of(steps: OpenedSteps, outputs: Sequence[Outputs], samples: Samples) -> list[dict[str, Array]]:
    """Return the answers to each batch; of several labels, only the best."""
    found = []
    for batch, made in zip(samples.batches(), outputs, strict=True):
        answers = steps.finish({**batch.inputs, **batch.extras}, made)
        found.append({name: _best(array) for name, array in answers.items()})
    return found


def _best(array: Array) -> Array:
    return array[:, 0] if array.dtype == object and array.ndim == 2 else array


def _main(steps: OpenedSteps) -> str:
    """Return the answer that counts: the best label, or the first of floating-point numbers."""
    outputs = {spec.name: spec for spec in steps.config.outputs}
    for step in steps.config.after:
        if isinstance(step, Classify) and step.labels:
            return step.label
    return next((name for name, spec in outputs.items() if spec.dtype.is_float), next(iter(outputs)))


def _answered(steps: OpenedSteps) -> Signature:
    """Return the signature of the graph with the final answers as outputs."""
    before = steps.signature
    outputs = (
        replace(spec, shape=(before.batch or "batch", *(() if spec.dtype is DType.BYTES else spec.shape[1:])))
        for spec in steps.config.outputs
    )
    return replace(before, outputs=tuple(outputs))


METRICS: Mapping[str, type[Answers] | type[Pairs]] = {"answers": Answers, "pairs": Pairs}
"""By name."""


def metric(name: str, steps: OpenedSteps | None) -> Metric:
    """Return one of :data:`METRICS`.

    Raises:
        InvalidArgument: the model has no steps.
    """
    if steps is None:
        raise InvalidArgument(f"the metric {name} is one of final answers, and the model has no steps that make some")
    return METRICS[name](steps)
