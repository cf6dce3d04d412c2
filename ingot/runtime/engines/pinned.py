"""Pinned memory, which the system never moves, so that a GPU accesses it directly at the full speed of the bus.

It is allocated by NVIDIA's driver, so that neither PyTorch nor the CUDA library is needed.
"""

from __future__ import annotations

import ctypes
import logging
import math
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from ingot.runtime import devices
from ingot.tensors import Array

log = logging.getLogger(__name__)

# CU_MEMHOSTALLOC_PORTABLE: usable in every context of the process, including ONNX Runtime's.
_PORTABLE = 1


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array in pinned memory, or in ordinary memory without a GPU or if the driver has none left.

    Args:
        shape: of the array, whose values are undefined.
        dtype: numbers, not objects.
    """
    size = math.prod(shape) * dtype.itemsize
    driver = driver_of_first_gpu() if size else None
    address = None if driver is None else driver.take(size)
    if driver is None or address is None:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * size).from_address(address)
    # An array keeps the memory that it is a view of alive, and so does every view of the array.
    weakref.finalize(memory, driver.give_back, address).atexit = False
    array: Array = np.frombuffer(memoryview(memory).cast("B"), dtype).reshape(shape)
    return array


class Driver:
    """NVIDIA's driver, as far as pinned memory needs it. Any thread may call it.

    Args:
        library: the driver's functions; initialized.

    Raises:
        OSError: it cannot open a context of the first GPU.
    """

    def __init__(self, library: Any):
        self._library = library
        self._context = ctypes.c_void_p()
        # The GPU's primary context, in which the CUDA library and so ONNX Runtime work.
        if library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0) != 0:
            raise OSError("NVIDIA's driver cannot open a context of the first GPU")

    def take(self, size: int) -> int | None:
        """Return the address of ``size`` bytes; None if there is not enough memory."""
        address = ctypes.c_void_p()
        self._library.cuCtxSetCurrent(self._context)  # of this thread
        code = self._library.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))
        return address.value if code == 0 else None

    def give_back(self, address: int) -> None:
        self._library.cuCtxSetCurrent(self._context)
        self._library.cuMemFreeHost(ctypes.c_void_p(address))


@cache
def driver_of_first_gpu() -> Driver | None:
    """Return the driver, or None without a GPU."""
    if not devices.has_cuda():
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        log.warning("inputs of models on the GPU pass through ordinary memory: %s", error)
        return None
