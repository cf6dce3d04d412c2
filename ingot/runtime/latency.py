"""What one engine call is expected to take, by its rows: measured when a model is loaded, and learnt ever after."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

# Rates that differ by less than this count as equal: a larger batch must pay.
_PAYS = 1.05
# How much one observation moves what is expected, and the most it can seem to be off: a machine that was busy with
# something else for a moment says nothing about the model.
_SHARE = 0.15
_CLIP = 2.0
# A size that was never run is tried when this many times as many rows wait.
_GROWTH = 2


class Latency:
    """Seconds of one engine call by rows: straight lines between known sizes, and a constant rate beyond the last.

    Args:
        seconds: by rows, as measured; empty where nothing is known yet.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None):
        known = sorted((seconds or {}).items())
        self._rows = [rows for rows, _ in known]
        self._seconds = [taken for _, taken in known]
        self._best: dict[int, int] = {}

    def __call__(self, rows: int) -> float:
        """Return the expected seconds of a call; 0 where nothing is known."""
        sizes, seconds = self._rows, self._seconds
        if not sizes:
            return 0.0
        place = bisect_left(sizes, rows)
        if place == len(sizes):
            return seconds[-1] * rows / sizes[-1]
        if sizes[place] == rows or place == 0:
            return seconds[place]
        low, high = sizes[place - 1], sizes[place]
        return seconds[place - 1] + (seconds[place] - seconds[place - 1]) * (rows - low) / (high - low)

    @property
    def known(self) -> Mapping[int, float]:
        """The sizes that were measured, or learnt from traffic, with their seconds."""
        return dict(zip(self._rows, self._seconds, strict=True))

    def best(self, most: int) -> int:
        """Return how many rows, at most ``most``, one call should have for the highest rate.

        The smallest of sizes that do about as well. Where the largest known size does best, twice as many, so that
        larger ones are tried as soon as so many wait.
        """
        if most not in self._best:
            self._best[most] = self._find_best(most)
        return self._best[most]

    def learn(self, rows: int, seconds: float) -> None:
        """Take in how long a call really took."""
        self._best.clear()
        sizes = self._rows
        place = bisect_left(sizes, rows)
        if place == len(sizes) and (not sizes or rows >= _GROWTH * sizes[-1]):
            sizes.append(rows)
            self._seconds.append(seconds)
            return
        factor = min(max(seconds / max(self(rows), 1e-9), 1 / _CLIP), _CLIP)
        for index in {max(place - 1, 0), min(place, len(sizes) - 1)}:
            near = 1 - abs(sizes[index] - rows) / max(sizes[index], rows)
            self._seconds[index] *= factor ** (_SHARE * near)

    def _find_best(self, most: int) -> int:
        sizes = [rows for rows in self._rows if rows <= most]
        if not sizes:
            return most
        rates = [rows / self(rows) for rows in sizes]
        peak = max(rates)
        best = next(rows for rows, rate in zip(sizes, rates, strict=True) if rate * _PAYS >= peak)
        return min(_GROWTH * best, most) if best == sizes[-1] else best
