"""``normalize``: vectors of length 1, as sentence-transformers' Normalize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from ingot.steps.step import VECTORS_AT_ONCE, Apply, Files, Step, Values
from ingot.tensors import DType, TensorSpec


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

    def made(self, known: Mapping[str, TensorSpec | None]) -> Mapping[str, TensorSpec | None]:
        spec = known[self.value]
        return {self.value: spec if spec is not None and spec.dtype is DType.FP32 else None}

    @property
    def elements_at_once(self) -> int:
        return VECTORS_AT_ONCE

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            rows = values[self.value]
            return {self.value: rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), np.float32(1e-12))}

        return apply
