"""Tensors of other libraries in the memory of a GPU, by the DLPack protocol."""

from __future__ import annotations

import contextlib
import weakref
from functools import cache
from typing import Any

from ingot.errors import IngotError, InvalidArgument
from ingot.runtime.gpu.array import DeviceArray
from ingot.runtime.gpu.device import Device
from ingot.runtime.gpu.opening import open_device
from ingot.tensors import dlpack


class _Owner:
    """Keeps a tensor's memory, and the event after which it has its values."""

    def __init__(self, device: Device, exported: dlpack.Exported):
        self.exported = exported
        self.ready = device.event()
        weakref.finalize(self, _close, device, self.ready).atexit = False


def resident(name: str, value: Any) -> DeviceArray | None:
    """Return a tensor of a GPU where it is, or None if it is elsewhere or has no elements.

    Its library lets a stream of the GPU wait for the work that computes the tensor, and an event in that stream is what
    copies of the values wait for: no thread does.

    Args:
        name: of the input, for errors.
        value: for which :func:`ingot.tensors.dlpack.exports` is true.

    Raises:
        InvalidArgument: it is not contiguous, its element type cannot be served, or its library does not export it.
        Unsupported: this process cannot use the GPU.
    """
    kind, number = dlpack.device_of(name, value)
    if kind != dlpack.CUDA:
        return None
    device = open_device(f"cuda:{number}")
    stream = _arrivals(f"cuda:{number}")
    exported = dlpack.export(name, value, stream=stream)
    dtype = exported.dtype.numpy
    if not dlpack.is_contiguous(exported.shape, exported.strides, dtype.itemsize):
        raise InvalidArgument(f"input '{name}' on {device.name} is not contiguous; give tensor.contiguous()")
    if 0 in exported.shape:
        return None
    owner = _Owner(device, exported)
    device.record(owner.ready, stream)
    return DeviceArray(device, exported.address, exported.shape, dtype, owner, owner.ready)


@cache
def _arrivals(device: str) -> int:
    """Return the stream of a device in which tensors arrive, which only waits."""
    return open_device(device).stream()


def _close(device: Device, event: int) -> None:
    with contextlib.suppress(IngotError):  # the device has failed
        device.close_event(event)
