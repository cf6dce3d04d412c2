"""``fill``: from the logits of a masked token to the words that fit best, as transformers' pipeline finds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from ingot.errors import InvalidArgument
from ingot.steps import tokenizer
from ingot.steps.after.classify import softmax
from ingot.steps.ragged import columns, padded
from ingot.steps.step import Apply, Files, Shape, Step, Values, numbers_of
from ingot.steps.tokenizer import Tokenizer
from ingot.tensors import Array

# Words of a mask, at most.
MOST = 100
# Tokens of all texts that a request gets back: one text for each word of each mask. Millions take seconds.
_MOST_TOKENS = 1 << 22


class Fill(Step):
    """Fill each mask by the rule of transformers' FillMaskPipeline.

    Arrays are [n, masks, k], padded to the most masks of a text in the request, and to the most words that a text asks
    for; ``count`` int32[n] is the number of each text's masks.

    Attributes:
        file: the tokenizer, which makes texts of tokens.
        mask_id: the token that stands for a missing word.
        pad_id: the token of padding.
        logits: float[n, seq, vocabulary].
        text: the input with the texts, for messages.
        ids: the ids of tokens.
        attention_mask: 1 for each token that is not padding.
        choice: the optional input with the number of words, up to 100, for each text or for all.
        top_k: words of requests that name no number, best first.
        clean_up: whether blanks before punctuation are removed from texts.
    """

    kind: Literal["fill"] = "fill"
    file: str = "tokenizer.json"
    mask_id: int = Field(ge=0)
    pad_id: int = Field(0, ge=0)
    logits: str = "logits"
    text: str = "text"
    ids: str = "input_ids"
    attention_mask: str = "attention_mask"
    choice: str = "top_k"
    top_k: int = Field(5, ge=1, le=MOST)
    clean_up: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.ids, self.attention_mask)

    @property
    def writes(self) -> tuple[str, ...]:
        return ("token", "token_str", "score", "sequence", "count")

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.choice,)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.logits: ("batch", "tokens", "vocabulary")}

    def open(self, files: Files) -> Apply:
        own = tokenizer.load(files(self.file), self.file)
        own.check_id("mask_id of step 'fill'", self.mask_id)

        def apply(values: Values) -> Values:
            logits, ids = values[self.logits], values[self.ids]
            masked = (ids == self.mask_id) & (values[self.attention_mask] == 1)
            counts = masked.sum(1)
            if (empty := np.flatnonzero(counts == 0)).size:
                raise InvalidArgument(self._no_mask(own, int(empty[0]), values))
            limits = numbers_of(self.choice, values, self.top_k, MOST, len(ids)).clip(max=logits.shape[-1])
            most = int(limits.max())
            if (tokens := int(counts @ limits) * ids.shape[1]) > _MOST_TOKENS:
                raise InvalidArgument(
                    f"input '{self.text}' has {counts.sum()} masks, whose words, {most} each at most, make texts of "
                    f"{tokens} tokens in all, over the limit of {_MOST_TOKENS}; send fewer texts, or a smaller "
                    f"{self.choice}"
                )
            rows, places = np.nonzero(masked)
            scores = softmax(logits[rows, places].astype(np.float32, copy=False))
            best = np.argsort(-scores, axis=1, kind="stable")[:, :most]
            chances = np.take_along_axis(scores, best, 1)
            found = [
                self._words(own, ids[row], place, counts[row], *(part[: limits[row]] for part in each))
                for row, place, *each in zip(rows, places.tolist(), best, chances, strict=True)
            ]
            return {**_by_text(found, counts, most), "count": counts.astype(np.int32)}

        return apply

    def _words(self, own: Tokenizer, ids: Array, place: int, masks: int, tokens: Array, scores: Array) -> list[_Word]:
        """Return the words of one mask."""
        words = own.decode(tokens[:, None].tolist(), skip_special=False, clean_up=self.clean_up)
        texts = self._filled(own, ids, place, tokens, masks)
        return [*map(_Word, tokens.tolist(), words, scores.tolist(), texts)]

    def _filled(self, own: Tokenizer, ids: Array, place: int, tokens: Array, masks: int) -> list[str]:
        """Return the text with each of the tokens in one place."""
        texts = np.repeat(ids[None], len(tokens), 0)
        texts[:, place] = tokens
        rows = [text[text != self.pad_id].tolist() for text in texts]
        # The other masks are special tokens too.
        return own.decode(rows, skip_special=bool(masks == 1), clean_up=self.clean_up)

    def _no_mask(self, own: Tokenizer, index: int, values: Values) -> str:
        mask = own.token(self.mask_id)
        cut = int(values["cut_tokens"][index]) if "cut_tokens" in values else 0
        where = f" before it is cut: it has {cut} tokens too many" if cut else ""
        return f"element {index} of input '{self.text}' has no {mask}{where}; put {mask} where a word is missing"


class _Word(NamedTuple):
    token: int
    text: str
    score: float
    filled: str


def _by_text(masks: Sequence[Sequence[_Word]], counts: Array, most: int) -> dict[str, Array]:
    """Return the words of the masks, of which each text has ``counts``, as arrays [n, masks, most]."""
    found = columns(
        masks,
        {
            "token": (lambda each: each.token, np.int64),
            "token_str": (lambda each: each.text.encode(errors="replace"), object),
            "score": (lambda each: each.score, np.float32),
            "sequence": (lambda each: each.filled.encode(errors="replace"), object),
        },
        "words",
    )
    del found["words"]
    ends = np.cumsum(counts)[:-1]
    return {name: padded(np.split(each, ends), np.dtype((each.dtype, most))) for name, each in found.items()}
