"""CUDA memory that clients register, so that tensors need not leave the GPU: Triton's extension cuda_shared_memory.

A region is mapped by the handle that its client has exported (CUDA IPC), and stays mapped until it is unregistered and
the last request that uses it has ended.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping
from typing import Any

from ingot.errors import InvalidArgument, Unsupported
from ingot.protocol.regions import Place
from ingot.runtime.gpu.array import DeviceArray, SharedBlock, Target
from ingot.runtime.gpu.opening import open_device
from ingot.runtime.machine import devices
from ingot.tensors import DType


class CudaRegion:
    """A part of a GPU's memory, which a client has exported.

    Args:
        handle: a ``cudaIpcMemHandle_t``.
        device: the GPU's number.
        size: of the region, in bytes.

    Raises:
        InvalidArgument: there is no such GPU, the handle cannot be opened, or its memory has fewer bytes.
        Unsupported: this machine has no GPU.
    """

    def __init__(self, handle: bytes, device: int, size: int):
        if not devices.has_cuda():
            raise Unsupported("this server sees no NVIDIA GPU; register system shared memory instead")
        count = devices.gpu_count()
        if not 0 <= device < count:
            raise InvalidArgument(f"'device_id' is {device}; this server sees {count} GPUs, the first of which is 0")
        if size < 0:
            raise InvalidArgument("'byte_size' must be at least 0")
        self.device = device
        self.size = size
        self._block = SharedBlock(open_device(f"cuda:{device}"), handle, size)

    @property
    def described(self) -> dict[str, Any]:
        """The region that a client registered, as Triton describes it."""
        return {"device_id": self.device, "byte_size": self.size}

    def array(self, place: Place, dtype: DType, shape: tuple[int, ...]) -> DeviceArray | None:
        """Return a tensor where it is; None if it does not fill its place, or its bytes must be checked on the host."""
        kind = dtype.numpy
        if dtype in (DType.BYTES, DType.BOOL) or not place.size or place.size != math.prod(shape) * kind.itemsize:
            return None
        return self._block.array(place.offset, shape, kind)

    def target(self, place: Place) -> Target:
        """Return a place, which lies within the region, for an output."""
        block = self._block
        return Target(block.device, block.address + place.offset, place.size, block)

    def read(self, where: str, place: Place) -> bytes:
        """Return a copy of a tensor's bytes; the tensor lies within the region."""
        return self._block.read(place.offset, place.size).tobytes()

    def write(self, where: str, place: Place, content: bytes) -> None:
        """Write a tensor's bytes to the beginning of its place, which lies within the region.

        Raises:
            InvalidArgument: the bytes are more than the place has.
        """
        place.check_room(where, len(content))
        self._block.write(place.offset, content)

    def close(self) -> None:
        """Do nothing: requests may still use the memory, which is unmapped with the last reference to it."""


def handle_of(content: Mapping[str, Any]) -> tuple[bytes, int, int]:
    """Return the handle, the GPU's number and the size in bytes of a JSON registration.

    Raises:
        InvalidArgument: they are missing, or not of the right types.
    """
    raw = content.get("raw_handle")
    text = raw.get("b64") if isinstance(raw, dict) else None
    device, size = content.get("device_id"), content.get("byte_size")
    if not isinstance(device, int) or not isinstance(size, int) or isinstance(device, bool) or isinstance(size, bool):
        raise InvalidArgument("'device_id' must be the number of a GPU, and 'byte_size' a number of bytes")
    if not isinstance(text, str):
        raise InvalidArgument('\'raw_handle\' must be an object with the handle in Base64: {"b64": "..."}')
    try:
        return base64.b64decode(text, validate=True), device, size
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"'b64' of 'raw_handle' is not Base64: {error}") from error
