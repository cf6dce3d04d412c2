"""``span``: from the logits of an answer's first and last token to the answer, as transformers' pipeline finds it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from ingot.steps.ragged import columns
from ingot.steps.step import Apply, Files, Shape, Step, Values, numbers_of, texts_of
from ingot.tensors import Array

# Answers of a request, at most.
MOST = 100


class Span(Step):
    """Find answers by the rule of the QuestionAnsweringPipeline of transformers 4, which transformers 5 leaves out.

    The windows of a long context are searched together; equal answers, but for case, count as one, whose score is the
    sum. Arrays are padded to the most answers of a question in the request, and ``count`` int32[n] is the number of
    each question.

    Attributes:
        first: logits of each token to be the first of the answer, float[rows, seq].
        last: likewise, the last.
        context: the input with the texts that have the answers.
        ids: the ids of tokens.
        choice: the optional input with the number of answers, up to 100, for each question or for all.
        top_k: answers of requests that name no number, best first.
        max_answer_len: tokens of an answer, at most.
        words: whether answers are extended to whole words.
        cls_id: the token that stands for no answer, as far as the model has been trained so; -1 for none.
    """

    kind: Literal["span"] = "span"
    first: str = "start_logits"
    last: str = "end_logits"
    context: str = "context"
    ids: str = "input_ids"
    attention_mask: str = "attention_mask"
    choice: str = "top_k"
    top_k: int = Field(1, ge=1, le=MOST)
    max_answer_len: int = Field(15, ge=1)
    words: bool = True
    cls_id: int = -1

    @property
    def reads(self) -> tuple[str, ...]:
        return (
            self.first,
            self.last,
            self.context,
            self.ids,
            self.attention_mask,
            "offsets",
            "words",
            "sequences",
            "item",
        )

    @property
    def writes(self) -> tuple[str, ...]:
        return ("answer", "score", "start", "end", "count")

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.choice,)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return dict.fromkeys((self.first, self.last), ("rows", "tokens"))

    def open(self, files: Files) -> Apply:
        def apply(values: Values) -> Values:
            contexts = texts_of(self.context, values[self.context])
            limits = numbers_of(self.choice, values, self.top_k, MOST, len(contexts)).tolist()
            found: list[list[_Answer]] = [[] for _ in contexts]
            for row, item in enumerate(values["item"].tolist()):
                self._add(found[item], contexts[item], self._window(values, row), limits[item])
            best = (sorted(each, key=lambda answer: -answer.score) for each in found)
            return _arrays([each[:limit] for each, limit in zip(best, limits, strict=True)])

        return apply

    def _window(self, values: Values, row: int) -> _Window:
        real = values[self.attention_mask][row] == 1
        ids, sequences = values[self.ids][row, real], values["sequences"][row, real]
        allowed = (sequences == 1) | (ids == self.cls_id)
        first, last = (_probabilities(values[name][row, real], allowed) for name in (self.first, self.last))
        return _Window(first, last, allowed, values["offsets"][row, real], values["words"][row, real], sequences)

    def _add(self, answers: list[_Answer], context: str, window: _Window, count: int) -> None:
        """Add the best answers of a window to those of the windows before it."""
        most = count * 2 + 10 if self.words else count  # some become equal as whole words
        for first, last, score in window.best(most, self.max_answer_len):
            start, end = window.characters(first, last, words=self.words)
            text = context[start:end]
            if (same := next((each for each in answers if each.text.lower() == text.lower()), None)) is not None:
                same.score += score
            else:
                answers.append(_Answer(text, score, start, end))


@dataclass
class _Answer:
    text: str
    score: float
    start: int
    end: int


class _Window(NamedTuple):
    """A row without padding: probabilities of first and last tokens, and where the tokens are."""

    first: Array
    last: Array
    allowed: Array
    offsets: Array
    words: Array
    sequences: Array

    def best(self, count: int, longest: int) -> Iterator[tuple[int, int, float]]:
        """Yield the first and last token, and the score, of the best answers of up to ``longest`` tokens."""
        size = len(self.first)
        width = min(longest, size)
        # One row for each first token: the products with the tokens from itself on.
        ends = np.lib.stride_tricks.sliding_window_view(np.pad(self.last, (0, width - 1)), width)
        scores = (self.first[:, None] * ends).reshape(-1)
        for place in np.argsort(-scores, kind="stable")[:count].tolist():
            first, length = divmod(place, width)
            if scores[place] > 0:
                yield first, first + length, float(scores[place])

    def characters(self, first: int, last: int, *, words: bool) -> tuple[int, int]:
        """Return where the answer starts and ends in the context, in characters."""
        bounds = [np.flatnonzero((self.words == self.words[token]) & (self.sequences == 1)) for token in (first, last)]
        if words and self.words[first] >= 0 and self.words[last] >= 0 and all(each.size for each in bounds):
            first, last = bounds[0][0], bounds[1][-1]
        return int(self.offsets[first][0]), int(self.offsets[last][1])


def _probabilities(logits: Array, allowed: Array) -> Array:
    masked: Array = np.where(allowed, logits.astype(np.float32, copy=False), np.float32(-10000))
    powers: Array = np.exp(masked - masked.max())
    found: Array = powers / powers.sum()
    found[~allowed] = found[0] = 0  # the first token stands for no answer
    return found


def _arrays(rows: list[list[_Answer]]) -> dict[str, Array]:
    return columns(
        rows,
        {
            "answer": (lambda each: each.text.encode(), object),
            "score": (lambda each: each.score, np.float32),
            "start": (lambda each: each.start, np.int32),
            "end": (lambda each: each.end, np.int32),
        },
    )
