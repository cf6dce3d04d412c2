"""Proof of a decoder: greedy tokens equal to ``generate()``'s, logits, and rows of a batch equal to rows alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ingot import foreign
from ingot.errors import ExportError, ParityError
from ingot.export.decoder.attention import Shape
from ingot.export.program import Runner, quiet
from ingot.export.proof.parity import TOLERANCE
from ingot.model_store import Generation, Golden, ParityEvidence
from ingot.model_store.format.evidence import TokensEvidence
from ingot.steps.samples import texts
from ingot.tensors import Array, DType, arrays

# Prompts, and tokens of each answer; of large models fewer, as each token reads all weights.
_USUAL, _FEW = (16, 32), (8, 16)
# Weights, and logits, of a large model.
_LARGE, _LARGE_VOCAB = 400_000_000, 100_000
# Tokens of the longest prompt, unless a window is longer: then the prompt exceeds the window, up to the second number.
_LONGEST, _LONGEST_WINDOW = 96, 2048
_GOLDENS = 3
# A golden ends before a token that is closer to the next best one than so many times the tolerance.
_CLEAR = 10
_TOLERANCE = TOLERANCE[DType.FP32]


@dataclass(frozen=True)
class Answer:
    """Tokens [n] that follow a prompt, and the logits [n, vocab] from which each was chosen."""

    prompt: Array
    tokens: Array
    logits: Array

    @property
    def gaps(self) -> Array:
        """The difference between the logits of each token and of the next best one, [n]."""
        best = np.partition(self.logits, -2, axis=1)[:, -2:]
        gaps: Array = best[:, 1] - best[:, 0]
        return gaps

    @property
    def scale(self) -> float:
        """The largest logit."""
        return max(float(np.abs(self.logits).max()), arrays.SCALE_FLOOR)


def generated(model: Any, generation: Generation, shapes: Sequence[Shape], tokenizer: Any) -> list[Answer]:
    """Return the answers of the original to prompts of several lengths: every other one is of text, if it can be.

    Args:
        model: the original.
        generation: its declaration.
        shapes: its caches.
        tokenizer: None if there is none.

    Raises:
        ExportError: ``generate()`` fails.
    """
    large = sum(weight.numel() for weight in model.parameters()) > _LARGE or generation.vocab > _LARGE_VOCAB
    count, new = _FEW if large else _USUAL
    with _greedy(model, generation, new):
        return [_generated(model, prompt) for prompt in _prompts(generation, shapes, tokenizer, count, new)]


def _prompts(generation: Generation, shapes: Sequence[Shape], tokenizer: Any, count: int, new: int) -> Iterator[Array]:
    generator = np.random.default_rng(0)
    most = max(1, generation.max_length - new)
    lengths = np.geomspace(1, min(_LONGEST, most), count).round().astype(int)
    windows = [shape.window for shape in shapes if 0 < shape.window <= _LONGEST_WINDOW]
    lengths[-1] = min(max([lengths[-1], *(window + 8 for window in windows)]), most)
    known = np.array([token for token in range(generation.vocab) if token not in generation.eos])
    written = known
    if tokenizer is not None:
        written = np.array([token for text in texts.samples() for token in tokenizer(text)["input_ids"]], np.int64)
    for index, length in enumerate(lengths):
        yield generator.choice(known, length) if index % 2 else np.resize(written[index:], length)


def measured(run: Runner, generation: Generation, answers: Sequence[Answer]) -> tuple[ParityEvidence, float]:
    """Return the proof of the logits, and by how much those of rows in a batch depart from those of rows alone.

    Args:
        run: the graph.
        generation: its declaration.
        answers: the original's.

    Raises:
        ParityError: logits depart by more than rounding.
    """
    rows = Rows(run, generation, max(len(answer.prompt) + len(answer.tokens) for answer in answers))
    alone = [rows.alone(answer, parts=1 + index % 2) for index, answer in enumerate(answers)]
    error = max(arrays.departure(answer.logits, own) for answer, own in zip(answers, alone, strict=True))
    _check("the logits depart from the original's", error)
    apart = max(arrays.departure(own, row) for own, row in zip(alone, rows.together(answers), strict=True))
    _check("rows of a batch depart from rows alone", apart)
    tokens = sum(len(answer.tokens) for answer in answers)
    return ParityEvidence(tensor="logits", error=error, tolerance=_TOLERANCE, cases=tokens), apart


def _check(what: str, error: float) -> None:
    if error > _TOLERANCE:
        raise ParityError(f"{what} by {error:.1e}, tolerance {_TOLERANCE:.0e}")


def compared(answers: Sequence[Answer], served: Sequence[Sequence[int]], apart: float) -> TokensEvidence:
    """Return the proof of tokens that a server's engine chose.

    Args:
        answers: the original's.
        served: the engine's tokens of each.
        apart: as :func:`measured` returns.

    Raises:
        ParityError: a token is another one, and not because two are almost equally likely.
    """
    equal, ties = 0, list[str]()
    for answer, tokens in zip(answers, served, strict=True):
        differing = np.flatnonzero(answer.tokens != tokens)
        equal += int(differing[0]) if differing.size else len(answer.tokens)
        if differing.size:  # later tokens follow another text
            ties.append(_tie(answer, int(differing[0]), tokens))
    return TokensEvidence(
        reference=f"transformers {_version()}",
        prompts=len(answers),
        longest=max(len(answer.prompt) for answer in answers),
        tokens=equal,
        gap=min(float(answer.gaps.min()) for answer in answers),
        ties=tuple(ties),
        rows=len(answers),
        rows_error=apart,
    )


def _version() -> str:
    import transformers

    return transformers.__version__


def _tie(answer: Answer, place: int, tokens: Sequence[int]) -> str:
    """Return the description of a near tie.

    Raises:
        ParityError: the two tokens are farther apart than two logits within the tolerance can move.
    """
    gap = float(answer.gaps[place])
    shown = (
        f"token {place} after a prompt of {len(answer.prompt)} is {tokens[place]}, and {answer.tokens[place]} by "
        f"generate(), whose logit is larger than any other by {gap:.1e}"
    )
    if gap > 2 * _TOLERANCE * answer.scale:
        raise ParityError(shown)
    return shown


def goldens(answers: Sequence[Answer]) -> tuple[Golden, ...]:
    """Return prompts of several lengths with their tokens, as far as no other machine's rounding changes them."""
    found = []
    for answer in answers[:: -max(1, len(answers) // _GOLDENS)]:
        clear = np.append(answer.gaps > _CLEAR * _TOLERANCE * answer.scale, False)
        if count := int(clear.argmin()):
            found.append(Golden({"prompt": answer.prompt}, {"tokens": answer.tokens[:count]}))
    return tuple(found[:_GOLDENS])


@contextlib.contextmanager
def _greedy(model: Any, generation: Generation, new: int) -> Iterator[None]:
    """Let ``generate()`` choose the most likely token, without the model's own settings, in the block."""
    import transformers

    config: Any = transformers.GenerationConfig
    before = model.generation_config
    model.generation_config = config(
        do_sample=False,
        max_new_tokens=new,
        eos_token_id=[*generation.eos] or None,
        pad_token_id=(*generation.eos, 0)[0],
        return_dict_in_generate=True,
        output_logits=True,
    )
    try:
        with quiet(), torch.no_grad():
            yield
    finally:
        model.generation_config = before


def _generated(model: Any, prompt: Array) -> Answer:
    """Return the answer of the original."""
    ids = torch.from_numpy(prompt)[None]
    with foreign.reported_as(ExportError, "generate() of the original fails"):
        found = model.generate(ids, attention_mask=torch.ones_like(ids))
    tokens = found.sequences[0, len(prompt) :].numpy()
    return Answer(prompt, tokens, torch.cat(found.logits).float().numpy())


class Rows:
    """Runs a graph on rows, each with its own cache, given the tokens that the original chose.

    Args:
        run: the graph.
        generation: its declaration.
        capacity: tokens of a row.
    """

    def __init__(self, run: Runner, generation: Generation, capacity: int):
        self._run, self._generation, self._capacity = run, generation, capacity

    def alone(self, answer: Answer, parts: int) -> Array:
        """Return the logits of each token of an answer, with the prompt in several parts: float32[n, vocab]."""
        logits, cache = self._prompt(answer, parts)
        found = [logits]
        for index, token in enumerate(answer.tokens[:-1]):
            logits, cache = self._step(token[None, None], [len(answer.prompt) + index], cache)
            found.append(logits)
        return np.concatenate(found)

    def together(self, answers: Sequence[Answer]) -> list[Array]:
        """Return the same of several answers whose rows run at once, each at its own length.

        The prompts are read in one call, padded; by the last token of each the rows are extended, as servers do.
        """
        cache = self._prompts([answer.prompt for answer in answers])
        found: list[list[Array]] = [[] for _ in answers]
        for index in range(max(len(answer.tokens) for answer in answers)):
            steps = [min(index, len(answer.tokens) - 1) for answer in answers]
            tokens = [[answer.prompt[-1], *answer.tokens][step] for answer, step in zip(answers, steps, strict=True)]
            lengths = [len(answer.prompt) - 1 + step for answer, step in zip(answers, steps, strict=True)]
            logits, cache = self._step(np.array(tokens)[:, None], lengths, cache)
            for row, own in enumerate(found):
                own.append(logits[row : row + 1])
        return [np.concatenate(own[: len(answer.tokens)]) for own, answer in zip(found, answers, strict=True)]

    def _cache(self, rows: int) -> dict[str, Array]:
        declared = self._generation
        shape = (rows, declared.kv_heads, self._capacity, declared.head_size)
        return {spec.name: np.zeros(shape, np.float32) for spec in declared.caches}

    def _prompts(self, prompts: Sequence[Array]) -> dict[str, Array]:
        """Return the cache behind prompts that are read in one call, padded on the right."""
        lengths = [len(prompt) for prompt in prompts]
        ids = np.stack([np.pad(prompt, (0, max(lengths) - len(prompt))) for prompt in prompts])
        return self._step(ids, [0] * len(prompts), self._cache(len(prompts)), lengths)[1]

    def _prompt(self, answer: Answer, parts: int) -> tuple[Array, dict[str, Array]]:
        cache, start = self._cache(1), 0
        for part in np.array_split(answer.prompt, min(parts, len(answer.prompt))):
            logits, cache = self._step(part[None], [start], cache)
            start += len(part)
        return logits, cache

    def _step(
        self, ids: Array, starts: Sequence[int], cache: dict[str, Array], ends: Sequence[int] | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """Return logits [rows, vocab] and the cache after new tokens ``ids`` [rows, new] at the places ``starts``.

        Rows end at ``ends``; the tokens behind are padding.
        """
        positions = np.array(starts)[:, None] + np.arange(ids.shape[1])
        lengths = positions[:, -1].astype(np.int32) if ends is None else np.array(ends, np.int32) - 1
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "lengths": lengths,
            "total": positions[:, -1].max(keepdims=True).astype(np.int32) + 1,
        }
        found = self._run.run({**inputs, **cache})
        return found["logits"], {name: found[name.replace("past_key_values", "present")] for name in cache}
