"""The metrics of several processes as one: equal samples are added up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ingot.runtime import Metrics

Counts = Sequence[Any]
"""``[name, text, type, [[sample, labels, value], ...]]`` of each metric, ready for JSON."""

_Key = tuple[str, tuple[tuple[str, str], ...]]


def counts_of(metrics: Metrics) -> Counts:
    """Return the metrics of a process, without the times of their creation."""
    return [
        [
            family.name,
            family.documentation,
            family.type,
            [
                [sample.name, sample.labels, sample.value]
                for sample in family.samples
                if not sample.name.endswith("_created")
            ],
        ]
        for family in metrics.registry.collect()
    ]


def add(*some: Counts) -> Counts:
    """Return the sums of several processes' metrics."""
    families: dict[str, tuple[str, str]] = {}
    values: dict[str, dict[_Key, float]] = {}
    for counts in some:
        for name, text, kind, samples in counts:
            families.setdefault(name, (text, kind))
            sums = values.setdefault(name, {})
            for sample, labels, value in samples:
                key = sample, tuple(labels.items())
                sums[key] = sums.get(key, 0) + value
    return [
        [name, text, kind, [[sample, dict(labels), value] for (sample, labels), value in values[name].items()]]
        for name, (text, kind) in families.items()
    ]


def lasting(counts: Counts) -> Counts:
    """Return those metrics of a process that remain valid after its end: all but gauges."""
    return [family for family in counts if family[2] in ("counter", "histogram", "summary")]


def render(counts: Counts) -> bytes:
    """Return metrics as Prometheus' text."""
    registry = CollectorRegistry()
    registry.register(_Given(counts))
    return generate_latest(registry)


class _Given(Collector):
    def __init__(self, counts: Counts):
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        for name, text, kind, samples in self._counts:
            family = Metric(name, text, kind)
            for sample, labels, value in samples:
                family.add_sample(sample, labels, value)
            yield family
