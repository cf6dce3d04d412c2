"""Properties of the machine: usable CPU cores, instruction sets, and whether a GPU works."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import math
import os
import platform
import uuid
from functools import cache
from pathlib import Path

from ingot.runtime.machine import cgroup

log = logging.getLogger(__name__)

# The code of cuInit without a GPU, or with an empty CUDA_VISIBLE_DEVICES.
_NO_DEVICE = 100
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) of Linux on x86-64.
_ARCH_PRCTL, _REQUEST_REGISTERS, _TILES = 158, 0x1023, 18


def cpu_count() -> int:
    """Return the number of cores that this process may use; in a container that is fewer than the machine has.

    A container's limit may be a share of time rather than a set of cores: half a core counts as one.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(allowed, quota())))


def quota(root: Path = cgroup.ROOT) -> float:
    """Return the CPU quota of the control groups around this process, in cores; infinity without a limit."""
    found = math.inf
    for folder in cgroup.folders("cpu", root):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            found = min(found, int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):  # control groups of version 1
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if int(quota) > 0:
                found = min(found, int(quota) / int(period))
    return found


def has_cuda() -> bool:
    """Return whether an NVIDIA driver with at least one device is available.

    The driver is queried directly: ``onnxruntime.get_available_providers()`` lists CUDA wherever the GPU package is
    installed.
    """
    return _driver()[0] > 0


def driver_fault() -> str:
    """Return why NVIDIA's driver cannot be used, such as if it differs from its kernel module; empty if unknown."""
    return _driver()[1]


@cache
def _driver() -> tuple[int, str]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, ""
    count = ctypes.c_int(0)
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code not in (0, _NO_DEVICE):
        return 0, f"NVIDIA's driver cannot be used, error {code} in cuInit"
    return 0 if code else count.value, ""


def warn_of_unused_gpus(lacking: str) -> None:
    """Log once why ``auto`` is the CPU on a machine that has an NVIDIA driver.

    Args:
        lacking: what an engine needs to use the GPUs, if the driver can be used.
    """
    if (why := driver_fault()) or (has_cuda() and (why := lacking)):
        _warn_of_unused_gpus(why)


@cache
def _warn_of_unused_gpus(why: str) -> None:
    log.warning("models on device 'auto' run on the CPU: %s; set --device cpu if that is intended", why)


def gpu_count() -> int:
    """Return the number of GPUs, or instances of them, that ``CUDA_VISIBLE_DEVICES`` leaves visible."""
    count = ctypes.c_int(0)
    if not has_cuda() or ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)):
        return 0
    return count.value


def gpu_identifier(index: int) -> uuid.UUID:
    """Return the unique identifier of a visible GPU, or of an instance of one.

    Raises:
        LookupError: there is no such GPU.
    """
    cuda, device, identifier = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid_v2(ctypes.byref(identifier), device):
        raise LookupError(f"NVIDIA's driver has no GPU {index}")
    return uuid.UUID(bytes=bytes(identifier))


@cache
def cpu_features() -> str:
    """Return the processor's architecture and instruction sets, which determine the kernels that engines choose.

    Matrix units whose registers this process may not use are left out.
    """
    names: set[str] = set()
    try:
        with Path("/proc/cpuinfo").open() as info:
            for line in info:
                label, _, value = line.partition(":")
                if label.strip() in ("flags", "Features", "CPU implementer", "CPU part"):
                    names.update(value.split())
    except OSError:
        names.add(platform.processor())
    amx = {name for name in names if name.startswith("amx_")}
    if amx and not _may_use_amx():
        names -= amx
    return " ".join([platform.machine(), *sorted(names)])


def _may_use_amx() -> bool:
    """Return whether Linux lets this process use the registers of x86's matrix units; a container may forbid it."""
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_REGISTERS, _TILES) == 0)


def has_bf16() -> bool:
    """Return whether the processor has the bfloat16 instructions that OpenVINO uses."""
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(cpu_features().split())


def describe() -> str:
    """Return the architecture, CPU model and cores of the machine, and a digest of its instruction sets, for evidence.

    All virtual machines of a provider may name the same model and differ in instruction sets. Measurements from one
    machine hold on another only if both descriptions are equal.
    """
    model = platform.processor() or platform.machine()
    try:
        with Path("/proc/cpuinfo").open() as info:
            model = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    features = hashlib.sha256(cpu_features().encode()).hexdigest()[:8]
    return f"{platform.machine()}, {model}, {cpu_count()} cores, instructions {features}"


def spread(device: str) -> list[str]:
    """Return the devices that a setting names: ``cuda:0,1`` are ``cuda:0`` and ``cuda:1``."""
    kind, colon, indices = device.partition(":")
    return [f"{kind}:{index}" for index in indices.split(",")] if colon else [device]


def kind_of(device: str) -> str:
    """Return the kind of a device: ``cuda`` of ``cuda:1``."""
    return device.partition(":")[0]


def index_of(device: str) -> int:
    """Return the index of a device: 1 of ``cuda:1``, and 0 if it has none."""
    return int(device.partition(":")[2] or 0)
