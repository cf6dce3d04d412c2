"""Counts of one model: requests, engine calls and samples, and the time spent in each stage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ingot.runtime.dispatch.batch_run import BatchTimings
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Duration:
    """Number of occurrences and their total seconds."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds


@dataclass(slots=True)
class Stages:
    """Time of engine calls by stage: joining the inputs, running, and splitting the outputs."""

    joining: Duration = field(default_factory=Duration)
    running: Duration = field(default_factory=Duration)
    splitting: Duration = field(default_factory=Duration)

    def add(self, spent: BatchTimings, times: int) -> None:
        """Count a batch ``times`` times."""
        self.joining.add(times * spent.joining, times)
        self.running.add(times * spent.running, times)
        self.splitting.add(times * spent.splitting, times)

    def copy(self) -> Stages:
        return Stages(replace(self.joining), replace(self.running), replace(self.splitting))


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Counts of one model since it was loaded.

    ``answered`` and ``failed`` count requests, refused ones included; their time is from submission to answer.
    ``samples`` are those of answered requests, ``calls`` those of the engine. A request's time in the engine is that of
    its whole batch: ``stages`` counts it for every request, ``by_samples`` once per batch, by batch size. ``last`` is
    the time of the last answer in seconds since 1970, or 0. ``cache_hit`` and ``cache_miss`` count requests and
    the time in the response cache; hits are in ``answered``, but not in ``samples``. ``described`` holds other
    properties of the model.
    """

    answered: Duration = field(default_factory=Duration)
    failed: Duration = field(default_factory=Duration)
    queued: Duration = field(default_factory=Duration)
    cache_hit: Duration = field(default_factory=Duration)
    cache_miss: Duration = field(default_factory=Duration)
    stages: Stages = field(default_factory=Stages)
    by_samples: dict[int, Stages] = field(default_factory=dict)
    samples: int = 0
    calls: int = 0
    elements: int = 0
    padded: int = 0
    last: float = 0.0
    described: Mapping[str, Any] = field(default_factory=dict)

    def batch(self, requests: int, samples: int, right: int, spent: BatchTimings) -> None:
        """Count a batch.

        Args:
            requests: number of requests.
            samples: number of samples.
            right: number of samples in requests that were answered.
            spent: timings of the batch.
        """
        self.samples += right
        self.calls += spent.calls
        self.elements += spent.elements
        self.padded += spent.padded
        self.stages.add(spent, requests)
        stages = self.by_samples.get(samples)
        if stages is None:
            stages = self.by_samples[samples] = Stages()
        stages.add(spent, 1)
        if right:
            self.last = time.time()

    @property
    def padding(self) -> dict[str, float]:
        """The elements of inputs, those of padding among them, and their ratio."""
        filled = self.padded - self.elements
        return {"elements": self.elements, "padding": filled, "waste": filled / max(self.elements, 1)}

    def copy(self, queued: Duration, described: Mapping[str, Any]) -> Statistics:
        """Return an immutable copy."""
        return replace(
            self,
            answered=replace(self.answered),
            failed=replace(self.failed),
            queued=queued,
            cache_hit=replace(self.cache_hit),
            cache_miss=replace(self.cache_miss),
            stages=self.stages.copy(),
            by_samples={samples: stages.copy() for samples, stages in sorted(self.by_samples.items())},
            described=described,
        )


def learned(scheduler: Scheduler, padding: PaddingPolicy | None) -> dict[str, Any]:
    """Return the durations of calls that a scheduler has learned, and the batch of the best throughput."""
    latency = scheduler.latency
    if padding is not None:  # by samples of the size that was timed when the model was loaded
        each, most = padding.work(padding.example), scheduler.limits.max_batch
        rows = [work // each for work in latency.known if each <= work <= each * most]
        return {
            "rows_at_best": max(1, min(scheduler.cap // each, most)),
            "latency": [{"rows": count, "seconds": latency(count * each)} for count in dict.fromkeys(rows)],
            "by_work": [{"work": work, "seconds": seconds} for work, seconds in latency.known.items()],
        }
    classes = scheduler.latencies.classes.items()
    return {
        "rows_at_best": scheduler.cap,
        "latency": _listed(latency),
        "by_row_bytes": [{"row_bytes": weight, "latency": _listed(each)} for weight, each in classes],
    }


def _listed(latency: Latency) -> list[dict[str, float]]:
    return [{"rows": samples, "seconds": seconds} for samples, seconds in latency.known.items()]
