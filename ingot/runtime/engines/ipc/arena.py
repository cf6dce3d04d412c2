"""Shared memory of two processes, for tensors that are too large to be copied through a socket.

The sender copies a request's tensors into a block of its arena, and the receiver uses them in place. Measured in CPU
time, one copy into an arena costs less than two through a socket from some 64 KiB on (half at 256 KiB, a third at
1 MiB); passing a file descriptor per tensor costs more than the socket at any size, as its pages are new.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np

from ingot.tensors import Array

THRESHOLD = 64 << 10
"""Tensors of fewer bytes go through the socket."""

_PAGE = mmap.PAGESIZE
# Free blocks that end above this return their memory; below, the pages are kept for the next block.
_WARM = 64 << 20


def create(size: int) -> int:
    """Return the file descriptor of a new arena. Only written pages use memory, and its size is fixed."""
    handle = os.memfd_create("ingot-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(handle, -(-size // _PAGE) * _PAGE)
    # Seals: if one process shrank the arena, the other would be killed by SIGBUS when it reads the missing part.
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return handle


class Outgoing:
    """The arena that this process writes: it allocates blocks, and frees them when the other process has read them.

    Args:
        handle: the arena's file descriptor, which may be closed afterwards.
    """

    def __init__(self, handle: int):
        size = os.fstat(handle).st_size
        self._map = mmap.mmap(handle, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._address: int = self._bytes.__array_interface__["data"][0]
        self._holes = [(0, size)]
        self._taken: dict[int, int] = {}
        self._dropped: deque[int] = deque()  # blocks of arrays that are gone, added by any thread

    def take(self, size: int) -> int | None:
        """Allocate the lowest free block that is large enough; return its offset, or None if there is none."""
        while self._dropped:
            self.free(self._dropped.popleft())
        size = -(-size // _PAGE) * _PAGE
        for index, (start, room) in enumerate(self._holes):
            if room >= size:
                if room > size:
                    self._holes[index] = (start + size, room - size)
                else:
                    del self._holes[index]
                self._taken[start] = size
                return start
        return None

    def block(self, start: int) -> Array:
        """Return an allocated block, as bytes to be written."""
        return self._bytes[start : start + self._taken[start]]

    def allocate(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array | None:
        """Return an uninitialized array in a new block, or None if there is no room.

        The block is free again when no array refers to it any more, in any thread.
        """
        size = prod(shape) * dtype.itemsize
        start = self.take(max(size, 1))
        if start is None:
            return None
        block = np.frombuffer(self._map, np.uint8, size, start)
        weakref.finalize(block, self._dropped.append, start).atexit = False
        array: Array = block.view(dtype).reshape(shape)
        return array

    def offset_of(self, array: Array) -> int | None:
        """Return where an array lies in this arena; None if it lies elsewhere or is not contiguous."""
        start: int = array.__array_interface__["data"][0] - self._address
        inside = start >= 0 and start + array.nbytes <= len(self._bytes)
        return start if inside and array.flags.c_contiguous else None

    def free(self, start: int) -> None:
        """Free a block."""
        size = self._taken.pop(start)
        if start + size > _WARM:
            self._map.madvise(mmap.MADV_REMOVE, start, size)
        insort(self._holes, (start, size))
        merged: list[tuple[int, int]] = []
        for hole in self._holes:
            if merged and sum(merged[-1]) == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._holes = merged


class Incoming:
    """The arena that the other process writes.

    Args:
        handle: the arena's file descriptor, which may be closed afterwards.
        release: called with a block's offset when no array refers to it any more, in any thread.
        writable: whether the arrays may be written to.
    """

    def __init__(self, handle: int, release: Callable[[int], None], *, writable: bool = False):
        self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self._release = release

    def block(self, start: int, size: int) -> Array:
        """Return a block's first ``size`` bytes; it is released with the last array that refers to them."""
        # From the map itself: the base of an array's views is the first array whose base is not an array.
        block = np.frombuffer(self._map, np.uint8, size, start)
        weakref.finalize(block, self._release, start).atexit = False
        return block
