"""``fill``: from the logits of a masked token to the words that fit best, as transformers' pipeline finds them."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from ingot.errors import InvalidArgument
from ingot.steps import tokenizer
from ingot.steps.after.classify import softmax
from ingot.steps.step import Apply, Files, Step, Values, largest_of
from ingot.steps.tokenizer import Tokenizer
from ingot.tensors import Array

# Words of a mask, at most.
MOST = 100
# Tokens of all texts that a request gets back: one text for each word of each mask. Millions take seconds.
_MOST_TOKENS = 1 << 22


class Fill(Step):
    """Fill each mask by the rule of transformers' FillMaskPipeline.

    Arrays are [n, masks, k], padded to the most masks of a text in the request; ``count`` int32[n] is the number of
    each text.

    Attributes:
        file: the tokenizer, which makes texts of tokens.
        mask_id: the token that stands for a missing word.
        pad_id: the token of padding.
        logits: float[n, seq, vocabulary].
        text: the input with the texts, for messages.
        ids: the ids of tokens.
        mask: 1 for each token that is not padding.
        choice: the optional input with the number of words, up to 100.
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
    mask: str = "attention_mask"
    choice: str = "top_k"
    top_k: int = Field(5, ge=1, le=MOST)
    clean_up: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.ids, self.mask)

    @property
    def writes(self) -> tuple[str, ...]:
        return ("token", "token_str", "score", "sequence", "count")

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.choice,)

    def open(self, files: Files) -> Apply:
        own = tokenizer.load(files(self.file), self.file)
        own.check_id("mask_id of step 'fill'", self.mask_id)

        def apply(values: Values) -> Values:
            logits, ids = values[self.logits], values[self.ids]
            masked = (ids == self.mask_id) & (values[self.mask] == 1)
            counts = masked.sum(1)
            if (empty := np.flatnonzero(counts == 0)).size:
                raise InvalidArgument(self._no_mask(own, int(empty[0]), values))
            count = min(largest_of(self.choice, values, self.top_k, MOST), logits.shape[-1])
            if (tokens := int(counts.sum()) * count * ids.shape[1]) > _MOST_TOKENS:
                raise InvalidArgument(
                    f"input '{self.text}' has {counts.sum()} masks, whose {count} words each make texts of {tokens} "
                    f"tokens in all, over the limit of {_MOST_TOKENS}; send fewer texts, or a smaller {self.choice}"
                )
            rows, places = np.nonzero(masked)
            scores = softmax(logits[rows, places].astype(np.float32, copy=False))
            best = np.argsort(-scores, axis=1, kind="stable")[:, :count]
            best_scores = np.take_along_axis(scores, best, 1)
            shape = len(ids), int(counts.max()), count
            found = {"token": np.full(shape, -1, np.int64), "score": np.zeros(shape, np.float32)}
            found |= {name: np.full(shape, b"", object) for name in ("token_str", "sequence")}
            order = np.concatenate([np.arange(number) for number in counts])  # of the masks of each text
            found["token"][rows, order], found["score"][rows, order] = best, best_scores
            words = own.decode(best.reshape(-1, 1).tolist(), skip_special=False, clean_up=self.clean_up)
            found["token_str"][rows, order] = _bytes(words, best.shape)
            for row, place, which, tokens in zip(rows, places.tolist(), order, best, strict=True):
                found["sequence"][row, which] = _bytes(
                    self._filled(own, ids[row], place, tokens, counts[row]), (count,)
                )
            return {**found, "count": counts.astype(np.int32)}

        return apply

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


def _bytes(texts: list[str], shape: tuple[int, ...]) -> Array:
    found = np.empty(len(texts), object)
    found[:] = [text.encode(errors="replace") for text in texts]
    return found.reshape(shape)
