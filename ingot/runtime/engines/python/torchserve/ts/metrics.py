"""``ts.metrics``: measurements of a handler, which are written to the server's log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum
from typing import Any

log = logging.getLogger("ts.metrics")

# What BaseHandler measures of each batch; Ingot measures that itself.
_OWN = ("HandlerTime",)


class MetricTypes(Enum):
    """Kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Dimension:
    """A label of a metric."""

    def __init__(self, name: str, value: str):
        self.name = name
        self.value = value


class Metric:
    """A metric that a handler has made by name."""

    def __init__(self, metrics: Metrics, name: str, unit: str, dimensions: Sequence[str]):
        self._metrics = metrics
        self._name = name
        self._unit = unit
        self._dimensions = dimensions

    def add_or_update(self, value: float, dimension_values: Sequence[str] = (), *_: Any, **__: Any) -> None:
        labels = [Dimension(name, str(each)) for name, each in zip(self._dimensions, dimension_values, strict=False)]
        self._metrics.add_metric(self._name, value, self._unit, dimensions=labels)

    update = add_or_update


class Metrics:
    """The attribute ``metrics`` of the context."""

    def __init__(self, model_name: str):
        self._model = model_name
        self._made: dict[str, Metric] = {}

    def add_metric(
        self,
        name: str,
        value: float,
        unit: str = "",
        idx: int | None = None,
        dimensions: Sequence[Dimension] | None = None,
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> None:
        if name not in _OWN:
            labels = "".join(f" {each.name}={each.value}" for each in dimensions or ())
            log.info("%s %s%s%s of %s", name, value, f" {unit}" if unit else "", labels, self._model)

    def add_time(self, name: str, value: float, idx: int | None = None, unit: str = "ms", *_: Any, **__: Any) -> None:
        self.add_metric(name, value, unit, idx)

    def add_size(self, name: str, value: float, idx: int | None = None, unit: str = "MB", *_: Any, **__: Any) -> None:
        self.add_metric(name, value, unit, idx)

    def add_percent(self, name: str, value: float, idx: int | None = None, *_: Any, **__: Any) -> None:
        self.add_metric(name, value, "percent", idx)

    def add_counter(self, name: str, value: float, idx: int | None = None, *_: Any, **__: Any) -> None:
        self.add_metric(name, value, "", idx)

    def add_error(self, name: str, value: str, *_: Any, **__: Any) -> None:
        log.info("%s %s of %s", name, value, self._model)

    def add_metric_to_cache(
        self,
        metric_name: str,
        unit: str = "",
        dimension_names: Sequence[str] = (),
        metric_type: MetricTypes = MetricTypes.COUNTER,
    ) -> Metric:
        return self._made.setdefault(metric_name, Metric(self, metric_name, unit, dimension_names))

    def get_metric(self, metric_name: str, metric_type: MetricTypes = MetricTypes.COUNTER) -> Metric:
        return self.add_metric_to_cache(metric_name)
