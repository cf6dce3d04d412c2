"""What the metrics show of one model, while it is the one that its name and version mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ingot.runtime.loading.placement import Placement, contexts
from ingot.runtime.metrics import Metrics


class ModelGauges:
    """The gauges of one model: it is published when it takes over, and withdrawn when another does.

    Args:
        metrics: shared by all models.
        name: the model's name.
        version: the model's version.
    """

    def __init__(self, metrics: Metrics, name: str, version: str):
        self._metrics = metrics
        self._labels = (name, version)
        self._variant: tuple[str, str] | None = None
        self._placement: Placement | None = None
        self._fallback = ""
        self._published = False

    def publish(self, numbers: Mapping[str, Callable[[], float]]) -> None:
        """Show the model from now on, instead of the one that was shown before.

        Args:
            numbers: by the gauge's attribute of :class:`Metrics`.
        """
        for gauge, number in numbers.items():
            getattr(self._metrics, gauge).labels(*self._labels).set_function(number)
        self._published = True
        self._show_variant()
        self._show_memory()
        self._show_fallback()

    def withdraw(self, *gauges: str) -> None:
        """Stop showing the model; remove those of its gauges that no successor replaces."""
        self._show_memory(shown=False)
        self._show_fallback(shown=False)
        self._published = False
        if self._variant is not None:
            self._metrics.variant_info.remove(*self._labels, *self._variant)
        for gauge in gauges:
            getattr(self._metrics, gauge).remove(*self._labels)

    @property
    def published(self) -> bool:
        return self._published

    def chosen(self, variant: str, reason: str | None) -> None:
        """Show which variant is served, and why; an empty name is that of a file, which has none."""
        self._variant = (variant, reason) if variant and reason is not None else None
        self._show_variant()

    def placed(self, placement: Placement | None, fallback: str) -> dict[str, str]:
        """Measure the memory of GPUs that a load has taken, and show it; return the properties that clients see.

        Args:
            placement: on GPUs; None for a model on the CPU.
            fallback: as :meth:`.EngineLoader.fallback` returns it.
        """
        self._show_fallback(shown=False)
        self._placement, self._fallback = placement, fallback
        self._show_fallback()
        if placement is None:
            return {"placement": fallback} if fallback else {}
        spent = self._metrics.engine_seconds.labels(*self._labels)
        placement.ready(lambda: spent.total)
        for device, nbytes in contexts.items():
            self._metrics.context_memory.labels(device).set(nbytes)
        self._show_memory()
        reason = fallback or placement.reason
        return {"placement": reason} if reason else {}

    def leave_devices(self) -> None:
        """Stop showing the memory of GPUs, which the model has left."""
        self._show_memory(shown=False)
        self._show_fallback(shown=False)
        self._placement, self._fallback = None, ""

    def engine_lost(self, ending: str) -> None:
        """Count the end of an engine process; ``ending`` describes it."""
        signal = re.search(r"SIG\w+", ending)
        reason = signal[0] if signal else "exit" if "exit" in ending else "killed"
        self._metrics.engine_restarts.labels(*self._labels, reason).inc()

    def count_derived(self, result: str) -> None:
        """Count a result of the derived cache."""
        self._metrics.derived_cache.labels(*self._labels, result).inc()

    def _show_variant(self) -> None:
        if self._published and self._variant is not None:
            self._metrics.variant_info.labels(*self._labels, *self._variant).set(1)

    def _show_fallback(self, *, shown: bool = True) -> None:
        if not self._published or not self._fallback:
            return
        if shown:
            self._metrics.cpu_fallback.labels(*self._labels).set(1)
        else:
            self._metrics.cpu_fallback.remove(*self._labels)

    def _show_memory(self, *, shown: bool = True) -> None:
        if not self._published or self._placement is None:
            return
        for kind, used in (("planned", self._placement.planned), ("measured", self._placement.measured)):
            for device, nbytes in used.items():
                labels = (*self._labels, device, kind)
                if shown:
                    self._metrics.model_device_memory.labels(*labels).set(nbytes)
                else:
                    self._metrics.model_device_memory.remove(*labels)
