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

# Prompts, and tokens of each answer.
_PROMPTS, _NEW = 16, 32
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


@dataclass(frozen=True)
class Proof:
    """The evidence of a decoder, and the goldens that servers replay."""

    tokens: TokensEvidence
    logits: ParityEvidence
    goldens: tuple[Golden, ...]


def prompts(generation: Generation, shapes: Sequence[Shape], tokenizer: Any) -> list[Array]:
    """Return prompts of several lengths, int64[n] each: every other one is of text, if there is a tokenizer."""
    generator = np.random.default_rng(0)
    most = max(1, generation.max_length - _NEW)
    lengths = np.geomspace(1, min(_LONGEST, most), _PROMPTS).round().astype(int)
    windows = [shape.window for shape in shapes if 0 < shape.window <= _LONGEST_WINDOW]
    lengths[-1] = min(max([lengths[-1], *(window + 8 for window in windows)]), most)
    known = np.array([token for token in range(generation.vocab) if token not in generation.eos])
    made = [generator.choice(known, length) for length in lengths]
    if tokenizer is not None:
        written = np.array([token for text in texts.samples() for token in tokenizer(text)["input_ids"]], np.int64)
        made[::2] = [np.resize(written[index:], length) for index, length in enumerate(lengths[::2])]
    return made


def prove(run: Runner, model: Any, generation: Generation, given: Sequence[Array]) -> Proof:
    """Compare a graph with its original.

    Args:
        run: the graph.
        model: the original.
        generation: its declaration.
        given: the prompts.

    Raises:
        ParityError: a token differs, and not by a near tie; logits differ by more than rounding; or a row in a batch
            differs from the row alone.
        ExportError: ``generate()`` fails.
    """
    with _greedy(model, generation):
        answers = [_generated(model, prompt) for prompt in given]
    rows = Rows(run, generation, max(len(answer.prompt) + len(answer.tokens) for answer in answers))
    alone = [rows.alone(answer, parts=1 + index % 2) for index, answer in enumerate(answers)]
    error = max(_departure(answer, logits) for answer, logits in zip(answers, alone, strict=True))
    if error > _TOLERANCE:
        raise ParityError(f"the logits depart from the original's by {error:.1e}, tolerance {_TOLERANCE:.0e}")
    together = rows.together(answers)
    rows_error = max(
        _departure(Answer(a.prompt, a.tokens, one), many) for a, one, many in zip(answers, alone, together, strict=True)
    )
    if rows_error > _TOLERANCE:
        raise ParityError(f"rows of a batch depart from rows alone by {rows_error:.1e}, tolerance {_TOLERANCE:.0e}")
    tokens = TokensEvidence(
        reference=f"transformers {_version()}",
        prompts=len(answers),
        longest=max(len(answer.prompt) for answer in answers),
        tokens=sum(len(answer.tokens) for answer in answers),
        gap=min(float(answer.gaps.min()) for answer in answers),
        ties=tuple(tie for answer, logits in zip(answers, alone, strict=True) for tie in _ties(answer, logits)),
        rows=len(answers),
        rows_error=rows_error,
    )
    cases = tokens.tokens
    return Proof(
        tokens, ParityEvidence(tensor="logits", error=error, tolerance=_TOLERANCE, cases=cases), _goldens(answers)
    )


def _version() -> str:
    import transformers

    return transformers.__version__


def _departure(answer: Answer, logits: Array) -> float:
    return arrays.departure(answer.logits, logits)


def _ties(answer: Answer, logits: Array) -> Iterator[str]:
    """Yield the tokens that differ; logits within the tolerance differ in the largest one only if two are close."""
    chosen = logits.argmax(1)
    for index in np.flatnonzero(chosen != answer.tokens):
        gap = answer.gaps[index]
        yield (
            f"token {index} after a prompt of {len(answer.prompt)}: {answer.tokens[index]} and {chosen[index]} are "
            f"{gap:.1e} apart in logits"
        )


def _goldens(answers: Sequence[Answer]) -> tuple[Golden, ...]:
    """Return prompts of several lengths with their tokens, as far as no other machine's rounding changes them."""
    found = []
    for answer in answers[:: -max(1, len(answers) // _GOLDENS)]:
        clear = np.append(answer.gaps > _CLEAR * _TOLERANCE * answer.scale, False)
        if count := int(clear.argmin()):
            found.append(Golden({"prompt": answer.prompt}, {"tokens": answer.tokens[:count]}))
    return tuple(found[:_GOLDENS])


@contextlib.contextmanager
def _greedy(model: Any, generation: Generation) -> Iterator[None]:
    """Let ``generate()`` choose the most likely token, without the model's own settings, in the block."""
    import transformers

    config: Any = transformers.GenerationConfig
    before = model.generation_config
    model.generation_config = config(
        do_sample=False,
        max_new_tokens=_NEW,
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
        """Return the same of several answers whose rows run at once, each at its own length."""
        starts = [self._prompt(answer, 1) for answer in answers]
        cache = {name: np.concatenate([own[name] for _, own in starts]) for name in starts[0][1]}
        found = [[logits] for logits, _ in starts]
        for index in range(max(len(answer.tokens) for answer in answers) - 1):
            tokens = [answer.tokens[min(index, len(answer.tokens) - 1)] for answer in answers]
            lengths = [len(answer.prompt) + min(index, len(answer.tokens) - 1) for answer in answers]
            logits, cache = self._step(np.array(tokens)[:, None], lengths, cache)
            for row, own in enumerate(found):
                own.append(logits[row : row + 1])
        return [np.concatenate(own[: len(answer.tokens)]) for own, answer in zip(found, answers, strict=True)]

    def _prompt(self, answer: Answer, parts: int) -> tuple[Array, dict[str, Array]]:
        declared = self._generation
        shape = (1, declared.kv_heads, self._capacity, declared.head_size)
        cache = {spec.name: np.zeros(shape, np.float32) for spec in declared.caches}
        start = 0
        for part in np.array_split(answer.prompt, min(parts, len(answer.prompt))):
            logits, cache = self._step(part[None], [start], cache)
            start += len(part)
        return logits, cache

    def _step(self, ids: Array, starts: Sequence[int], cache: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
        """Return logits [rows, vocab] and the cache after new tokens ``ids`` [rows, new] at the places ``starts``."""
        positions = np.array(starts)[:, None] + np.arange(ids.shape[1])
        lengths = positions[:, -1].astype(np.int32)
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "lengths": lengths,
            "total": lengths.max(keepdims=True) + 1,
        }
        found = self._run.run({**inputs, **cache})
        return found["logits"], {name: found[name.replace("past_key_values", "present")] for name in cache}
