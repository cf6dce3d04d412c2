"""Metrics of decoders: how likely a text is, and whether the most likely tokens are the original's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ingot.errors import InvalidArgument
from ingot.quant.data.samples import Samples
from ingot.quant.data.tokens import LIKELIEST, LOGPROBS, SIGNATURE
from ingot.quant.metric import bootstrap, fidelity
from ingot.quant.metric.base import Comparison, Metric, Outputs, comparable_pairs, finite_pair

# Of logarithms: evidence has no larger numbers than e to this.
_MOST = 300.0


class Perplexity(Metric):
    """The perplexity of the data; the drop is its relative increase.

    It is the exponential of the mean negative logarithm of each token's probability behind the tokens before it.
    """

    name = "perplexity"

    def compare(self, expected: Sequence[Outputs], actual: Sequence[Outputs], samples: Samples) -> Comparison:
        pairs = [finite_pair(LOGPROBS, *pair) for pair in comparable_pairs(expected, actual, LOGPROBS, samples)]
        before, after = (np.concatenate([-pair[side].mean(axis=1) for pair in pairs]) for side in (0, 1))
        scores = bootstrap.compare(_exponential(before), _exponential(after), samples.rows, lower_is_better=True)
        increase = bootstrap.compare(
            bootstrap.constant(0.0),
            bootstrap.mean(after - before, lambda means: np.expm1(np.minimum(means[:, 0], _MOST))),
            samples.rows,
            lower_is_better=True,
        )
        return Comparison(scores.before, scores.after, increase.drop)


def _exponential(values: np.ndarray) -> bootstrap.Statistic:
    return bootstrap.mean(values, lambda means: np.exp(np.minimum(means[:, 0], _MOST)))


def _tokens() -> Metric:
    metric = fidelity.top1(SIGNATURE, LIKELIEST)
    metric.name = "tokens"
    return metric


METRICS: Mapping[str, Callable[[], Metric]] = MappingProxyType({"perplexity": Perplexity, "tokens": _tokens})
"""``tokens`` is the share of places of a text at which the most likely next token is the original's."""


def parse(spec: object) -> Metric:
    """Return the metric of a decoder: by default ``perplexity``.

    Raises:
        InvalidArgument: decoders have no such metric.
    """
    name = "perplexity" if spec is None else spec
    if not isinstance(name, str) or name not in METRICS:
        raise InvalidArgument(f"there is no metric '{name}' of models that generate text; known: {', '.join(METRICS)}")
    return METRICS[name]()
