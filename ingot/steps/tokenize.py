"""``tokenize``: from texts, or pairs of texts, to the ids of their tokens."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from ingot import foreign
from ingot.errors import InvalidArchive, InvalidArgument, missing_package, quoted
from ingot.steps.step import Apply, Files, Step, Values, texts_of
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
        lower: whether texts are put in lower case first, as sentence-transformers' ``do_lower_case`` does.
        max_length: tokens of a row with special tokens, of which there must be fewer.
        ids: the name of the tokens' ids, int64[n, longest]; ``mask`` and ``types`` have the same shape.
    """

    kind: Literal["tokenize"] = "tokenize"
    file: str = "tokenizer.json"
    text: str = "text"
    pair: str = ""
    prompts: Mapping[str, str] = Field(default_factory=dict)
    prompt: str = "prompt_name"
    default_prompt: str = ""
    lower: bool = False
    max_length: int = Field(512, ge=1, le=1 << 20)
    overflow: Literal["cut", "refuse"] = "cut"
    max_characters: int = Field(100_000, ge=1)
    max_total_characters: int = Field(2_000_000, ge=1)
    pad_id: int = Field(0, ge=0)
    pad_type: int = Field(0, ge=0)
    padding_side: Literal["right", "left"] = "right"
    truncation_side: Literal["right", "left"] = "right"
    ids: str = "input_ids"
    mask: str = "attention_mask"
    types: str = "token_type_ids"

    @model_validator(mode="after")
    def _known_prompt(self) -> Tokenize:
        if self.default_prompt and self.default_prompt not in self.prompts:
            raise ValueError(f"the default prompt '{self.default_prompt}' is not among the prompts")
        return self

    @property
    def files(self) -> tuple[str, ...]:
        return (self.file,)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.ids, self.mask, self.types, "tokens", "cut_tokens")

    @property
    def shared(self) -> tuple[str, ...]:
        return (self.prompt,) if self.prompts else ()

    @property
    def described(self) -> Mapping[str, str]:
        names = {"prompts": json.dumps({self.prompt: [*self.prompts]})} if self.prompts else {}
        return {"max_tokens": str(self.max_length), **names}

    def open(self, files: Files) -> Apply:
        return _Tokenizer(self, files(self.file)).apply


# Characters that are encoded at once: a token takes some hundred bytes until only its ids are kept.
_AT_ONCE = 1 << 16


class _Row(NamedTuple):
    """The tokens of one text or pair; ``cut`` is how many more it had."""

    ids: Array
    types: Array
    cut: int


class _Tokenizer:
    """Two immutable tokenizers: one cuts, the other counts what was cut.

    Settings of truncation and padding belong to the object, and changing them while a thread encodes fails
    (huggingface/tokenizers#537).
    """

    def __init__(self, step: Tokenize, content: bytes):
        self._step = step
        # Its own threads would compete with those of engines, and warn where an engine process is forked.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Imported by name: the package has few types.
        try:
            tokenizers: Any = importlib.import_module("tokenizers")
        except ModuleNotFoundError as error:
            raise missing_package("tokenizers", "a model that is served with its tokenizer", "text") from error
        with foreign.reported_as(InvalidArchive, f"the tokenizer '{step.file}' cannot be read"):
            self._whole: Any = tokenizers.Tokenizer.from_str(content.decode())
            self._whole.no_truncation()
            self._whole.no_padding()
            self._cutting: Any = tokenizers.Tokenizer.from_str(self._whole.to_str())
            # Below this number the package cuts nothing, silently.
            special = self._whole.num_special_tokens_to_add(bool(step.pair))
            self._cutting.enable_truncation(step.max_length, strategy="longest_first", direction=step.truncation_side)

        if step.max_length <= special:
            raise InvalidArgument(
                f"max_length of step 'tokenize' is {step.max_length}, but '{step.file}' puts {special} special tokens "
                f"into each row; set it to {special + 1} or more"
            )

    def apply(self, values: Values) -> Values:
        """Return the ids, mask and types of the texts, and how many tokens each has and lost.

        Raises:
            InvalidArgument: a text is not valid UTF-8 or too long, the tokenizer fails, or there is no such prompt.
        """
        step = self._step
        texts = self._checked(step.text, values[step.text])
        if step.prompts:
            texts = self._prompted(texts, values.get(step.prompt))
        rows: Sequence[Any] = texts
        if step.pair and step.pair in values:
            rows = list(zip(texts, self._checked(step.pair, values[step.pair]), strict=True))
        encoded = [row for chunk in _chunks(rows) for row in self._rows(chunk)]
        cut = np.array([row.cut for row in encoded], np.int32)
        if step.overflow == "refuse" and cut.any():
            index = int(cut.argmax())
            raise InvalidArgument(
                f"element {index} of input '{step.text}' has {len(encoded[index].ids) + int(cut[index])} tokens; the "
                f"model accepts {step.max_length}; send a shorter text"
            )
        return {**self._padded(encoded), "cut_tokens": cut}

    def _rows(self, rows: Sequence[Any]) -> list[_Row]:
        encodings = self._encoded(self._cutting, rows)
        full = [index for index, encoding in enumerate(encodings) if len(encoding) >= self._step.max_length]
        cut = dict.fromkeys(range(len(rows)), 0)
        if full:
            whole = self._encoded(self._whole, [rows[index] for index in full])
            cut |= {index: len(encoding) - len(encodings[index]) for index, encoding in zip(full, whole, strict=True)}
        return [
            _Row(np.array(encoding.ids, np.int64), np.array(encoding.type_ids, np.int64), cut[index])
            for index, encoding in enumerate(encodings)
        ]

    def _encoded(self, tokenizer: Any, rows: Sequence[Any]) -> Sequence[Any]:
        # A tokenizer that fails on each text fails on its goldens; so the text is at fault.
        failure = f"the model's tokenizer cannot encode input '{self._step.text}'; send another text"
        with foreign.reported_as(InvalidArgument, failure, keep=MemoryError):
            encodings: Sequence[Any] = tokenizer.encode_batch_fast(rows)  # releases the interpreter's lock
        return encodings

    def _checked(self, name: str, values: Array) -> list[str]:
        texts = texts_of(name, values)
        for index, text in enumerate(texts):
            if len(text) > self._step.max_characters:
                raise InvalidArgument(
                    f"element {index} of input '{name}' has {len(text)} characters, over the limit of "
                    f"{self._step.max_characters}; divide the text"
                )
        if (total := sum(map(len, texts))) > self._step.max_total_characters:
            raise InvalidArgument(
                f"input '{name}' has {total} characters in all, over the limit of "
                f"{self._step.max_total_characters}; divide the request"
            )
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
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            place = slice(0, length) if step.padding_side == "right" else slice(shape[1] - length, None)
            ids[index, place] = row.ids
            types[index, place] = row.types
            mask[index, place] = 1
        return {step.ids: ids, step.mask: mask, step.types: types, "tokens": np.array(lengths, np.int32)}


def _chunks(rows: Sequence[Any]) -> Iterator[list[Any]]:
    """Divide texts, or pairs, so that few characters are encoded at once."""
    chunk: list[Any] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row) if isinstance(row, str) else sum(map(len, row))
        if size >= _AT_ONCE:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
