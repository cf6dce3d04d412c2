"""``relabel``: replace the names of classes: those with a low score, some by others, and those decided before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from ingot.steps.step import Apply, Files, Step, Values


class Relabel(Step):
    """Replace the best class of each item, as magika does, by the rules of its configuration.

    Attributes:
        label: the names of classes, best first, BYTES[n, k]. Of each row the first is replaced.
        score: their scores, float32[n, k].
        decided: a name instead of the model's, with the score 1; empty for the model's. BYTES[n].
        replaced: names that always stand for others.
        thresholds: the least score of a class of the model.
        threshold: that of all others.
        texts: names, after replacement, that become ``text`` where the score is lower.
        text: the name of these.
        binary: the name of others whose score is lower.
    """

    kind: Literal["relabel"] = "relabel"
    label: str = "label"
    score: str = "score"
    decided: str = "decided"
    replaced: Mapping[str, str] = {}
    thresholds: Mapping[str, float] = {}
    threshold: float = 0.5
    texts: frozenset[str] = frozenset()
    text: str = "txt"
    binary: str = "unknown"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.label, self.score, self.decided)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.label, self.score)

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            labels, scores = values[self.label].copy(), values[self.score].copy()
            for row, decided in enumerate(values[self.decided].tolist()):
                labels[row, 0] = decided or self._name(labels[row, 0].decode(), float(scores[row, 0])).encode()
                scores[row, 0] = np.float32(1) if decided else scores[row, 0]
            return {self.label: labels, self.score: scores}

        return apply

    def _name(self, label: str, score: float) -> str:
        name = self.replaced.get(label, label)
        if score >= self.thresholds.get(label, self.threshold):
            return name
        return self.text if name in self.texts else self.binary
