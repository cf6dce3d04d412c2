"""Properties of the machine: usable CPU cores, instruction sets, and whether a GPU works."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
from functools import cache
from pathlib import Path


def cpu_count() -> int:
    """Return the number of cores that this process may use; in a container that is fewer than the machine has.

    A container's limit may be a share of time rather than a set of cores: half a core counts as one.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, quota())))


def quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return the CPU quota of this process's control group in cores; infinity without a limit."""
    found = math.inf
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        found = math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):  # control groups of version 1
        quota, period = ((root / f"cpu/cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        found = int(quota) / int(period) if int(quota) > 0 else found
    return found


@cache
def has_cuda() -> bool:
    """Return whether an NVIDIA driver with at least one device is available.

    The driver is queried directly: ``onnxruntime.get_available_providers()`` lists CUDA wherever the GPU package is
    installed.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


@cache
def cpu_features() -> str:
    """Return the processor's architecture and instruction sets, which determine the kernels that engines choose."""
    names: set[str] = set()
    try:
        with Path("/proc/cpuinfo").open() as info:
            for line in info:
                label, _, value = line.partition(":")
                if label.strip() in ("flags", "Features", "CPU implementer", "CPU part"):
                    names.update(value.split())
    except OSError:
        names.add(platform.processor())
    return " ".join([platform.machine(), *sorted(names)])


def has_bf16() -> bool:
    """Return whether the processor has the bfloat16 instructions that OpenVINO uses."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_features().split())


def describe() -> str:
    """Return the architecture, CPU model and cores of the machine, for evidence."""
    model = platform.processor() or platform.machine()
    try:
        with Path("/proc/cpuinfo").open() as info:
            model = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{platform.machine()}, {model}, {cpu_count()} cores"
