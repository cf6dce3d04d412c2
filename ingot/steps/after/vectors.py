"""``vectors``: the vectors of a text's tokens, without those of padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from ingot.steps.step import Apply, Files, Shape, Step, Values
from ingot.tensors import DType, TensorSpec


class Vectors(Step):
    """Return the vectors of tokens, float32[n, longest, d]: those of each text first, then zeros.

    Attributes:
        tokens: the graph's output, float[n, seq, d].
        attention_mask: 1 for each token that is not padding, [n, seq].
        output: the name of the result.
    """

    kind: Literal["vectors"] = "vectors"
    tokens: str = "last_hidden_state"
    attention_mask: str = "attention_mask"
    output: str = "vectors"

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.tokens, self.attention_mask)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.output,)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.tokens: ("batch", "tokens", "size")}

    def made(self, known: Mapping[str, TensorSpec | None]) -> Mapping[str, TensorSpec | None]:
        spec = known[self.tokens]
        return {self.output: spec and TensorSpec(self.output, DType.FP32, spec.shape)}

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            tokens, mask = values[self.tokens], values[self.attention_mask] == 1
            found = np.zeros(tokens.shape, np.float32)
            front = np.arange(mask.shape[1]) < mask.sum(1, keepdims=True)
            found[front] = tokens[mask]
            return {self.output: found}

        return apply
