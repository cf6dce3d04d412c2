"""``pixel_classes``: from the classes of a semantic segmentation to the best class of each pixel, and its score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from ingot.steps.after.classify import softmax
from ingot.steps.step import Apply, Files, Shape, Step, Values


class PixelClasses(Step):
    """Return the number of the best class of each pixel of the graph's output and its score, as TorchServe does.

    Attributes:
        logits: float[n, classes, height, width].
        output: the class and the score, float32[n, height, width, 2].
    """

    kind: Literal["pixel_classes"] = "pixel_classes"
    logits: str = "logits"
    output: str = "pixel_classes"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.output,)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.logits: ("batch", "classes", "height", "width")}

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            scores = softmax(np.moveaxis(values[self.logits].astype(np.float32, copy=False), 1, -1))
            best = scores.argmax(-1).astype(np.float32)
            return {self.output: np.stack([best, scores.max(-1)], axis=-1)}

        return apply

    def comparable(self, answers: Values) -> Values:
        """Return the scores: rounding decides between two classes whose scores are equal."""
        return {self.output: answers[self.output][..., 1]}
