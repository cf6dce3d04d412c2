"""``classify``: from the outputs of a classifier to scores, and the names of the best classes."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from ingot.steps.dense import sigmoid
from ingot.steps.step import Apply, Files, Step, Values
from ingot.tensors import Array


class Classify(Step):
    """Turn logits into scores; with ``labels`` the best classes are named, otherwise scores keep their order.

    Attributes:
        logits: the classifier's output, float[n, classes].
        function: what makes scores of logits: ``softmax``, ``sigmoid`` or ``none``.
        labels: the names of classes, in the order of the logits.
        top_k: classes that are returned, best first; 0 for all.
        label: BYTES[n, k], if there are labels.
        score: float32[n, k]; without labels [n, classes], or [n] of one class.
    """

    kind: Literal["classify"] = "classify"
    logits: str = "logits"
    function: Literal["softmax", "sigmoid", "none"] = "softmax"
    labels: tuple[str, ...] = Field((), max_length=1_000_000)
    top_k: int = Field(0, ge=0)
    label: str = "label"
    score: str = "score"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.score) if self.labels else (self.score,)

    def open(self, files: Files) -> Apply:
        names = np.array([label.encode() for label in self.labels], object)
        count = min(self.top_k, len(names)) or len(names)

        def apply(values: Values) -> Values:
            scores = self._scores(values[self.logits].astype(np.float32, copy=False))
            if not self.labels:
                return {self.score: scores[:, 0] if scores.shape[1] == 1 else scores}
            order = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            return {self.label: names[order], self.score: np.take_along_axis(scores, order, 1)}

        return apply

    def _scores(self, logits: Array) -> Array:
        if self.function == "none":
            return logits
        if self.function == "sigmoid":
            return sigmoid(logits)
        shifted: Array = np.exp(logits - logits.max(1, keepdims=True))
        total: Array = shifted.sum(1, keepdims=True)
        return shifted / total
