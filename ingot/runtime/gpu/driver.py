"""NVIDIA GPUs by the functions of the driver, so that neither PyTorch nor the CUDA library is needed.

Everything happens in the primary context of each GPU, where the CUDA library, and so ONNX Runtime, works too; a stream
of the driver is also one of the library.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

from ingot.errors import EngineLost, IngotError, InternalError, InvalidArgument, TooLarge, Unsupported

# Values of cuda.h.
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream, which other libraries may use
_EVENT_FLAGS = 1 | 2  # CU_EVENT_BLOCKING_SYNC: waiting does not spin; CU_EVENT_DISABLE_TIMING
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE: pinned in every context of the process
_MEMORY_POOLS = 115  # CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag of cuIpcOpenMemHandle, which requires it
_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_OUT_OF_MEMORY = 2
# Errors of cuMemHostAlloc after which memory is not pinned: there is none left, or ONNX Runtime captures a graph in
# another thread, which forbids such calls to all threads.
_NOT_PINNED = frozenset((_OUT_OF_MEMORY, 900, 901))
# Errors after which every call in the process fails for this GPU: a driver that was shut down, a lost or broken
# context, uncorrectable memory or links, the unknown error, and those of which cuda.h says that the process must be
# started again: illegal addresses and instructions, kernels that failed or took too long, contained faults, the end of
# an MPS server or of an external device. Not 802, which cuInit returns while the system is not ready.
_FATAL = frozenset((4, 46, 201, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999))


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


class CudaDevice:
    """A GPU that ``CUDA_VISIBLE_DEVICES`` leaves visible, or an instance of one (MIG): a :class:`.device.Device`.

    Args:
        library: the functions of the driver, ``libcuda.so.1``; initialized.
        index: which GPU of those that are visible.

    Raises:
        Unsupported: the driver cannot open a context of it, or cannot allocate memory in the order of a stream.
    """

    def __init__(self, library: Any, index: int):
        self.name = f"cuda:{index}"
        self.lost = ""
        self._library = library
        self._context = ctypes.c_void_p()
        if code := library.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), index):
            raise Unsupported(f"NVIDIA's driver cannot open a context of {self.name}: {_described(library, code)}")
        pools = ctypes.c_int()
        if library.cuDeviceGetAttribute(ctypes.byref(pools), _MEMORY_POOLS, index) or not pools.value:
            raise Unsupported(f"NVIDIA's driver cannot allocate memory of {self.name} in the order of a stream")

    def stream(self) -> int:
        return self._created("cuStreamCreate", ctypes.c_uint(_NON_BLOCKING))

    def close_stream(self, stream: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(stream))
        self._call("cuStreamDestroy_v2", ctypes.c_void_p(stream))

    def event(self) -> int:
        return self._created("cuEventCreate", ctypes.c_uint(_EVENT_FLAGS))

    def close_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", ctypes.c_void_p(stream), ctypes.c_void_p(event), ctypes.c_uint(0))

    def synchronize(self, event: int) -> None:
        self._call("cuEventSynchronize", ctypes.c_void_p(event))  # ctypes releases the interpreter lock

    def pin(self, nbytes: int) -> int | None:
        library, made = self._library, ctypes.c_uint64()
        code = library.cuCtxSetCurrent(self._context) or library.cuMemHostAlloc(
            ctypes.byref(made), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE)
        )
        if code and code not in _NOT_PINNED:
            raise self._error("cuMemHostAlloc", code)
        return None if code else made.value

    def unpin(self, address: int) -> None:
        self._call("cuMemFreeHost", ctypes.c_void_p(address))

    def allocate(self, nbytes: int, stream: int) -> int:
        # cuMemAlloc and cuMemFree would wait for all work of the GPU.
        return self._created("cuMemAllocAsync", ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))

    def free(self, address: int, stream: int) -> None:
        self._call("cuMemFreeAsync", ctypes.c_uint64(address), ctypes.c_void_p(stream))

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        places = ctypes.c_uint64(target), ctypes.c_void_p(source)
        self._call("cuMemcpyHtoDAsync_v2", *places, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))

    def copy_out(self, target: int, source: int, nbytes: int, stream: int) -> None:
        places = ctypes.c_void_p(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoHAsync_v2", *places, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))

    def copy_across(self, target: int, source: int, nbytes: int, stream: int) -> None:
        places = ctypes.c_uint64(target), ctypes.c_uint64(source)
        self._call("cuMemcpyDtoDAsync_v2", *places, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))

    def open_shared(self, handle: bytes) -> tuple[int, int]:
        if len(handle) != _HANDLE_BYTES:
            raise InvalidArgument(f"a handle of CUDA memory has {_HANDLE_BYTES} bytes, not {len(handle)}")
        library, made = self._library, ctypes.c_uint64()
        # A handle that is open already is counted once more, and has the same address.
        code = library.cuCtxSetCurrent(self._context) or library.cuIpcOpenMemHandle_v2(
            ctypes.byref(made), _Handle.from_buffer_copy(handle), ctypes.c_uint(_PEER_ACCESS)
        )
        if code:  # of any kind: a wrong handle does not mean that the device has failed
            reason = f"{_described(library, code)} in cuIpcOpenMemHandle"
            raise InvalidArgument(f"the handle of CUDA memory cannot be opened on {self.name}: {reason}")
        address = made.value
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close_shared, address)
            start, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
            self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(nbytes), ctypes.c_uint64(address))
            on_error.pop_all()
        return address, start.value + nbytes.value - address

    def close_shared(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def _created(self, function: str, *arguments: Any) -> int:
        made = ctypes.c_uint64()
        self._call(function, ctypes.byref(made), *arguments)
        return made.value

    def _call(self, function: str, *arguments: Any) -> None:
        library = self._library
        # Set for each call: other libraries change the context of a thread, and memory is freed in any thread.
        code = library.cuCtxSetCurrent(self._context) or getattr(library, function)(*arguments)
        if code:
            raise self._error(function, code)

    def _error(self, function: str, code: int) -> IngotError:
        reason = f"{_described(self._library, code)} in {function}"
        if code == _OUT_OF_MEMORY:
            return TooLarge(f"{self.name} has too little memory left for this input ({function}); send less at once")
        if code in _FATAL:
            self.lost = reason
            return EngineLost(f"the device {self.name} failed: {reason}; restart the server to use it again")
        return InternalError(f"{self.name}: {reason}")


def _described(library: Any, code: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorName(code, ctypes.byref(text))
    return f"error {code} ({text.value.decode()})" if text.value else f"error {code}"


def cuda_device(index: int) -> CudaDevice:
    """Return a GPU; see :func:`ingot.runtime.gpu.opening.open_device`.

    Raises:
        Unsupported: there is no driver or no such GPU, or it is too old.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unsupported(f"device 'cuda:{index}' is not available: {error}") from error
    if code := library.cuInit(0):
        raise Unsupported(f"device 'cuda:{index}' is not available: {_described(library, code)} in cuInit")
    return CudaDevice(library, index)
