"""The load of a server, computed from two readings of its metrics and statistics.

The page of the server (``server/page``) computes the same in the browser.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

STAGES = ("queue", "batch", "compute", "encode")
"""What a request's time is divided into: waiting, joining the inputs, the engine call, splitting and encoding."""

# The statistics of Triton's protocol that make up the stages; encoding is a metric.
_STATISTICS = ("queue", "compute_input", "compute_infer", "compute_output")


class Samples:
    """The samples of metrics in Prometheus' text format.

    Raises:
        ValueError: the text has another format.
    """

    def __init__(self, text: str = ""):
        self._by_name: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._by_name.setdefault(sample.name, []).append((sample.labels, sample.value))

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def of(self, name: str, **labels: str) -> Iterator[tuple[Mapping[str, str], float]]:
        """Yield the labels and values of the samples that have these labels."""
        for found, value in self._by_name.get(name, ()):
            if all(found.get(label) == wanted for label, wanted in labels.items()):
                yield found, value

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of these samples."""
        return sum(value for _, value in self.of(name, **labels))

    def value(self, name: str, **labels: str) -> float | None:
        """Return the value of the first of these samples; None if there is none, or it is not finite."""
        found = next((value for _, value in self.of(name, **labels)), math.nan)
        return found if math.isfinite(found) else None

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the counts of a histogram up to each upper bound, smaller ones included."""
        below: dict[float, float] = {}
        for found, value in self.of(f"{name}_bucket", **labels):
            bound = float(found["le"])
            below[bound] = below.get(bound, 0) + value
        return dict(sorted(below.items()))


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The state of a server at one time.

    Attributes:
        at: the time in seconds, by a clock that never jumps.
        samples: its metrics.
        models: the entries of ``model_stats``.
    """

    at: float
    samples: Samples
    models: Sequence[Mapping[str, Any]]

    def model(self, name: str, version: str) -> Mapping[str, Any]:
        """Return the entry of a model; an empty one if there is none."""
        return next((each for each in self.models if (each["name"], each["version"]) == (name, version)), {})


@dataclass(frozen=True, kw_only=True)
class ModelLoad:
    """The load of one version of a model. Times are in seconds, None without requests.

    Attributes:
        shares: of a request's time, by stage; empty without requests. The time of encoding is that of the protocols
            by which the model was asked.
    """

    name: str
    version: str
    state: str
    variant: str
    device: str
    requests_per_s: float
    rows_per_s: float
    failed_per_s: float
    p50: float | None
    p99: float | None
    queue: int
    mean_batch: float | None
    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The error responses of one protocol with one code: since the start, and in the window."""

    protocol: str
    code: str
    count: int
    recent: int


@dataclass(frozen=True, kw_only=True)
class CanaryLoad:
    """A candidate that is tried.

    Attributes:
        weight: its share of the requests in percent; 0 for a shadow.
        agreed, differed, dropped: compared answers, and copies without a comparison.
        worst_error: the largest error of an answer, ``infinite`` if it is; None before the first comparison.
        latency_ratio: its p99 latency over the current model's.
    """

    name: str
    version: str
    weight: float
    agreed: int
    differed: int
    dropped: int
    worst_error: float | str | None
    latency_ratio: float | None


@dataclass(frozen=True, kw_only=True)
class DecoderLoad:
    """What a decoder writes. Times are medians of the window in seconds, None without tokens.

    Attributes:
        slots: answers that are being written.
        first_token: from a request to its first token, waiting included.
        between_tokens: from one token of an answer to the next.
    """

    name: str
    version: str
    tokens_per_s: float
    slots: int
    first_token: float | None
    between_tokens: float | None


@dataclass(frozen=True, kw_only=True)
class GpuLoad:
    """A GPU of the server's machine: bytes of memory that all processes use and that there are, and the share of time
    in which it computed, from 0 to 1; None if it is unknown.
    """

    gpu: str
    used: float | None
    total: float | None
    utilization: float | None


@dataclass(frozen=True, kw_only=True)
class ServerLoad:
    """The load of a server. Memory is in bytes, ``started`` in seconds since 1970."""

    started: float | None
    connections: int
    in_flight: int
    errors_per_s: float
    resident_memory: float | None
    gpus: Sequence[GpuLoad]
    models: Sequence[ModelLoad]
    errors: Sequence[Errors]
    canaries: Sequence[CanaryLoad]
    decoders: Sequence[DecoderLoad]


def load(now: Reading, before: Reading, first: Reading) -> ServerLoad:
    """Return the load of a server.

    Args:
        now: the last reading.
        before: the one before it, from which rates are computed.
        first: the first of the window over which latencies and shares are computed.
    """
    samples = now.samples
    connections = samples.total("ingot_http_connections") + samples.total("ingot_grpc_connections")
    return ServerLoad(
        started=samples.value("ingot_start_time_seconds"),
        connections=int(connections),
        in_flight=int(samples.total("ingot_in_flight_requests")),
        errors_per_s=_increase(now, before, "ingot_errors_total") / _seconds(now, before),
        resident_memory=samples.value("ingot_resident_memory_bytes"),
        gpus=list(_gpus(samples)),
        models=[_model(each, now, before, first) for each in now.models],
        errors=list(_errors(now, first)),
        canaries=list(_canaries(samples)),
        decoders=list(_decoders(now, before, first)),
    )


