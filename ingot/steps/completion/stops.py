"""Texts that end an answer."""

from __future__ import annotations

from collections.abc import Sequence


class StopTexts:
    """Finds the first of some texts in pieces of an answer, wherever the pieces are divided.

    A text that may be the beginning of a stop text is kept back until more of it is known.

    Args:
        stops: the texts, none of them empty; without any, every piece passes at once.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._kept = ""
        self.found = ""

    def add(self, piece: str) -> str:
        """Return the text that is certain to belong to the answer; empty once a stop text is ``found``."""
        if self.found or not self._stops:
            return "" if self.found else piece
        text = self._kept + piece
        if ends := [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]:
            _, start, self.found = min(ends)
            self._kept = ""
            return text[:start]
        kept = max(_overlap(text, stop) for stop in self._stops)
        self._kept = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """Return the text that was kept back; there are no more pieces."""
        kept, self._kept = self._kept, ""
        return kept


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of a text with which another begins."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
