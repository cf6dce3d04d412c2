"""``normalize``: vectors of length 1, as sentence-transformers' Normalize."""

from __future__ import annotations

from typing import Literal

import numpy as np

from ingot.steps.step import Apply, Files, Step, Values


class Normalize(Step):
    """Divide each row by its Euclidean length, which counts as 1e-12 at least.

    Attributes:
        value: the name of the vectors, which are replaced.
    """

    kind: Literal["normalize"] = "normalize"
    value: str = "embedding"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.value,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.value,)

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            rows = values[self.value]
            return {self.value: rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), np.float32(1e-12))}

        return apply