def quantile(now: Samples, before: Samples, name: str, share: float, **labels: str) -> float | None:
    """Return a quantile of what a histogram counted between two readings, as Prometheus' ``histogram_quantile`` does.

    It is linear within a bucket. None if nothing was counted.
    """
    earlier = before.buckets(name, **labels)
    below = {bound: count - earlier.get(bound, 0) for bound, count in now.buckets(name, **labels).items()}
    wanted = share * max(below.values(), default=0)
    if wanted <= 0:
        return None
    low = lower = 0.0
    for bound, count in below.items():
        if count >= wanted:
            return low if math.isinf(bound) else low + (bound - low) * (wanted - lower) / (count - lower)
        low, lower = bound, count
    return low


def _model(found: Mapping[str, Any], now: Reading, before: Reading, first: Reading) -> ModelLoad:
    name, version, described = found["name"], found["version"], found["ingot"]
    labels = {"model": name, "version": version}
    seconds = _seconds(now, before)

    def increase(metric: str, **more: str) -> float:
        return _increase(now, before, metric, **labels, **more)

    requests, calls = increase("ingot_requests_total"), increase("ingot_batch_size_count")
    rows = increase("ingot_batch_size_sum")
    latency = [quantile(now.samples, first.samples, "ingot_request_seconds", each, **labels) for each in (0.5, 0.99)]
    return ModelLoad(
        name=name,
        version=version,
        state=str(described.get("state", "ready")),
        variant=str(described.get("variant") or ""),
        device=str(described.get("device") or ""),
        requests_per_s=requests / seconds,
        rows_per_s=rows / seconds,
        failed_per_s=max(0.0, requests - increase("ingot_requests_total", code="ok")) / seconds,
        p50=latency[0],
        p99=latency[1],
        queue=int(now.samples.total("ingot_queued_requests", **labels)),
        mean_batch=rows / calls if calls else None,
        shares=_shares(now, first, name, version),
    )


def _shares(now: Reading, first: Reading, name: str, version: str) -> dict[str, float]:
    later, earlier = (each.model(name, version).get("inference_stats", {}) for each in (now, first))
    means = []
    for label in _STATISTICS:
        end, start = (each.get(label, {"count": 0, "ns": 0}) for each in (later, earlier))
        means.append(_mean(end["ns"] / 1e9 - start["ns"] / 1e9, end["count"] - start["count"]))
    queue, batch, compute, split = means
    total = queue + batch + compute + split
    if total <= 0:
        return {}
    encode = split + _encoding(now, first, name, version)
    total += encode - split
    return {stage: each / total for stage, each in zip(STAGES, (queue, batch, compute, encode), strict=True)}


def _encoding(now: Reading, first: Reading, name: str, version: str) -> float:
    """Return the mean seconds in which the responses of a model were encoded."""
    protocols = {labels["protocol"] for labels, _ in now.samples.of("ingot_encode_seconds_count")}
    answered = {
        protocol: _increase(
            now, first, "ingot_requests_total", model=name, version=version, protocol=protocol, code="ok"
        )
        for protocol in protocols
    }
    seconds = sum(
        count
        * _mean(
            _increase(now, first, "ingot_encode_seconds_sum", protocol=protocol),
            _increase(now, first, "ingot_encode_seconds_count", protocol=protocol),
        )
        for protocol, count in answered.items()
    )
    return _mean(seconds, sum(answered.values()))


def _errors(now: Reading, first: Reading) -> Iterable[Errors]:
    for labels, count in now.samples.of("ingot_errors_total"):
        if count:
            recent = _increase(now, first, "ingot_errors_total", **labels)
            yield Errors(protocol=labels["protocol"], code=labels["code"], count=int(count), recent=int(recent))


def _canaries(samples: Samples) -> Iterable[CanaryLoad]:
    for labels, weight in samples.of("ingot_canary_weight_percent"):
        agreed, differed, dropped = (
            int(samples.total("ingot_canary_comparisons_total", result=result, **labels))
            for result in ("agreed", "differed", "dropped")
        )
        worst = samples.total("ingot_canary_worst_error", **labels)
        yield CanaryLoad(
            name=labels["model"],
            version=labels["version"],
            weight=weight,
            agreed=agreed,
            differed=differed,
            dropped=dropped,
            worst_error=("infinite" if math.isinf(worst) else worst) if agreed + differed else None,
            latency_ratio=samples.value("ingot_canary_latency_ratio", **labels),
        )


def _decoders(now: Reading, before: Reading, first: Reading) -> Iterable[DecoderLoad]:
    for labels, slots in now.samples.of("ingot_slots_in_use"):
        times = [
            quantile(now.samples, first.samples, f"ingot_{name}_seconds", 0.5, **labels)
            for name in ("first_token", "between_tokens")
        ]
        yield DecoderLoad(
            name=labels["model"],
            version=labels["version"],
            tokens_per_s=_increase(now, before, "ingot_tokens_total", kind="answer", **labels) / _seconds(now, before),
            slots=int(slots),
            first_token=times[0],
            between_tokens=times[1],
        )


def _gpus(samples: Samples) -> Iterable[GpuLoad]:
    found = (*samples.of("ingot_gpu_memory_bytes"), *samples.of("ingot_gpu_utilization_ratio"))
    for gpu in sorted({labels["gpu"] for labels, _ in found}, key=int):
        used, total = (samples.value("ingot_gpu_memory_bytes", gpu=gpu, kind=kind) for kind in ("used", "total"))
        utilization = samples.value("ingot_gpu_utilization_ratio", gpu=gpu)
        yield GpuLoad(gpu=gpu, used=used, total=total, utilization=utilization)


def _increase(now: Reading, before: Reading, name: str, **labels: str) -> float:
    return max(0.0, now.samples.total(name, **labels) - before.samples.total(name, **labels))


def _seconds(now: Reading, before: Reading) -> float:
    return max(1e-3, now.at - before.at)


def _mean(total: float, count: float) -> float:
    return max(0.0, total) / count if count > 0 else 0.0
