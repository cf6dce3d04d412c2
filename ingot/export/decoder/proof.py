"""Proof of a decoder: greedy tokens equal to ``generate()``'s, logits, and rows of a batch equal to rows alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ingot import foreign
from ingot.errors import ExportError, ParityError
from ingot.export.decoder.attention import Shape
from ingot.export.decoder.rows import Answer, Rows
from ingot.export.program import Runner, quiet
from ingot.export.proof.parity import TOLERANCE
from ingot.model_store import Generation, Golden, ParityEvidence
from ingot.model_store.format.evidence import TokensEvidence
from ingot.model_store.format.generation import Encoder
from ingot.steps.samples import texts
from ingot.tensors import Array, DType, arrays

# Numbers of prompts, and of tokens of each answer; fewer of large models, as each token reads all weights.
_USUAL, _FEW = (16, 32), (8, 16)
# Weights, and logits, of a large model.
_LARGE, _LARGE_VOCAB = 400_000_000, 100_000
# Tokens of the longest prompt, unless a window is longer: then the prompt exceeds the window, up to the second number.
_LONGEST, _LONGEST_WINDOW = 96, 2048
_GOLDENS = 3
# A golden ends before a token that is closer to the next best one than so many times the tolerance.
_CLEAR = 10
_TOLERANCE = TOLERANCE[DType.FP32]
# Settings of a generation_config that are for beams, or that requests state.
_UNLIKE_GREEDY = {
    "diversity_penalty",
    "early_stopping",
    "length_penalty",
    "max_length",
    "num_beam_groups",
    "num_beams",
    "repetition_penalty",
    "transformers_version",
}


def generated(model: Any, generation: Generation, shapes: Sequence[Shape], tokenizer: Any) -> list[Answer]:
    """Return the original's answers to prompts of several lengths: every other one is text if there is a tokenizer.

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
        prompts = _prompts(generation, shapes, tokenizer, count, new)
        return [_generated(model, prompt, generation.encoder) for prompt in prompts]


def _prompts(generation: Generation, shapes: Sequence[Shape], tokenizer: Any, count: int, new: int) -> Iterator[Array]:
    generator = np.random.default_rng(0)
    known_positions = generation.max_length if generation.encoder is None else generation.encoder.max_length + new
    most = max(1, known_positions - new)
    lengths = np.geomspace(1, min(_LONGEST, most), count).round().astype(int)
    windows = [shape.window for shape in shapes if 0 < shape.window <= _LONGEST_WINDOW]
    lengths[-1] = min(max([lengths[-1], *(window + 8 for window in windows)]), most)
    known = np.array([token for token in range(generation.vocab) if token not in generation.eos])
    written = known
    if tokenizer is not None:
        written = np.array([token for text in texts.samples() for token in tokenizer(text)["input_ids"]], np.int64)
    for index, length in enumerate(lengths):
        yield generator.choice(known, length) if index % 2 else np.resize(written[index:], length)


def measured(
    run: Runner, encoder: Runner | None, generation: Generation, answers: Sequence[Answer]
) -> tuple[ParityEvidence, float]:
    """Return the proof of the logits, and by how much those of rows in a batch depart from those of rows alone.

    Args:
        run: the graph.
        encoder: that of the encoder, if there is one.
        generation: its declaration.
        answers: the original's.

    Raises:
        ParityError: logits depart by more than rounding.
    """
    rows = Rows(run, encoder, generation, max(len(answer.prompt) + len(answer.tokens) for answer in answers))
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
        ParityError: a token differs, and not because two are almost equally likely.
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


def goldens(answers: Sequence[Answer], *, forced: bool = False) -> tuple[Golden, ...]:
    """Return prompts of several lengths with their tokens, as far as no other machine's rounding changes them.

    ``forced`` is whether the model's rules choose the last token of each answer, which goldens then leave out.
    """
    found = []
    for answer in answers[:: -max(1, len(answers) // _GOLDENS)]:
        clear = np.append(answer.gaps > _CLEAR * _TOLERANCE * answer.scale, False)
        if count := min(int(clear.argmin()), len(answer.tokens) - forced):
            found.append(Golden({"prompt": answer.prompt}, {"tokens": answer.tokens[:count]}))
    return tuple(found[:_GOLDENS])


@contextlib.contextmanager
def _greedy(model: Any, generation: Generation, new: int) -> Iterator[None]:
    """Let ``generate()`` choose the most likely token in the block.

    A decoder's own settings do not apply; those of an encoder-decoder do, except beams, and penalties, which
    requests state.
    """
    import transformers

    config: Any = transformers.GenerationConfig
    before = model.generation_config
    changes: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": new,
        "eos_token_id": [*generation.eos] or None,
        "pad_token_id": (*generation.eos, 0)[0],
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    if generation.encoder is not None:
        own = {name: value for name, value in before.to_dict().items() if name not in _UNLIKE_GREEDY}
        changes = {**own, **changes, "output_scores": True}
    model.generation_config = config(**changes)
    try:
        with quiet(), torch.no_grad():
            yield
    finally:
        model.generation_config = before


def _generated(model: Any, prompt: Array, encoder: Encoder | None) -> Answer:
    """Return the answer of the original."""
    ids = torch.from_numpy(prompt)[None]
    with foreign.reported_as(ExportError, "generate() of the original fails"):
        found = model.generate(ids, attention_mask=torch.ones_like(ids))
    tokens = found.sequences[0, len(prompt) if encoder is None else len(encoder.start) :].numpy()
    scores = None if encoder is None else torch.cat(found.scores).float().numpy()
    return Answer(prompt, tokens, torch.cat(found.logits).float().numpy(), scores)
