"""The choice of each row's token from its logits, in numpy: as transformers chooses it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from ingot.runtime.engines.decoder.step import KNOBS
from ingot.tensors import Array

_TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _REPETITION, _PRESENCE, _FREQUENCY = range(len(KNOBS))
# A vocabulary is searched by the largest logit of each of so many tokens.
_BLOCK = 64

History = Callable[[int], tuple[Array, int]]
"""Returns the tokens of a row, INT[length], and how many of them are the prompt's."""


class Rule(Protocol):
    """What tokens an answer cannot have, or must have."""

    def apply(self, logits: Array, drawn: Array, history: History) -> None:
        """Change the logits of each row."""


def choose(logits: Array, inputs: Mapping[str, Array], history: History, rules: Rule | None = None) -> dict[str, Array]:
    """Choose a token for each row.

    Args:
        logits: FP32[rows, vocab]; rows with penalties or rules are changed.
        inputs: of the step; see :data:`~ingot.runtime.engines.decoder.step.SIGNATURE`.
        history: of a row, for penalties.
        rules: of the model, which apply behind penalties; None without any.

    Returns:
        ``tokens``, ``logprobs``, ``top_tokens`` and ``top_logprobs``.
    """
    knobs, top = inputs["knobs"], int(inputs["top"][0])
    penalized = np.flatnonzero((knobs[:, _REPETITION] != 1) | knobs[:, _PRESENCE:].any(axis=1))
    own = logits.copy() if top >= 0 and (penalized.size or rules) else logits
    for row in penalized.tolist():
        _penalize(logits[row], *history(row), *knobs[row, _REPETITION:].tolist())
    if rules is not None:
        rules.apply(logits, inputs["drawn"], history)
    tokens = logits.argmax(axis=1)
    drawn = np.flatnonzero(knobs[:, _TEMPERATURE] > 0).tolist()
    if drawn:
        numbers = uniform(inputs["seeds"], inputs["drawn"][:, 0]).tolist()
        scratch = np.empty((2, logits.shape[1]), np.float32)
    for row in drawn:
        temperature, top_k, top_p, min_p = knobs[row, :_REPETITION].tolist()
        tokens[row] = draw(logits[row], temperature, top_k, top_p, min_p, numbers[row], scratch)
    return {"tokens": tokens, **logprobs_of(own, tokens, top)}


def _penalize(logits: Array, tokens: Array, prompt: int, repetition: float, presence: float, frequency: float) -> None:
    """Change the logits of tokens that occurred before, FP32[vocab]."""
    if repetition != 1:
        seen = np.unique(tokens)
        found = logits[seen]
        logits[seen] = np.where(found > 0, found / repetition, found * repetition)
    if presence or frequency:
        seen, counts = np.unique(tokens[prompt:], return_counts=True)
        logits[seen] -= (presence + frequency * counts).astype(np.float32)


def draw(
    logits: Array, temperature: float, top_k: float, top_p: float, min_p: float, number: float, scratch: Array
) -> int:
    """Draw a token from a row's distribution.

    Candidates are in the order of their ids, so that the tiny differences that the size of a batch makes move the
    limits between them, and never exchange two.

    Args:
        logits: FP32[vocab].
        temperature: above 0.
        top_k: 0 for all.
        top_p: from 0 to 1; 1 for all.
        min_p: as a share of the largest probability.
        number: from 0 to 1, excluded: which part of the distribution is meant.
        scratch: FP32[2, vocab], memory that is used again and again: new memory costs more than the computation.
    """
    kept = largest_of(logits, int(top_k)) if 0 < top_k < logits.size else None
    found = logits if kept is None else logits[kept]
    weights, ordered = scratch[:, : found.size]
    np.subtract(found, found.max(), out=weights)
    np.exp(np.multiply(weights, np.float32(1 / temperature), out=weights), out=weights)
    limit = min_p
    if top_p < 1:  # of equal weights at the limit, all are kept
        ordered[:] = weights
        ordered.sort()
        limit = max(limit, ordered[_place(ordered, 1 - top_p)])
    if limit:
        np.multiply(weights, weights >= limit, out=weights)
    place = _place(weights, number)
    return place if kept is None else int(kept[place])


def largest_of(values: Array, count: int) -> Array:
    """Return the places of the largest values, ascending; of equal ones at the limit, all.

    The ``count`` largest of the maxima of blocks are from as many blocks, so none of the values below them is wanted.
    """
    blocks = values.size // _BLOCK
    if count < blocks:
        maxima = values[: blocks * _BLOCK].reshape(_BLOCK, blocks).max(axis=0)
        places = np.flatnonzero(values >= np.partition(maxima, blocks - count)[blocks - count])
    else:
        places = np.arange(values.size)
    found = values[places]
    kept: Array = places[found >= np.partition(found, found.size - count)[found.size - count]]
    return kept


def _place(weights: Array, number: float) -> int:
    """Return the place at a share of the sum of weights, none of weight 0."""
    starts = np.arange(0, weights.size, _BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    block, before = _found(sums, number * sums[-1])
    start = block * _BLOCK
    within = np.cumsum(weights[start : start + _BLOCK], dtype=np.float64)
    return start + _found(within, number * sums[-1] - before)[0]


def _found(sums: Array, wanted: float) -> tuple[int, float]:
    """Return the place at which ascending sums exceed a value, or the last that adds to them, and the sum before."""
    place = int(min(np.searchsorted(sums, wanted, side="right"), np.searchsorted(sums, sums[-1])))
    return place, float(sums[place - 1]) if place else 0.0


def uniform(seeds: Array, drawn: Array) -> Array:
    """Return a number from 0 to 1 for each row, FP64[rows]: a hash of its seed and the tokens that it has drawn.

    The hash is that of SplitMix64 (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195), twice.
    """
    gamma = np.uint64(0x9E3779B97F4A7C15)
    state = _mixed(seeds + gamma) + (drawn.astype(np.uint64) + np.uint64(1)) * gamma
    numbers: Array = (_mixed(state) >> np.uint64(11)) * 2.0**-53
    return numbers


def _mixed(state: Array) -> Array:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = state ^ (state >> np.uint64(31))
    return mixed


def logprobs_of(logits: Array, tokens: Array, top: int) -> dict[str, Array]:
    """Return the logarithms of probabilities of tokens, and of the ``top`` most likely ones; none for -1.

    Args:
        logits: FP32[rows, vocab].
        tokens: INT64[rows].
        top: how many of the most likely tokens are wanted.
    """
    rows, most = (len(tokens), top) if top >= 0 else (0, 0)
    most = min(most, logits.shape[1])
    logprobs, found = np.zeros(rows, np.float32), np.zeros((rows, most), np.int64)
    likely = np.zeros((rows, most), np.float32)
    for row in range(rows):
        values = logits[row]
        largest = values.max()
        total = largest + np.log(np.exp(values - largest).sum(dtype=np.float64))
        logprobs[row] = values[tokens[row]] - total
        if most:
            places = largest_of(values, most)
            found[row] = places[np.argsort(-values[places], kind="stable")][:most]
            likely[row] = values[found[row]] - total
    return {"logprobs": logprobs, "top_tokens": found, "top_logprobs": likely}
