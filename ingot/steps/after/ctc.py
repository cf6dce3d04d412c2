"""``ctc``: from scores of characters for each frame of a sound or a line of text to its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from ingot.errors import InvalidArgument
from ingot.steps.after.classify import FUNCTIONS, Function
from ingot.steps.step import Apply, Files, Shape, Step, Values
from ingot.tensors import Array, TensorSpec
from ingot.tensors.arrays import as_bytes

Convolution = tuple[int, int, int]
"""The kernel, the stride and the padding at each side of a convolution over time."""


class Ctc(Step):
    """Take the best token of each frame, make one of those that repeat, leave the blank out, and join the others.

    This is the greedy decoding of connectionist temporal classification, as transformers' Wav2Vec2CTCTokenizer and
    PaddleOCR's CTCLabelDecode do it.

    Attributes:
        logits: the graph's output, float[n, frames, tokens].
        tokens: their texts, in the order of the logits.
        blank: the token that separates repetitions, and stands for no character.
        delimiter: the token between words.
        space: the text that stands for ``delimiter``.
        strip: whether spaces at both ends are removed.
        lower: whether the text is put in lower case.
        replaced: pairs of texts, of which the first is replaced by the second at the end, one after the other.
        sizes: the samples or frames of each sound without padding, [n], if sounds of several lengths share a call.
        convolutions: those of the model, by which such a size becomes a number of frames of the logits.
        function: what makes probabilities of logits for ``score``: ``softmax``, ``sigmoid`` or ``none``.
        text: BYTES[n].
        score: the mean probability of the tokens that were joined, each in its first frame; 0 without any. float32[n];
            empty for none.
    """

    kind: Literal["ctc"] = "ctc"
    logits: str = "logits"
    tokens: tuple[str, ...] = Field(min_length=1, max_length=1_000_000)
    blank: str = "<pad>"
    delimiter: str = "|"
    space: str = " "
    strip: bool = True
    lower: bool = False
    replaced: tuple[tuple[str, str], ...] = ()
    sizes: str = ""
    convolutions: tuple[Convolution, ...] = ()
    function: Function = "none"
    text: str = "text"
    score: str = ""

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, *([self.sizes] if self.sizes else []))

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.text, *([self.score] if self.score else []))

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.logits: ("batch", "frames", "tokens")}

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        super().check(known)
        spec = known[self.logits]
        if spec is not None and isinstance(count := spec.shape[2], int):
            self._fit(count)

    def _fit(self, count: int) -> None:
        if count != len(self.tokens):
            raise InvalidArgument(
                f"step 'ctc' has {len(self.tokens)} tokens, but '{self.logits}' has {count}; give one text for each"
            )

    def open(self, files: Files) -> Apply:
        blank = np.array([token == self.blank for token in self.tokens])

        def apply(values: Values) -> Values:
            self._fit(values[self.logits].shape[2])
            best = values[self.logits].argmax(-1)  # [n, frames]
            joined = (np.diff(best, prepend=-1) != 0) & ~blank[best]
            joined &= np.arange(best.shape[1]) < np.array(self._sizes(values))[:, None]
            texts = as_bytes([self._text(tokens[chosen]).encode() for tokens, chosen in zip(best, joined, strict=True)])
            return {self.text: texts, **self._scored(values[self.logits], joined)}

        return apply

    def certain(self, values: Values, margin: float) -> Array:
        """Return for which rows the best token of each frame leads by more than ``margin``, bool[n]."""
        logits = values[self.logits]
        if logits.shape[-1] < 2:
            return np.ones(len(logits), bool)
        best = np.partition(logits, -2, axis=-1)[..., -2:]
        leads = best[..., 1] - best[..., 0]
        return np.array(
            [bool((row[:size] > margin).all()) for row, size in zip(leads, self._sizes(values), strict=True)]
        )

    def _sizes(self, values: Values) -> Sequence[int]:
        """Return the frames of each row that are not of padding."""
        frames = values[self.logits].shape[1]
        if not self.sizes:
            return [frames] * len(values[self.logits])
        return [min(frames, self._frames(size)) for size in values[self.sizes].tolist()]

    def _frames(self, size: int) -> int:
        for kernel, stride, padding in self.convolutions:
            size = (size + 2 * padding - kernel) // stride + 1
        return size

    def _scored(self, logits: Array, joined: Array) -> dict[str, Array]:
        if not self.score:
            return {}
        scores = FUNCTIONS[self.function](logits).max(-1).astype(np.float64)
        means = (scores * joined).sum(1) / joined.sum(1).clip(1)
        return {self.score: means.astype(np.float32)}

    def _text(self, best: Array) -> str:
        tokens = map(self.tokens.__getitem__, best.tolist())
        text = "".join(self.space if token == self.delimiter else token for token in tokens)
        text = text.strip() if self.strip else text
        text = text.lower() if self.lower else text
        for old, new in self.replaced:
            text = text.replace(old, new)
        return text
