"""The values of the metrics that each request or batch changes; metrics.py renders them."""

from __future__ import annotations

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

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Iterable[float]) -> None:
        counts, bounds = self.counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.total += value
