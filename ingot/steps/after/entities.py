"""``entities``: from the logits of each token to named parts of a text, as transformers' pipeline finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from ingot.steps import tokenizer
from ingot.steps.after.classify import fit, softmax
from ingot.steps.ragged import columns
from ingot.steps.step import Apply, Files, Shape, Step, Values, choices_of, texts_of
from ingot.steps.tokenizer import Tokenizer
from ingot.tensors import Array, TensorSpec

Aggregation = Literal["none", "simple", "first", "average", "max"]
AGGREGATIONS: tuple[Aggregation, ...] = ("none", "simple", "first", "average", "max")


class Entities(Step):
    """Find entities by the rule of transformers' TokenClassificationPipeline, source of the names.

    ``none`` returns each token; ``simple`` joins neighbours of one label, where ``B-`` begins a new one; ``first``,
    ``average`` and ``max`` first give each word one label. All arrays are padded to the most entities of a text in the
    request, and ``count`` int32[n] is the number of each text.

    Attributes:
        file: the tokenizer, which makes words of tokens.
        labels: the names of classes, in the order of the logits.
        logits: float[n, seq, classes].
        text: the input with the texts.
        ids: the ids of tokens.
        choice: the optional input with the strategy.
        aggregation: the strategy of requests that name none.
        ignored: labels that are left out.
        unknown_id: the token of unknown words, -1 for none.
    """

    kind: Literal["entities"] = "entities"
    file: str = "tokenizer.json"
    labels: tuple[str, ...] = Field(min_length=1, max_length=1_000_000)
    logits: str = "logits"
    text: str = "text"
    ids: str = "input_ids"
    choice: str = "aggregation_strategy"
    aggregation: Aggregation = "simple"
    ignored: tuple[str, ...] = ("O",)
    unknown_id: int = -1

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.logits, self.text, self.ids, "offsets", "special")

    @property
    def writes(self) -> tuple[str, ...]:
        return ("entity", "score", "word", "start", "end", "index", "count")

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.choice,)

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        return {self.choice: AGGREGATIONS}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {self.logits: ("batch", "tokens", "classes")}

    def check(self, known: Mapping[str, TensorSpec | None], files: Files | None = None) -> None:
        super().check(known)
        spec = known[self.logits]
        if spec is not None and isinstance(classes := spec.shape[2], int):
            fit(self.kind, self.labels, self.logits, classes)

    def open(self, files: Files) -> Apply:
        own = tokenizer.load(files(self.file), self.file)

        def apply(values: Values) -> Values:
            texts = texts_of(self.text, values[self.text])
            chosen = choices_of(self.choice, values, self.aggregation, AGGREGATIONS, len(texts))
            scores = softmax(values[self.logits].astype(np.float32, copy=False))
            fit(self.kind, self.labels, self.logits, scores.shape[2])
            rows = []
            for index, (text, strategy) in enumerate(zip(texts, chosen, strict=True)):
                each = (values[name][index] for name in (self.ids, "offsets", "special"))
                tokens = [*self._tokens(own, text, scores[index], *each)]
                found = _AGGREGATED[strategy](own, self.labels, tokens)
                rows.append([entity for entity in found if entity.label not in self.ignored])
            return _arrays(rows)

        return apply

    def _tokens(
        self, own: Tokenizer, text: str, scores: Array, ids: Array, offsets: Array, special: Array
    ) -> Iterator[_Token]:
        """Yield the tokens of a text, without special ones and padding."""
        first = int((special != -1).argmax())
        for place in np.flatnonzero(special == 0).tolist():
            start, end = offsets[place].tolist()
            word, part = own.token(int(ids[place])), text[start:end]
            if own.subword_prefix:
                inside = len(word) != len(part)
            else:
                inside = start > 0 and " " not in text[start - 1 : start + 1]
            if ids[place] == self.unknown_id:
                word, inside = part, False
            yield _Token(word, scores[place], start, end, place - first, inside)


@dataclass(frozen=True)
class _Token:
    """A token: the probabilities of its classes, its place, and whether it continues a word."""

    word: str
    scores: Array
    start: int
    end: int
    index: int
    inside: bool


@dataclass(frozen=True)
class _Entity:
    label: str
    score: np.float32
    word: str
    start: int
    end: int
    index: int = -1


_Labels = Sequence[str]


def _each(own: Tokenizer, labels: _Labels, tokens: Iterable[_Token]) -> list[_Entity]:
    found = []
    for token in tokens:
        best = int(token.scores.argmax())
        found.append(_Entity(labels[best], token.scores[best], token.word, token.start, token.end, token.index))
    return found


def _simple(own: Tokenizer, labels: _Labels, tokens: Iterable[_Token]) -> list[_Entity]:
    return [*_grouped(own, _each(own, labels, tokens))]


def _by_word(scores_of: Callable[[Sequence[_Token]], Array]) -> _Aggregated:
    def aggregated(own: Tokenizer, labels: _Labels, tokens: Iterable[_Token]) -> list[_Entity]:
        words: list[list[_Token]] = []
        for token in tokens:
            if token.inside and words:
                words[-1].append(token)
            else:
                words.append([token])
        found = []
        for word in words:
            scores = scores_of(word)
            best, text = int(scores.argmax()), own.joined([token.word for token in word])
            found.append(_Entity(labels[best], scores[best], text, word[0].start, word[-1].end))
        return [*_grouped(own, found)]

    return aggregated


def _grouped(own: Tokenizer, entities: Iterable[_Entity]) -> Iterator[_Entity]:
    """Join neighbours of one label, where ``B-`` begins a new one."""
    groups: list[list[_Entity]] = []
    for entity in entities:
        if groups and not entity.label.startswith("B-") and _tag(entity.label) == _tag(groups[-1][-1].label):
            groups[-1].append(entity)
        else:
            groups.append([entity])
    for group in groups:
        score = np.mean([entity.score for entity in group], dtype=np.float32)
        label = group[0].label.split("-", 1)[-1]
        yield _Entity(label, score, own.joined([each.word for each in group]), group[0].start, group[-1].end)


def _tag(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label


def _arrays(rows: Sequence[Sequence[_Entity]]) -> dict[str, Array]:
    return columns(
        rows,
        {
            "entity": (lambda each: each.label.encode(), object),
            "score": (lambda each: each.score, np.float32),
            "word": (lambda each: each.word.encode(errors="replace"), object),
            "start": (lambda each: each.start, np.int32),
            "end": (lambda each: each.end, np.int32),
            "index": (lambda each: each.index, np.int32),
        },
    )


_Aggregated = Callable[[Tokenizer, _Labels, Iterable[_Token]], list[_Entity]]
_AGGREGATED: Mapping[str, _Aggregated] = {
    "none": _each,
    "simple": _simple,
    "first": _by_word(lambda word: word[0].scores),
    "average": _by_word(lambda word: np.stack([token.scores for token in word]).mean(0)),
    "max": _by_word(lambda word: max(word, key=lambda token: token.scores.max()).scores),
}
