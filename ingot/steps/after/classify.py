"""``classify``: from the outputs of a classifier to scores, and the names of the best classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from ingot.errors import InvalidArgument
from ingot.steps.after.dense import sigmoid
from ingot.steps.step import Apply, Files, Shape, Step, Values, choices_of
from ingot.tensors import Array, TensorSpec

Function = Literal["softmax", "sigmoid", "none"]


class Classify(Step):
    """Turn logits into scores; with ``labels`` the best classes are named, otherwise scores keep their order.

    Attributes:
        logits: the classifier's output, float[n, classes].
        function: what makes scores of logits: ``softmax``, ``sigmoid`` or ``none``.
        choice: the optional input that chooses another function; empty for none.
        labels: the names of classes, in the order of the logits.
        top_k: classes that are returned, best first; 0 for all.
        label: BYTES[n, k], if there are labels.
        score: float32[n, k]; without labels [n, classes], or [n] of one class.
    """

    kind: Literal["classify"] = "classify"
    logits: str = "logits"
    function: Function = "softmax"
    labels: tuple[str, ...] = Field((), max_length=1_000_000)
    top_k: int = Field(0, ge=0)
    choice: str = ""
    label: str = "label"
    score: str = "score"

    @property
    def count(self) -> int:
        """The classes that are returned, if there are labels."""
        return min(self.top_k, len(self.labels)) or len(self.labels)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.score) if self.labels else (self.score,)

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.choice,) if self.choice else ()

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        return {self.choice: [*FUNCTIONS]} if self.choice else {}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.logits: ("batch", "classes")}

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        super().check(known)
        spec = known[self.logits]
        if spec is not None and isinstance(classes := spec.shape[1], int):
            self._fit(classes)

    def _fit(self, classes: int) -> None:
        if self.labels:
            fit(self.kind, self.labels, self.logits, classes)

    def open(self, files: Files) -> Apply:
        names = np.array([label.encode() for label in self.labels], object)

        def apply(values: Values) -> Values:
            scores = self._scores(values)
            if not self.labels:
                return {self.score: scores[:, 0] if scores.shape[1] == 1 else scores}
            self._fit(scores.shape[1])
            order = np.argsort(-scores, axis=1, kind="stable")[:, : self.count]
            return {self.label: names[order], self.score: np.take_along_axis(scores, order, 1)}

        return apply

    def _scores(self, values: Values) -> Array:
        logits = values[self.logits].astype(np.float32, copy=False)
        chosen = choices_of(self.choice, values, self.function, [*FUNCTIONS], len(logits)) if self.choice else []
        if len({*chosen}) < 2:
            return FUNCTIONS[chosen[0] if chosen else self.function](logits)
        return np.concatenate([FUNCTIONS[name](logits[[row]]) for row, name in enumerate(chosen)])


def fit(kind: str, labels: Sequence[str], logits: str, classes: int) -> None:
    """Refuse labels that are more or fewer than the classes of logits.

    Raises:
        InvalidArgument: they are.
    """
    if len(labels) != classes:
        raise InvalidArgument(
            f"step '{kind}' has {len(labels)} labels, but '{logits}' has {classes} classes; give one label for each "
            "class"
        )


def softmax(logits: Array) -> Array:
    """Return probabilities over the last axis, without overflow."""
    shifted: Array = np.exp(logits - logits.max(-1, keepdims=True))
    total: Array = shifted.sum(-1, keepdims=True)
    return shifted / total


FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "softmax": softmax,
    "sigmoid": sigmoid,
    "none": lambda logits: logits,
}
"""The functions from logits to scores, by name."""
