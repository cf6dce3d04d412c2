"""``pool``: from a vector for each token to one for each text, as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from pydantic import Field, field_validator

from ingot.steps.step import VECTORS_AT_ONCE, Apply, Files, Shape, Step, Values
from ingot.tensors import Array, DType, TensorSpec

Mode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


class Pool(Step):
    """Pool the vectors of a text's tokens.

    Attributes:
        modes: one or more; the results of several are concatenated.
        tokens: the vectors, float[n, seq, d].
        attention_mask: 1 for each token that is not padding, [n, seq].
        output: the vectors of the texts, float32[n, d * len(modes)].
    """

    kind: Literal["pool"] = "pool"
    modes: tuple[Mode, ...] = Field(("mean",), min_length=1)
    tokens: str = "last_hidden_state"
    attention_mask: str = "attention_mask"
    output: str = "embedding"

    @field_validator("modes")
    @classmethod
    def _different(cls, modes: tuple[Mode, ...]) -> tuple[Mode, ...]:
        if len(set(modes)) < len(modes):
            raise ValueError("a mode occurs twice; name each once")
        return modes

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
        if (spec := known[self.tokens]) is None:
            return {self.output: None}
        batch, _, size = spec.shape
        whole = size * len(self.modes) if isinstance(size, int) else f"{self.output}_size"
        return {self.output: TensorSpec(self.output, DType.FP32, (batch, whole))}

    @property
    def elements_at_once(self) -> int:
        return VECTORS_AT_ONCE

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            tokens = values[self.tokens].astype(np.float32, copy=False)
            mask = values[self.attention_mask].astype(np.float32)
            return {self.output: np.concatenate([_MODES[mode](tokens, mask) for mode in self.modes], axis=1)}

        return apply


def _sum(tokens: Array, weights: Array) -> Array:
    """Return the weighted sum over the sequence, [n, d]."""
    total: Array = np.matmul(weights[:, None, :], tokens)[:, 0]
    return total


def _count(mask: Array) -> Array:
    """Return the sum of the weights, [n, 1], which is not zero."""
    count: Array = mask.sum(1, keepdims=True)
    return count.clip(1e-9)


def _mean(tokens: Array, mask: Array) -> Array:
    return np.divide(_sum(tokens, mask), _count(mask))


def _mean_sqrt(tokens: Array, mask: Array) -> Array:
    return np.divide(_sum(tokens, mask), np.sqrt(_count(mask)))


def _weighted(tokens: Array, mask: Array) -> Array:
    return _mean(tokens, mask * np.arange(1, mask.shape[1] + 1, dtype=np.float32))


def _last(tokens: Array, mask: Array) -> Array:
    rows, last = np.arange(len(mask)), mask.shape[1] - 1 - mask[:, ::-1].argmax(1)
    vectors: Array = tokens[rows, last]
    return vectors * mask[rows, last, None]


_MODES: dict[str, Callable[[Array, Array], Array]] = {
    "cls": lambda tokens, mask: tokens[np.arange(len(mask)), mask.argmax(1)],  # behind padding on the left
    "max": lambda tokens, mask: np.where(mask[:, :, None] == 0, np.float32(-1e9), tokens).max(1),
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted,
    "lasttoken": _last,
}
