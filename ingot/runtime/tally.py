"""Counters and histograms for what happens many thousand times a second.

Those of ``prometheus_client`` take a lock and look through all buckets at every count, some 3 microseconds a request;
these are counted by the event loop alone and rendered by the same registry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry


class Count:
    """One counter's value for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, by: int = 1) -> None:
        self.value += by


class Spread:
    """One histogram's counts for one set of labels."""

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


class Counts(Collector):
    """A counter with labels. ``name`` is without the ``_total`` that is rendered."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry):
        self._description = (name, text, None, labels)
        self._children: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """Return the count for these values of the labels; keep it where it is needed often."""
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Count()
        return found

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(*self._description)
        for labels, count in list(self._children.items()):
            family.add_metric(labels, count.value)
        yield family


class Spreads(Collector):
    """A histogram with labels; ``buckets`` are upper bounds, in ascending order, without infinity."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], buckets: Sequence[float], registry: CollectorRegistry
    ):
        self._description = (name, text, None, None, labels)
        self._buckets = tuple(float(bound) for bound in buckets)
        self._children: dict[tuple[str, ...], Spread] = {}
        registry.register(self)

    def labels(self, *values: str) -> Spread:
        """Return the spread for these values of the labels; keep it where it is needed often."""
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = Spread(self._buckets)
        return found

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(*self._description)
        for labels, spread in list(self._children.items()):
            below, buckets = 0, []
            for bound, count in zip((*map(str, self._buckets), "+Inf"), spread.counts, strict=True):
                below += count
                buckets.append((bound, below))
            family.add_metric(labels, buckets, spread.total)
        yield family
