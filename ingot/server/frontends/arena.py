"""Memory that two processes share, for tensors that are too large to be copied through a socket.

The sender puts a request's tensors into a block of its arena, and the receiver works on them where they are. Measured
in CPU time, one copy into an arena costs less than two through a socket from some 64 KiB on (half at 256 KiB, a third
at 1 MiB); a file descriptor passed for each tensor costs more than the socket at any size, as its pages are new.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import insort
from collections.abc import Callable

import numpy as np

from ingot.tensors import Array

THRESHOLD = 64 << 10
"""Tensors of fewer bytes go through the socket."""

_PAGE = mmap.PAGESIZE
# Blocks that end above this give their memory back when they are free; below, its pages are kept for the next.
_WARM = 64 << 20


def create(size: int) -> int:
    """Return the file descriptor of a new arena. It takes memory only where it is written."""
    handle = os.memfd_create("ingot-tensors", os.MFD_CLOEXEC)
    os.ftruncate(handle, -(-size // _PAGE) * _PAGE)
    return handle


class Outgoing:
    """The arena that this process writes: it hands out blocks, and takes them back when the other has read them.

    Args:
        handle: the arena's file descriptor, which may be closed afterwards.
    """

    def __init__(self, handle: int):
        size = os.fstat(handle).st_size
        self._map = mmap.mmap(handle, size)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._holes = [(0, size)]
        self._taken: dict[int, int] = {}

    def take(self, size: int) -> int | None:
        """Return the offset of a free block, the lowest that is large enough, or None if there is none."""
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
        """Return a block that was taken, as bytes to be written."""
        return self._bytes[start : start + self._taken[start]]

    def free(self, start: int) -> None:
        """Take a block back."""
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
        release: called with a block's offset when nothing looks at it any more, in whichever thread that is.
    """

    def __init__(self, handle: int, release: Callable[[int], None]):
        self._map = mmap.mmap(handle, 0, access=mmap.ACCESS_READ)
        self._release = release

    def block(self, start: int, size: int) -> Array:
        """Return a block's first ``size`` bytes; it is released when neither they nor a view on them is left."""
        # Made of the map itself: the base of an array's views is the first array whose own base is no array.
        block = np.frombuffer(self._map, np.uint8, size, start)
        weakref.finalize(block, self._release, start).atexit = False
        return block
