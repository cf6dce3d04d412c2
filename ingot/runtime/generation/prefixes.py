"""The tokens that the cache holds, so that equal beginnings of prompts are read once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import numpy as np

from ingot.runtime.generation.requests import GenerationRequest
from ingot.tensors import Array

# Fewest tokens that are copied: to read fewer costs about as much.
_LEAST = 16


class Holds(Protocol):
    """A row of the cache."""

    @property
    def request(self) -> GenerationRequest:
        """Whose row it is."""

    @property
    def held(self) -> Array:
        """The tokens in the cache, INT64[n]."""


class Prefixes:
    """Finds the row that holds the beginning of a prompt, among those in use and those that were freed.

    Clients share no rows: by the time of an answer, one could find out what another has asked.

    Args:
        slots: rows of the cache.
    """

    def __init__(self, slots: int):
        self._freed: list[tuple[Array, Hashable]] = [(np.zeros(0, np.int64), None)] * slots

    def note(self, place: int, tokens: Array, client: Hashable) -> None:
        """Remember the tokens of a row that is freed."""
        self._freed[place] = tokens, client

    def find(self, request: GenerationRequest, rows: Sequence[Holds]) -> tuple[int, int]:
        """Return the row that holds the most of a prompt, and how many tokens: all but the last one, or 0.

        Args:
            request: with the prompt.
            rows: those in use; the others are free.
        """
        used = [(row.held, row.request.client) for row in rows]
        prompt, best = request.prompt[:-1], (0, 0)
        for place, (tokens, client) in enumerate([*used, *self._freed[len(rows) :]]):
            count = _common(prompt, tokens) if client == request.client else 0
            if count >= max(_LEAST, best[1] + 1):
                best = place, count
        return best


def _common(one: Array, other: Array) -> int:
    """Return how many tokens two sequences have in common at their beginnings."""
    size = min(one.size, other.size)
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if different.size else size
