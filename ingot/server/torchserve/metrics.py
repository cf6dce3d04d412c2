"""TorchServe's metrics, from those of the server, and the server's own, by name."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from ingot.protocol.json_codec import STATUS
from ingot.runtime import Metrics

_MICROSECONDS = 1e6
_CODES = {code.value: status for code, status in STATUS.items()}


def rendered(metrics: Metrics, names: Collection[str]) -> bytes:
    """Return metrics in Prometheus' text form: all, or those of some names."""
    return generate_latest(_Chosen(metrics, frozenset(names)))


class _Chosen(Collector):
    def __init__(self, metrics: Metrics, names: frozenset[str]):
        self._metrics = metrics
        self._names = names

    def collect(self) -> Iterable[Metric]:
        families = [*_families(self._metrics), *self._metrics.registry.collect()]
        return [each for each in families if not self._names or {each.name, f"{each.name}_total"} & self._names]


def _families(metrics: Metrics) -> Iterator[Metric]:
    host = socket.gethostname()
    yield _by_model(
        "ts_inference_requests_total", "Total number of inference requests.", _sums(metrics.requests, "_total"), host
    )
    for name, source, text in (
        ("inference", metrics.request_seconds, "Cumulative inference duration in microseconds"),
        ("queue", metrics.queue_seconds, "Cumulative queue duration in microseconds"),
    ):
        values = {key: value * _MICROSECONDS for key, value in _sums(source, "_sum").items()}
        yield _by_model(f"ts_{name}_latency_microseconds", text, values, host)
    yield from _by_status(metrics, host)


def _sums(source: Collector, suffix: str) -> Mapping[tuple[str, str], float]:
    """Return the sum of a metric's samples for each model and version."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for family in source.collect():
        for sample in family.samples:
            if sample.name == family.name + suffix:
                found[sample.labels["model"], sample.labels["version"]] += sample.value
    return found


def _by_model(name: str, text: str, values: Mapping[tuple[str, str], float], host: str) -> Metric:
    family = Metric(name, text, "unknown")  # a counter's name would get the suffix _total
    for (model, version), value in values.items():
        family.add_sample(name, {"model_name": model, "model_version": version, "hostname": host}, value)
    return family


def _by_status(metrics: Metrics, host: str) -> Iterator[Metric]:
    answered = sum(sample.value for sample in _samples(metrics.requests) if sample.labels["code"] == "ok")
    counts = {2: answered, 4: 0.0, 5: 0.0}
    for sample in _samples(metrics.errors):
        counts[_CODES[sample.labels["code"]] // 100] += sample.value
    for hundreds, value in counts.items():
        name = f"Requests{hundreds}XX"
        family = Metric(name, f"Total number of requests with response in {hundreds}00-{hundreds}99", "unknown")
        family.add_sample(name, {"Level": "Host", "Hostname": host}, value)
        yield family


def _samples(source: Collector) -> Iterator[Sample]:
    return (sample for family in source.collect() for sample in family.samples)
