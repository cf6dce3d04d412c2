"""Pinned host memory, which the system never moves, so that a GPU copies from and to it at the full speed of the bus.

Pinning takes as long as a batch and can interrupt the GPU's work, so memory is kept and used again.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from ingot.errors import IngotError
from ingot.runtime.gpu.array import DeviceArray, JoinedArray
from ingot.runtime.gpu.device import Device
from ingot.tensors import Array

# The smallest block, in bytes; larger ones are powers of two.
_LEAST = 4096


class PinnedPool:
    """Blocks of pinned memory, lent as arrays. A block is lent again once no view of its last array is left.

    Any thread may use it. Arrays beyond the limit, or beyond what the system can pin, are in ordinary memory, through
    which copies take longer and block the thread that enqueues them.

    Args:
        device: pins the memory.
        limit: most bytes of all blocks.
    """

    def __init__(self, device: Device, limit: int):
        self._device = device
        self._limit = limit
        # These two are replaced instead of changed, so that readers need no lock.
        self._free: dict[int, deque[int]] = {}
        self._blocks: tuple[tuple[int, int], ...] = ()
        self._growing = Lock()
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes that are pinned."""
        return sum(size for _, size in self._blocks)

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Return an array, whose values are undefined.

        Args:
            shape: of the array.
            dtype: numbers, not objects.
        """
        size = math.prod(shape) * dtype.itemsize
        found = self._take(max(_LEAST, 1 << (size - 1).bit_length())) if size else None
        if found is None:
            return np.empty(shape, dtype)
        address, block = found
        memory = (ctypes.c_char * block).from_address(address)
        # An array keeps the memory that it is a view of alive, and so does every view of the array.
        weakref.finalize(memory, self._give_back, address, block).atexit = False
        array: Array = np.frombuffer(memoryview(memory).cast("B"), dtype, math.prod(shape)).reshape(shape)
        return array

    def holds(self, array: Array) -> bool:
        """Return whether an array is in pinned memory."""
        address = array.ctypes.data
        return any(0 <= address - start < size for start, size in self._blocks)

    def placed(self, array: Any) -> Any:
        """Return an array with the values of one of numbers, contiguous and pinned: itself if it is both.

        One that is on a device, or of which parts are, is returned as it is.
        """
        if isinstance(array, DeviceArray | JoinedArray):
            return array
        if array.flags.c_contiguous and self.holds(array):
            return array
        copy = self.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def close(self) -> None:
        """Unpin the blocks that are not lent, and each of the others when it comes back; lend nothing afterwards."""
        self._closed = True
        self._unpin()

    def _take(self, size: int) -> tuple[int, int] | None:
        """Return the address and the size of a block of at least ``size`` bytes; None if there is none."""
        for block, free in sorted(self._free.items()):
            if block >= size:
                with contextlib.suppress(IndexError):  # it is empty
                    return free.pop(), block
        with self._growing:
            address = self._device.pin(size) if self.nbytes + size <= self._limit else None
            if address is None:
                return None
            self._free = {size: deque(), **self._free}
            self._blocks = (*self._blocks, (address, size))
        return address, size

    def _give_back(self, address: int, size: int) -> None:
        # Garbage collection calls this at any time, also in a thread that has the lock.
        self._free[size].append(address)
        if self._closed:
            self._unpin()

    def _unpin(self) -> None:
        for free in self._free.values():
            with contextlib.suppress(IndexError, IngotError):  # it is empty, or the device has failed
                while True:
                    self._device.unpin(free.pop())
