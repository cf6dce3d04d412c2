"""Pinned memory: such as the system never moves, which a GPU reads and writes by itself, at the full speed of the bus.

It is taken from NVIDIA's driver, so that neither PyTorch nor CUDA's own library is needed.
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

# CU_MEMHOSTALLOC_PORTABLE: for every context of the process, ONNX Runtime's own included.
_PORTABLE = 1


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Return an array in pinned memory, or in ordinary memory where there is no GPU or the driver has none left.

    Args:
        shape: of the array, whose values are undefined.
        dtype: numbers; not objects.
    """
    size = math.prod(shape) * dtype.itemsize
    driver = driver_of_first_gpu() if size else None
    address = None if driver is None else driver.take(size)
    if driver is None or address is None:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * size).from_address(address)
    # An array keeps the memory that it is a view of, and so does every view of the array.
    weakref.finalize(memory, driver.give_back, address).atexit = False
    array: Array = np.frombuffer(memoryview(memory).cast("B"), dtype).reshape(shape)
    return array


class Driver:
    """NVIDIA's driver, as far as pinned memory goes. Calls may come from any thread.

    Args:
        library: the driver's functions; initialized.

    Raises:
        OSError: it gives no context of the first GPU.
    """

    def __init__(self, library: Any):
        self._library = library
        self._context = ctypes.c_void_p()
        # The one context of the GPU that CUDA's own library, and so ONNX Runtime, works in.
        if library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0) != 0:
            raise OSError("NVIDIA's driver gives no context of the first GPU")

    def take(self, size: int) -> int | None:
        """Return the address of ``size`` bytes; None if there are none."""
        address = ctypes.c_void_p()
        self._library.cuCtxSetCurrent(self._context)  # of this thread
        code = self._library.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE))
        return address.value if code == 0 else None

    def give_back(self, address: int) -> None:
        self._library.cuCtxSetCurrent(self._context)
        self._library.cuMemFreeHost(ctypes.c_void_p(address))


@cache
def driver_of_first_gpu() -> Driver | None:
    """Return the driver, or None where there is no GPU."""
    if not devices.has_cuda():
        return None
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        log.warning("inputs of models on the GPU pass through ordinary memory: %s", error)
        return None
