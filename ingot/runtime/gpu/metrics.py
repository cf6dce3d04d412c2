"""Memory and utilization of NVIDIA GPUs as metrics, by NVIDIA's management library (NVML)."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ingot import foreign
from ingot.errors import missing_package
from ingot.runtime import memory

log = logging.getLogger(__name__)

# Seconds in which further scrapes get the same values, and after a failure none.
_KEPT = 1.0
_PAUSE = 60.0


class Gpus(Collector):
    """Metrics of the GPUs of the machine, read when they are scraped; none before :meth:`use`.

    Args:
        registry: renders them.
        clock: returns seconds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._used = False
        self._library: Any = None
        self._next = 0.0
        self._memory: list[tuple[tuple[str, str], float]] = []
        self._utilization: list[tuple[tuple[str], float]] = []
        self._warned = False
        registry.register(self)

    def use(self) -> None:
        """Read the GPUs from now on, as a model runs on one."""
        self._used = True

    def collect(self) -> Iterable[Metric]:
        if self._used and self._clock() >= self._next:
            self._read()
        gauges: tuple[tuple[str, str, tuple[str, ...], Iterable[tuple[tuple[str, ...], float]]], ...] = (
            (
                "ingot_gpu_memory_bytes",
                "Memory of a GPU, by kind: total, reserved (by its driver), used (by all processes), or server (held "
                "by this server's processes, their CUDA contexts included)",
                ("gpu", "kind"),
                self._memory,
            ),
            (
                "ingot_gpu_utilization_ratio",
                "Share of the time in which a GPU computed, from 0 to 1, over the last sampling period of its driver",
                ("gpu",),
                self._utilization,
            ),
        )
        for name, text, labels, samples in gauges:
            family = GaugeMetricFamily(name, text, labels=labels)
            for values, value in samples:
                family.add_metric(values, value)
            yield family

    def _read(self) -> None:
        self._memory, self._utilization = [], []
        failure = foreign.outcome(self._ask)
        self._next = self._clock() + (_KEPT if failure is None else _PAUSE)
        if failure is None:
            return
        self._library = None
        if isinstance(failure, ModuleNotFoundError):
            failure = missing_package("nvidia-ml-py", "metrics of GPUs", "gpu")
        if not self._warned:
            self._warned = True
            log.warning("there are no metrics of GPUs: %s", foreign.typed(failure))

    def _ask(self) -> None:
        """Read all GPUs; a value that one does not have is left out."""
        if self._library is None:
            import pynvml  # a process without models on GPUs does not need it

            pynvml.nvmlInit()
            self._library = pynvml
        nvml = self._library
        processes = {os.getpid(), *map(int, memory.engine_processes())}
        for index in range(nvml.nvmlDeviceGetCount()):
            gpu, handle = str(index), nvml.nvmlDeviceGetHandleByIndex(index)
            self._memory += (((gpu, kind), value) for kind, value in _memory(nvml, handle, processes))
            rates = foreign.attempt(functools.partial(nvml.nvmlDeviceGetUtilizationRates, handle))
            if rates is not None:
                self._utilization.append(((gpu,), rates.gpu / 100))


def _memory(nvml: Any, handle: Any, processes: set[int]) -> Iterator[tuple[str, float]]:
    found = foreign.attempt(functools.partial(nvml.nvmlDeviceGetMemoryInfo, handle, version=nvml.nvmlMemory_v2))
    if found is not None:
        yield from (("total", found.total), ("reserved", found.reserved), ("used", found.used))
    running = foreign.attempt(functools.partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle))
    # In a container the numbers of processes may be those of the host; then none of them is the server's.
    ours = [each.usedGpuMemory for each in running or () if each.pid in processes]
    if ours and None not in ours:
        yield "server", sum(ours)
