"""``tokenize``: from texts, or pairs of texts, to the ids of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from ingot import foreign
from ingot.errors import InvalidArgument, quoted
from ingot.steps import tokenizer
from ingot.steps.step import Apply, Files, Step, Values, texts_of
from ingot.steps.tokenizer import Tokenizer
from ingot.tensors import Array


class Tokenize(Step):
    """Tokenize texts with a tokenizer of Hugging Face's ``tokenizers``, and pad the rows of a request in numpy.

    A text that is too long is cut as the tokenizer would cut it (pairs: the longer text first), and ``cut_tokens``
    counts what was cut, or it is refused, as ``overflow`` says. Texts over ``max_characters`` are always refused,
    because a text is encoded whole before it is cut; so are requests over ``max_total_characters``.

    Attributes:
        file: the serialization of the loaded tokenizer, without truncation and padding.
        text: the input with the texts.
        pair: the input with the second text of each pair; empty without pairs.
        prompts: texts that are put before each text, by name.
        prompt: the optional input with the name of the prompt, used if there are prompts.
        default_prompt: the prompt of requests that name none; empty for none.
        lower: whether texts are put in lower case first, by Python's rules.
        max_length: tokens of a row with special tokens, of which there must be fewer.
        stride: tokens that two windows share: a pair that is too long becomes several rows, each with the whole first
            text and a window of the second, and ``item`` int32[rows] is the index of each row's pair. None to cut it.
        details: whether the places of tokens are returned too: ``offsets`` int32[n, longest, 2] in characters,
            ``words`` int32[n, longest] with the number of each token's word, ``sequences`` int32[n, longest] with 0 or
            1 for the text of a pair, and ``special`` int32[n, longest] with 1 for tokens that stand for no text.
            Padding and what does not apply are -1.
        ids: the name of the tokens' ids, int64[n, longest]; ``attention_mask`` and ``types`` have the same shape.
    """

    kind: Literal["tokenize"] = "tokenize"
    file: str = "tokenizer.json"
    text: str = "text"
    pair: str = ""
    prompts: Mapping[str, Annotated[str, Field(max_length=10_000)]] = Field(default_factory=dict)
    prompt: str = "prompt_name"
    default_prompt: str = ""
    lower: bool = False
    max_length: int = Field(512, ge=1, le=1 << 20)
    overflow: Literal["cut", "refuse"] = "cut"
    max_characters: int = Field(100_000, ge=1, le=1 << 24)
    max_total_characters: int = Field(2_000_000, ge=1, le=1 << 28)
    pad_id: int = Field(0, ge=0, lt=1 << 32)
    pad_type: int = Field(0, ge=0, lt=1 << 31)
    padding_side: Literal["right", "left"] = "right"
    truncation_side: Literal["right", "left"] = "right"
    stride: int | None = Field(None, ge=0)
    details: bool = False
    ids: str = "input_ids"
    attention_mask: str = "attention_mask"
    types: str = "token_type_ids"

    @model_validator(mode="after")
    def _known_prompt(self) -> Tokenize:
        if self.default_prompt and self.default_prompt not in self.prompts:
            raise ValueError(f"the default prompt '{self.default_prompt}' is not among the prompts")
        return self

    @model_validator(mode="after")
    def _own_places(self) -> Tokenize:
        if self.details and (self.prompts or self.lower):
            raise ValueError(
                "the places of tokens are those in the text as it was sent: details exclude prompts and lower"
            )
        if self.stride is not None and (not self.pair or self.overflow == "refuse"):
            raise ValueError("a stride is for pairs that become several rows: give pair, and leave overflow out")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def writes(self) -> tuple[str, ...]:
        places = PLACES if self.details else ()
        items = () if self.stride is None else ("item",)
        return (self.ids, self.attention_mask, self.types, "tokens", "cut_tokens", *places, *items)

    @property
    def cuts(self) -> Mapping[str, str]:
        return {"tokens": "cut_tokens"}

    @property
    def lengths(self) -> str:
        return self.attention_mask if self.padding_side == "right" else ""

    @property
    def bytes_at_once(self) -> int:
        return max(0, _BYTES_AT_ONCE - max(map(len, self.prompts.values()), default=0))

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.prompt,) if self.prompts else ()

    @property
    def choices(self) -> Mapping[str, Sequence[str]]:
        return {self.prompt: [*self.prompts]} if self.prompts else {}

    def check_lengths(self, name: str, texts: Sequence[str]) -> None:
        """Check the characters of the texts of an input.

        Raises:
            InvalidArgument: a text has too many, or all have together.
        """
        for index, text in enumerate(texts):
            if len(text) > self.max_characters:
                raise InvalidArgument(
                    f"element {index} of input '{name}' has {len(text)} characters, over the limit of "
                    f"{self.max_characters}; divide the text"
                )
        if (total := sum(map(len, texts))) > self.max_total_characters:
            raise InvalidArgument(
                f"input '{name}' has {total} characters in all, over the limit of {self.max_total_characters}; divide "
                "the request"
            )

    def open(self, files: Files) -> Apply:
        return Tokenizing(self, tokenizer.load(files(self.file), self.file))


# Bytes of texts and their pointers that are encoded in some 0.2 ms, which is less than what another thread costs.
_BYTES_AT_ONCE = 512
PLACES = ("offsets", "words", "sequences", "special")
"""The values that ``details`` adds."""
MOST_TOKENS = 1 << 17
"""Tokens of which a request may ask for the texts, or send the ids."""
# Characters that are encoded at once: a token takes some hundred bytes until only its ids are kept.
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class _Row:
    """The tokens of one text or pair, or of one window of a pair; ``cut`` is how many more it had."""

    ids: Array
    types: Array
    cut: int
    item: int
    places: Mapping[str, Array]


class Tokenizing:
    """The opened step, with a second tokenizer that cuts.

    Args:
        step: the configuration.
        own: the tokenizer, which cuts nothing.

    Raises:
        InvalidArgument: rows have no room, or no token has the id of padding.
        InvalidArchive: the tokenizer may make too much of a text, or its rows of more than each text once.
    """

    def __init__(self, step: Tokenize, own: Tokenizer):
        self._step = step
        self.tokenizer = own
        own.check_growth(step.max_characters)
        special = own.special(pair=bool(step.pair))
        if step.max_length <= special:  # below this number the package cuts nothing, silently
            raise InvalidArgument(
                f"max_length of step 'tokenize' is {step.max_length}, but '{step.file}' puts {special} special tokens "
                f"into each row; set it to {special + 1} or more"
            )
        own.check_rows(pair=bool(step.pair))
        own.check_id("pad_id of step 'tokenize'", step.pad_id)
        windows = {} if step.stride is None else {"strategy": "only_second", "stride": step.stride}
        self._cutting: Any = own.cutting(step.max_length, side=step.truncation_side, **windows)  # type: ignore[arg-type]

    def __call__(self, values: Values) -> Values:
        """Return the ids, mask and types of the texts, and how many tokens each has and lost.

        Raises:
            InvalidArgument: a text is not valid UTF-8 or too long, one of a pair with a stride is empty, the tokenizer
                fails, or there is no such prompt.
        """
        step = self._step
        texts = self.checked(step.text, values[step.text])
        if step.prompts:
            texts = self._prompted(texts, values.get(step.prompt))
        rows: Sequence[Any] = texts
        if step.pair and step.pair in values:
            rows = list(zip(texts, self.checked(step.pair, values[step.pair]), strict=True))
        if step.stride is not None:
            _check_filled(rows, step.text, step.pair)
        encode = self._rows if step.stride is None else self._windows
        encoded = [row for first, chunk in _chunks(rows) for row in encode(first, chunk)]
        cut = np.array([row.cut for row in encoded], np.int32)
        if step.overflow == "refuse" and cut.any():
            index = int(cut.argmax())
            raise InvalidArgument(
                f"element {index} of input '{step.text}' has {len(encoded[index].ids) + int(cut[index])} tokens; the "
                f"model accepts {step.max_length}; send a shorter text"
            )
        found = self._padded(encoded)
        tokens = np.array([len(row.ids) for row in encoded], np.int32)
        if step.stride is None:
            return {**found, "tokens": tokens, "cut_tokens": cut}
        items = np.array([row.item for row in encoded], np.int32)
        counts = np.bincount(items, tokens, len(rows)).astype(np.int32)
        return {**found, "tokens": counts, "cut_tokens": np.zeros(len(rows), np.int32), "item": items}

    def tokens(self, values: Values, *, special: bool) -> list[tuple[str, Any]]:
        """Return each text, after its prompt, with the package's encoding of it, which is not cut.

        Raises:
            InvalidArgument: as for a call, or there are more than :data:`MOST_TOKENS` in all.
        """
        texts = self.checked(self._step.text, values[self._step.text])
        if self._step.prompts:
            texts = self._prompted(texts, values.get(self._step.prompt))
        failure = f"the model's tokenizer cannot encode input '{self._step.text}'; send another text"
        found: list[Any] = []
        total = 0
        for _, chunk in _chunks(texts):
            with foreign.reported_as(InvalidArgument, failure, keep=MemoryError):
                found += self.tokenizer.whole.encode_batch(chunk, add_special_tokens=special)
            if (total := total + sum(map(len, found[-len(chunk) :]))) > MOST_TOKENS:
                raise InvalidArgument(
                    f"input '{self._step.text}' has more than {MOST_TOKENS} tokens in all; divide the request"
                )
        return list(zip(texts, found, strict=True))

    def _rows(self, first: int, rows: Sequence[Any]) -> list[_Row]:
        encodings = self._encoded(self._cutting, rows)
        full = [index for index, encoding in enumerate(encodings) if len(encoding) >= self._step.max_length]
        cut = dict.fromkeys(range(len(rows)), 0)
        if full:
            whole = self._encoded(self.tokenizer.whole, [rows[index] for index in full])
            cut |= {index: len(encoding) - len(encodings[index]) for index, encoding in zip(full, whole, strict=True)}
        return [self._row(encoding, first + index, cut[index]) for index, encoding in enumerate(encodings)]

    def _windows(self, first: int, rows: Sequence[tuple[str, str]]) -> list[_Row]:
        """Return the rows of pairs, of which those that are too long have several."""
        found = []
        for index, (row, encoding) in enumerate(zip(rows, self._encoded(self.tokenizer.whole, rows), strict=True)):
            windows = [encoding]
            if len(encoding) > self._step.max_length:
                self._check_room(first + index, encoding)
                [cut] = self._encoded(self._cutting, [row])
                windows = [cut, *cut.overflowing]
            found += [self._row(window, first + index, 0) for window in windows]
        return found

    def _check_room(self, index: int, encoding: Any) -> None:
        """Refuse a pair whose first text leaves no room for windows of the second."""
        step = self._step
        own = encoding.sequence_ids.count(0)
        most = step.max_length - self.tokenizer.special(pair=True) - (step.stride or 0) - 1
        if own > most:
            raise InvalidArgument(
                f"element {index} of input '{step.text}' has {own} tokens, over the limit of {most} with a long "
                f"'{step.pair}'; send a shorter text"
            )

    def _row(self, encoding: Any, item: int, cut: int) -> _Row:
        places = {}
        if self._step.details:
            numbers = (encoding.offsets, _numbers(encoding.word_ids), _numbers(encoding.sequence_ids))
            found = zip(PLACES, (*numbers, encoding.special_tokens_mask), strict=True)
            places = {name: np.array(values, np.int32) for name, values in found}
        return _Row(np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64), cut, item, places)

    def _encoded(self, own: Any, rows: Sequence[Any]) -> Sequence[Any]:
        # A tokenizer that fails on each text fails on its goldens; so the text is at fault.
        failure = f"the model's tokenizer cannot encode input '{self._step.text}'; send another text"
        # Both release the interpreter's lock; the fast one leaves offsets out.
        exact = self._step.details or self._step.stride is not None
        with foreign.reported_as(InvalidArgument, failure, keep=MemoryError):
            encodings: Sequence[Any] = own.encode_batch(rows) if exact else own.encode_batch_fast(rows)
        return encodings

    def checked(self, name: str, values: Array) -> list[str]:
        """Return the texts of an input.

        Raises:
            InvalidArgument: one is not valid UTF-8, or they are too long.
        """
        texts = texts_of(name, values)
        self._step.check_lengths(name, texts)
        return [text.lower() for text in texts] if self._step.lower else texts

    def _prompted(self, texts: list[str], given: Array | None) -> list[str]:
        step = self._step
        names = [step.default_prompt] if given is None else texts_of(step.prompt, given)
        for name in names:
            if name and name not in step.prompts:
                known = ", ".join(step.prompts)
                raise InvalidArgument(f"input '{step.prompt}' is {quoted(name)}; the model's prompts are: {known}")
        chosen = [step.prompts.get(name, "") for name in names]
        if len(chosen) == 1:
            chosen *= len(texts)
        prompts = [prompt.lower() for prompt in chosen] if step.lower else chosen
        return [prompt + text for prompt, text in zip(prompts, texts, strict=True)]

    def _padded(self, rows: Sequence[_Row]) -> dict[str, Array]:
        step = self._step
        lengths = [len(row.ids) for row in rows]
        # A graph has no size 0: a row without any token is one masked pad token.
        shape = len(rows), max(1, *lengths)
        ids, types = np.full(shape, step.pad_id, np.int64), np.full(shape, step.pad_type, np.int64)
        mask = np.zeros(shape, np.int64)
        places = {name: np.full((*shape, 2) if name == "offsets" else shape, -1, np.int32) for name in rows[0].places}
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            place = slice(0, length) if step.padding_side == "right" else slice(shape[1] - length, None)
            ids[index, place] = row.ids
            types[index, place] = row.types
            mask[index, place] = 1
            for name, values in row.places.items():
                places[name][index, place] = values.reshape(length, *places[name].shape[2:])
        return {step.ids: ids, step.attention_mask: mask, step.types: types, **places}


def _check_filled(rows: Sequence[tuple[str, str]], *names: str) -> None:
    """Refuse an empty question, and an empty context, in which nothing can be found."""
    for index, row in enumerate(rows):
        for name, text in zip(names, row, strict=True):
            if not text:
                raise InvalidArgument(f"element {index} of input '{name}' is empty; send a text")


def _numbers(values: Sequence[int | None]) -> list[int]:
    return [-1 if value is None else value for value in values]


def _chunks(rows: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Divide texts, or pairs, so that few characters are encoded at once; with the index of the first of each part."""
    chunk: list[Any] = []
    size = first = 0
    for index, row in enumerate(rows):
        chunk.append(row)
        size += len(row) if isinstance(row, str) else sum(map(len, row))
        if size >= _AT_ONCE:
            yield first, chunk
            chunk, size, first = [], 0, index + 1
    if chunk:
        yield first, chunk
