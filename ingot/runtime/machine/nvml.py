"""NVIDIA's management library (NVML): the memory of visible GPUs, and metrics of all GPUs."""

from __future__ import annotations

import functools
import logging
import math
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ingot import foreign
from ingot.errors import missing_package
from ingot.runtime.machine import devices, memory

log = logging.getLogger(__name__)

# Seconds in which further scrapes get the same values, and after a failure none.
_KEPT = 1.0
_PAUSE = 60.0


def _library() -> Any:
    """Return the library, initialized; further calls only count."""
    import pynvml  # a process without models on GPUs does not need it

    pynvml.nvmlInit()
    return pynvml


def memory_of(index: int) -> Any:
    """Return the ``total``, ``free`` and ``used`` bytes of a visible GPU, by all processes; None if unknown."""
    return foreign.attempt(lambda: _memory_of(*_find(index)))


def utilization_of(index: int) -> float | None:
    """Return the share of the time in which a visible GPU computed lately; None if unknown, as with MIG."""
    return foreign.attempt(lambda: _utilization_of(*_find(index)))


def memory_used() -> int:
    """Return the bytes in use on the visible GPUs, by all processes; 0 without any."""
    return sum(0 if found is None else int(found.used) for found in map(memory_of, range(devices.gpu_count())))


def roomiest() -> int:
    """Return the index of the visible GPU with the most free memory; the first one if that is unknown."""
    free = [0 if found is None else int(found.free) for found in map(memory_of, range(devices.gpu_count()))]
    return free.index(max(free)) if free else 0


def _find(index: int) -> tuple[Any, Any]:
    """Return the library, which numbers all GPUs, and its handle of a visible one, by its unique identifier."""
    nvml, identifier = _library(), devices.gpu_identifier(index)
    for kind in ("GPU", "MIG"):  # an instance of a GPU has its own identifier and memory
        found = foreign.attempt(functools.partial(nvml.nvmlDeviceGetHandleByUUID, f"{kind}-{identifier}"))
        if found is not None:
            return nvml, found
    raise LookupError(f"NVIDIA's management library has no GPU {identifier}")


def _memory_of(nvml: Any, handle: Any) -> Any:
    return nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)


def _utilization_of(nvml: Any, handle: Any) -> float:
    return float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)


class Gpus(Collector):
    """Metrics of the GPUs of the machine, read when they are scraped; none before :meth:`use`.

    Args:
        registry: renders them.
        clock: returns seconds.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._next = math.inf
        self._found = _families()
        self._warned = False
        registry.register(self)

    def use(self) -> None:
        """Read the GPUs from now on, as a model runs on one."""
        self._next = min(self._next, self._clock())

    def collect(self) -> Iterable[Metric]:
        if self._clock() >= self._next:
            self._found = _families()
            failure = foreign.outcome(lambda: _read(*self._found))
            self._next = self._clock() + (_KEPT if failure is None else _PAUSE)
            if isinstance(failure, ModuleNotFoundError):
                failure = missing_package("nvidia-ml-py", "metrics of GPUs", "gpu")
            if failure is not None and not self._warned:
                self._warned = True
                log.warning("there are no metrics of GPUs: %s", foreign.typed(failure))
        return self._found


def _families() -> tuple[GaugeMetricFamily, GaugeMetricFamily]:
    return (
        GaugeMetricFamily(
            "ingot_gpu_memory_bytes",
            "Memory of a GPU, with a model on a GPU, by kind: `total`; `reserved` by the driver; `used` by all "
            "processes; `server`, held by the server and its engine processes, CUDA contexts included",
            labels=("gpu", "kind"),
        ),
        GaugeMetricFamily(
            "ingot_gpu_utilization_ratio",
            "Share of the time in which the GPU computed, from 0 to 1, over the driver's last sampling period; "
            "with a model on a GPU",
            labels=("gpu",),
        ),
    )


def _read(used: GaugeMetricFamily, busy: GaugeMetricFamily) -> None:
    """Read all GPUs; a value that one does not have is left out."""
    nvml = _library()
    processes = {os.getpid(), *map(int, memory.engine_processes())}
    for index in range(nvml.nvmlDeviceGetCount()):
        gpu, handle = str(index), nvml.nvmlDeviceGetHandleByIndex(index)
        if (found := foreign.attempt(functools.partial(_memory_of, nvml, handle))) is not None:
            for kind in ("total", "reserved", "used"):
                used.add_metric((gpu, kind), getattr(found, kind))
        running = foreign.attempt(functools.partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle))
        # In a container the numbers of processes may be those of the host; then none of them is the server's.
        ours = [each.usedGpuMemory for each in running or () if each.pid in processes]
        if ours and None not in ours:
            used.add_metric((gpu, "server"), sum(ours))
        if (share := foreign.attempt(functools.partial(_utilization_of, nvml, handle))) is not None:
            busy.add_metric((gpu,), share)
