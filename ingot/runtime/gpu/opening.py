"""Opening a device by its name: an NVIDIA GPU, or one of a plug-in."""

from __future__ import annotations

from functools import cache

from ingot import foreign
from ingot.errors import IngotError, Unsupported
from ingot.runtime.gpu.device import Device
from ingot.runtime.gpu.driver import cuda_device
from ingot.runtime.machine import devices, plugins


@cache
def open_device(device: str) -> Device:
    """Return a device, such as ``cuda:0``; the same object for each use in the process.

    Raises:
        Unsupported: there is no such device, or it cannot be used.
    """
    kind, index = devices.kind_of(device), devices.index_of(device)
    if kind == "cuda":
        return cuda_device(index)
    opener = plugins.find("ingot.devices", kind)
    if opener is None:
        known = ", ".join(("cpu", "cuda", *plugins.names("ingot.devices")))
        raise Unsupported(f"unknown device '{device}'; there are {known}")
    with foreign.reported_as(Unsupported, f"device '{device}' is not available", keep=IngotError):
        opened: Device = opener(index)
        return opened
