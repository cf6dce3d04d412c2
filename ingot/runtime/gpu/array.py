"""Memory of a device that others own: regions that another process shares, and arrays in them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import numpy as np

from ingot.errors import IngotError, InvalidArgument
from ingot.runtime.gpu.device import Device
from ingot.tensors import Array


class SharedBlock:
    """Memory of a device that another process shares. It stays mapped as long as something refers to this object.

    Args:
        device: where the memory is.
        handle: as the other process has exported it.
        nbytes: bytes of it that are used, from its beginning.

    Raises:
        InvalidArgument: the handle cannot be opened, or the memory has fewer bytes.
    """

    def __init__(self, device: Device, handle: bytes, nbytes: int):
        self.device = device
        self.address, room = device.open_shared(handle)
        unmap = weakref.finalize(self, _unmap, device, self.address)
        unmap.atexit = False
        if nbytes > room:
            unmap()
            raise InvalidArgument(f"the memory of this handle has {room} bytes, fewer than the {nbytes} of 'byte_size'")

    def read(self, offset: int, nbytes: int) -> Array:
        """Return a copy of a part in the host's memory, as bytes."""
        return to_host(self.device, self.address + offset, nbytes)

    def write(self, offset: int, content: bytes) -> None:
        """Copy bytes from the host into a part, and wait until they are there."""
        source = np.frombuffer(content, np.uint8)
        if len(source):
            with _stream(self.device) as stream:
                self.device.copy_in(self.address + offset, source.ctypes.data, len(source), stream)


def to_host(device: Device, address: int, nbytes: int) -> Array:
    """Return a copy of memory of a device, as bytes; wait until it is complete."""
    copy = np.empty(nbytes, np.uint8)
    if nbytes:
        with _stream(device) as stream:
            device.copy_out(copy.ctypes.data, address, nbytes, stream)
    return copy


@contextlib.contextmanager
def _stream(device: Device) -> Iterator[int]:
    """Yield a stream, and wait for its work at the end."""
    stream = device.stream()
    try:
        yield stream
    finally:
        device.close_stream(stream)


def _unmap(device: Device, address: int) -> None:
    with contextlib.suppress(IngotError):  # the device has failed, and its memory is lost
        device.close_shared(address)
