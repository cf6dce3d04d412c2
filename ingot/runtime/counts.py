"""The values of the metrics that each request or batch changes; metrics.py renders them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Count:
    """The value of one counter for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, by: int = 1) -> None:
        self.value += by


class Histogram:
    """The counts of one histogram for one set of labels."""

    __slots__ = ("_bounds", "_counts", "_high", "_low", "_place", "_same", "total")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        # Most values fall into the bucket of the one before: they are counted apart, without a search.
        self._same = 0
        self._place = 0
        self._low = -math.inf
        self._high = bounds[0]
        self.total = 0.0

    @property
    def counts(self) -> list[int]:
        """How many values each bucket has."""
        counts = self._counts.copy()
        counts[self._place] += self._same
        return counts

    def observe(self, value: float) -> None:
        self.total += value
        if self._low < value <= self._high:
            self._same += 1
        else:
            self._move(value)

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    def _move(self, value: float) -> None:
        """Count a value of another bucket than the one before."""
        bounds = self._bounds
        self._counts[self._place] += self._same
        self._place = place = bisect_left(bounds, value)
        self._low = bounds[place - 1] if place else -math.inf
        self._high = bounds[place] if place < len(bounds) else math.inf
        self._same = 1
