"""The state of models, as the main process sends it to its fronts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import orjson

from ingot.errors import IngotError
from ingot.runtime import Model
from ingot.runtime.dispatch.statistics import BatchTimes, Duration, Stages, Statistics
from ingot.runtime.repeat import Repeat
from ingot.runtime.scheduling.scheduler import REASONS
from ingot.server.frontends import kinds
from ingot.tensors import DType, Range, Signature, TensorSpec
from ingot.values import ValueRange


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """One version of a model, as fronts need it for metadata and to check requests.

    ``unavailable`` is the message for requests while it is not ready.
    """

    number: int
    name: str
    version: str
    unavailable: str
    ready: bool
    loaded: bool
    platform: str = ""
    properties: Mapping[str, str] = field(default_factory=dict)
    labels: Sequence[str] = ()
    signature: Signature | None = None
    sequential: bool = False
    repeat: Repeat | None = None

    @classmethod
    def of(cls, model: Model) -> ModelState:
        try:
            signature: Signature | None = model.signature
        except IngotError:  # the model is not loaded yet
            signature = None
        return cls(
            number=model.number,
            name=model.name,
            version=model.version,
            unavailable=model.unavailable,
            ready=model.ready,
            loaded=model.loaded,
            platform=model.platform,
            properties=model.properties,
            labels=model.labels,
            signature=signature,
            sequential=model.sequential,
            repeat=model.repeat,
        )

    @classmethod
    def loads(cls, content: Mapping[str, Any]) -> ModelState:
        signature, repeat = content["signature"], content["repeat"]
        built = {
            "signature": None if signature is None else _signature(signature),
            "repeat": None if repeat is None else Repeat(**repeat),
        }
        return cls(**{**content, **built})

    def dumps(self) -> dict[str, Any]:
        """Return the argument of :meth:`loads`, ready for JSON."""
        return {
            "number": self.number,
            "name": self.name,
            "version": self.version,
            "unavailable": self.unavailable,
            "ready": self.ready,
            "loaded": self.loaded,
            "platform": self.platform,
            "properties": dict(self.properties),
            "labels": list(self.labels),
            "signature": None if self.signature is None else _content(self.signature),
            "sequential": self.sequential,
            "repeat": None if self.repeat is None else asdict(self.repeat),
        }


def dump_batch(batch: BatchTimes) -> bytes:
    """Return a batch as bytes for :func:`load_batch`."""
    times = batch.started, batch.began, batch.ran, batch.ended
    return kinds.BATCH.pack(*times, batch.requests, batch.samples, REASONS.index(batch.reason))


def load_batch(raw: bytes) -> BatchTimes:
    """Return the batch of :func:`dump_batch`."""
    started, began, ran, ended, requests, samples, reason = kinds.BATCH.unpack(raw)
    return BatchTimes(started, began, ran, ended, requests, samples, REASONS[reason])


def dump_statistics(statistics: Statistics) -> bytes:
    """Return statistics as bytes for :func:`load_statistics`."""
    content = asdict(statistics)
    return orjson.dumps({**content, "by_samples": list(content["by_samples"].items())}, option=orjson.OPT_NON_STR_KEYS)


def load_statistics(raw: bytes) -> Statistics:
    """Return the statistics of :func:`dump_statistics`."""
    content = orjson.loads(raw)
    durations = {
        name: Duration(**content[name]) for name in ("answered", "failed", "queued", "cache_hit", "cache_miss")
    }
    by_samples = {samples: _stages(stages) for samples, stages in content["by_samples"]}
    return Statistics(**{**content, **durations, "stages": _stages(content["stages"]), "by_samples": by_samples})


def _stages(content: Mapping[str, Any]) -> Stages:
    return Stages(**{name: Duration(**duration) for name, duration in content.items()})


def _content(signature: Signature) -> dict[str, Any]:
    return {
        "inputs": [[*_spec(spec), spec.values and [spec.values.low, spec.values.high]] for spec in signature.inputs],
        "outputs": [_spec(spec) for spec in signature.outputs],
        "batch": signature.batch,
        "ranges": {name: [bounds.low, bounds.high, bounds.step] for name, bounds in signature.ranges.items()},
    }


def _spec(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype.value, spec.shape]


def _signature(content: Mapping[str, Any]) -> Signature:
    def specs(side: str) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(name, DType(dtype), tuple(shape), *(values and ValueRange(*values) for values in rest))
            for name, dtype, shape, *rest in content[side]
        )

    ranges = {name: Range(*bounds) for name, bounds in content["ranges"].items()}
    return Signature(specs("inputs"), specs("outputs"), content["batch"], ranges)
