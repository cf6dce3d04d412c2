"""One step of a decoder's engine, as the arrays that it is called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ingot.model_store import Generation
from ingot.tensors import Array, DType, Range, Signature, TensorSpec

KNOBS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""The numbers that the choice of a token depends on, in their order in the arrays."""


CALL = 16
"""A call costs about as much as it takes longer for so many tokens, measured with 124 million parameters on 2 cores."""


class Move(NamedTuple):
    """A row of the cache that replaces another: its first ``length`` tokens are copied."""

    source: int
    target: int
    length: int


class Chunk(NamedTuple):
    """A part of a prompt, INT64[n], for a row that holds ``start`` tokens."""

    row: int
    start: int
    tokens: Array

    @property
    def end(self) -> int:
        """Tokens that the row holds then."""
        return self.start + self.tokens.size


class Source(NamedTuple):
    """What an encoder reads for a row: tokens INT64[n]."""

    row: int
    tokens: Array


class Choice(NamedTuple):
    """How a token is chosen.

    Attributes:
        knobs: the numbers of :data:`KNOBS`.
        seed: of its random numbers.
        drawn: tokens of the answer that were chosen before.
        prompt: tokens of the prompt.
        left: tokens that the answer may still have, this one included.
    """

    knobs: tuple[float, ...]
    seed: int
    drawn: int
    prompt: int
    left: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the engine does in one call, in this order: it moves rows, reads parts of prompts, and extends rows.

    Attributes:
        moves: rows that replace others.
        sources: what an encoder reads for new rows, before their prompts; None without an encoder.
        chunks: parts of prompts.
        tokens: INT64[rows], the last token of each of the first rows of the cache, which all get another.
        lengths: INT64[rows], the tokens that each of them holds, without that one.
        choices: how the tokens are chosen: of the rows that are extended, or, if there are none, of the only chunk.
        top: how many of the most likely tokens are wanted; 0 for the chosen one's probability, -1 for none.
    """

    moves: Sequence[Move] = ()
    sources: Sequence[Source] | None = None
    chunks: Sequence[Chunk] = ()
    tokens: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    lengths: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    choices: Sequence[Choice] = ()
    top: int = -1

    @property
    def arrays(self) -> dict[str, Array]:
        """The inputs of the engine; see :data:`SIGNATURE`."""
        chunks = [(chunk.row, chunk.start, len(chunk.tokens)) for chunk in self.chunks]
        drawn = [(choice.drawn, choice.prompt, choice.left) for choice in self.choices]
        return {
            **({} if self.sources is None else _encoded(self.sources)),
            "moves": np.array(self.moves, np.int64).reshape(-1, 3),
            "chunks": np.array(chunks, np.int64).reshape(-1, 3),
            "prompts": np.concatenate([np.zeros(0, np.int64), *(chunk.tokens for chunk in self.chunks)]),
            "tokens": self.tokens,
            "lengths": self.lengths,
            "knobs": np.array([choice.knobs for choice in self.choices], np.float64).reshape(-1, len(KNOBS)),
            "seeds": np.array([choice.seed for choice in self.choices], np.uint64),
            "drawn": np.array(drawn, np.int64).reshape(-1, 3),
            "top": np.array([self.top], np.int64),
        }


class Chosen(NamedTuple):
    """The outputs of a step, by the choices of its ``choices``.

    Attributes:
        tokens: INT64[choices].
        logprobs: FP32[choices], natural logarithms of probabilities; empty if none are wanted.
        top_tokens: INT64[choices, top], the most likely tokens, most likely first.
        top_logprobs: FP32[choices, top].
        seconds: FP64[3], of the prompts, of the rows that were extended, and of choosing.
    """

    tokens: Array
    logprobs: Array
    top_tokens: Array
    top_logprobs: Array
    seconds: Array


def example(rows: int) -> dict[str, Array]:
    """Return the inputs of a step by which variants are timed: rows without a token get their first, the likeliest."""
    likeliest = Choice((0, 0, 1, 0, 1, 0, 0), seed=0, drawn=0, prompt=0, left=2)
    none = np.zeros(rows, np.int64)
    return Step(tokens=none, lengths=none, choices=[likeliest] * rows).arrays


def _encoded(sources: Sequence[Source]) -> dict[str, Array]:
    sizes = [(source.row, source.tokens.size) for source in sources]
    tokens = np.concatenate([np.zeros(0, np.int64), *(source.tokens for source in sources)])
    return {"sources": np.array(sizes, np.int64).reshape(-1, 2), "source_ids": tokens}


def sources_of(inputs: Mapping[str, Array]) -> list[Source]:
    """Return the sources in a step's inputs."""
    found, begun = [], 0
    for row, size in inputs["sources"].tolist():
        found.append(Source(row, inputs["source_ids"][begun : begun + size]))
        begun += size
    return found


def chunks_of(inputs: Mapping[str, Array]) -> list[Chunk]:
    """Return the parts of prompts of a step's inputs."""
    found, begun = [], 0
    for row, start, count in inputs["chunks"].tolist():
        found.append(Chunk(row, start, inputs["prompts"][begun : begun + count]))
        begun += count
    return found


def grouped(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Return the chunks of each call: beginnings of adjacent rows share one where padding costs less than a call."""
    groups: list[list[Chunk]] = []
    for chunk in chunks:
        if groups and _joins(groups[-1], chunk):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _joins(group: Sequence[Chunk], chunk: Chunk) -> bool:
    if group[-1].start or chunk.start or group[-1].row + 1 != chunk.row:
        return False
    sizes = [each.tokens.size for each in (*group, chunk)]
    return len(sizes) * max(sizes) - sum(sizes) <= CALL * len(group)


def _spec(name: str, dtype: DType, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, dtype, shape)


_INPUTS = (
    _spec("moves", DType.INT64, "moves", 3),
    _spec("chunks", DType.INT64, "chunks", 3),
    _spec("prompts", DType.INT64, "read"),
    _spec("tokens", DType.INT64, "rows"),
    _spec("lengths", DType.INT64, "rows"),
    _spec("knobs", DType.FP64, "choices", len(KNOBS)),
    _spec("seeds", DType.UINT64, "choices"),
    _spec("drawn", DType.INT64, "choices", 3),
    _spec("top", DType.INT64, 1),
)
_OUTPUTS = (
    _spec("tokens", DType.INT64, "choices"),
    _spec("logprobs", DType.FP32, "logged"),
    _spec("top_tokens", DType.INT64, "logged", "top"),
    _spec("top_logprobs", DType.FP32, "logged", "top"),
    _spec("seconds", DType.FP64, 3),
)
_SIZES = ("moves", "chunks", "read", "rows", "choices", "logged", "top")
SIGNATURE = Signature(_INPUTS, _OUTPUTS, None, ranges={name: Range(0) for name in _SIZES})
"""The inputs and outputs of a decoder's engine."""
_SOURCES = (
    _spec("sources", DType.INT64, "encoded", 2),
    _spec("source_ids", DType.INT64, "ids"),
)
ENCODING_SIGNATURE = Signature(
    (*_INPUTS, *_SOURCES), _OUTPUTS, None, ranges={name: Range(0) for name in (*_SIZES, "encoded", "ids")}
)
"""Those of an encoder-decoder's engine."""


def signature_of(generation: Generation) -> Signature:
    """Return the inputs and outputs of an archive's engine."""
    return SIGNATURE if generation.encoder is None else ENCODING_SIGNATURE
