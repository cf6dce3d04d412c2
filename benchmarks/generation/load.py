"""The requests of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

VOCAB = 50257
_PROMPT, _ANSWER = (8, 65), (16, 65)


@dataclass(frozen=True)
class Rate:
    """Tokens per second of a run: of the clock, and of the CPU time of all its processes."""

    clock: float
    cpu: float


@dataclass(frozen=True)
class Asked:
    """A prompt, and the number of tokens of its answer."""

    prompt: list[int]
    tokens: int


def asked(count: int, seed: int = 0) -> list[Asked]:
    """Return requests of mixed lengths, the same in every run."""
    random = np.random.default_rng(seed)
    return [
        Asked(random.integers(300, VOCAB, random.integers(*_PROMPT)).tolist(), int(random.integers(*_ANSWER)))
        for _ in range(count)
    ]
