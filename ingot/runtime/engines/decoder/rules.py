"""The tokens that an answer cannot have, or must have: the logits of others become minus infinity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ingot.runtime.engines.decoder.sampling import History
from ingot.tensors import Array


class Rules:
    """Applies :class:`~ingot.model_store.format.generation.TokenRules` to logits, as ``generate()`` does.

    Args:
        rules: as JSON, with the tokens ``eos``.
        start: tokens before each answer.
    """

    def __init__(self, rules: Mapping[str, Any], start: int):
        self._begin = [np.array(allowed, np.int64) for allowed in rules["begin"]]
        self._last, self._start = rules["last"], start
        self._suppress, self._first, self._eos = (
            np.array(rules[name], np.int64) for name in ("suppress", "begin_suppress", "eos")
        )
        self._least, self._repeat = rules["min_tokens"], rules["no_repeat"]
        changing = (rules["begin"], rules["suppress"], rules["begin_suppress"], self._least, self._repeat)
        self.any = any(changing) or self._last is not None

    def apply(self, logits: Array, drawn: Array, history: History) -> None:
        """Change the logits of each row, FP32[rows, vocab].

        Args:
            logits: of the next tokens.
            drawn: of each row the tokens of the answer so far, those of the prompt, and those that it may still have.
            history: of a row.
        """
        logits[:, self._suppress] = -np.inf
        for row, (count, prompt, left) in enumerate(drawn.tolist()):
            place = prompt - self._start + count  # behind the tokens with which all answers start
            if self._repeat:
                logits[row, _repeated(history(row)[0], self._repeat)] = -np.inf
            if count < self._least:
                logits[row, self._eos] = -np.inf
            if count == max(0, len(self._begin) - prompt + self._start):
                logits[row, self._first] = -np.inf
            if place < len(self._begin):
                _only(logits[row], self._begin[place])
            elif left == 1 and self._last is not None:
                _only(logits[row], np.array([self._last]))


def _only(logits: Array, allowed: Array) -> None:
    kept = logits[allowed]
    logits[:] = -np.inf
    logits[allowed] = np.where(np.isfinite(kept), kept, 0)


def _repeated(tokens: Array, size: int) -> Array:
    """Return the tokens that would end a sequence of ``size`` tokens that occurs in ``tokens`` already."""
    if len(tokens) < size:
        return np.zeros(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, size)
    before = tokens[len(tokens) - size + 1 :]
    found: Array = windows[(windows[:, :-1] == before).all(axis=1), -1]
    return found
