"""A GPU whose memory two programs share, as host memory: the driver of a server, and the CUDA library of its client.

Of ``cuda``, NVIDIA's package for Python that tritonclient's ``cuda_shared_memory`` calls, only the functions that it
uses are here. Memory of the client that is freed or unmapped too early is an error.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from ingot.runtime.gpu import opening
from ingot.runtime.machine import devices
from tests.runtime.gpu.test_driver import CONTEXT, FakeLibrary

COUNT = 2
"""GPUs of the machine."""
HANDLE_BYTES = 64


class _Refusal(Exception):
    """A call of the driver that fails with a code."""


class SharedGpu(FakeLibrary):
    """The driver's functions, with memory that clients have exported.

    Attributes:
        exported: the address and the size of memory, by its handle.
        mapped: how often the server has each address open.
        copies: the functions that copied, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exported: dict[bytes, tuple[int, int]] = {}
        self.mapped: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self.current = CONTEXT  # cuInit is called without

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = super().__getattr__(name)

        def refusing(*arguments: Any) -> int:
            try:
                return call(*arguments)
            except _Refusal as refusal:
                return int(refusal.args[0])

        return refusing

    @property
    def copies(self) -> list[str]:
        return [name for name in self.calls if name.startswith("cuMemcpy")]

    def export(self, address: int, size: int) -> bytes:
        """Return a handle of the client's memory."""
        handle = b"ipc" + bytes(5) + next(self._numbers).to_bytes(HANDLE_BYTES - 8, "little")
        self.exported[handle] = address, size
        return handle

    def withdraw(self, address: int) -> None:
        """Free memory of the client, which the server must not have open."""
        assert not self.mapped.get(address), "memory is freed while the server has it mapped"
        self.exported = {handle: place for handle, place in self.exported.items() if place[0] != address}

    def _cuInit(self, flags: int) -> None:  # noqa: N802 - the driver's names
        assert flags == 0

    def _cuDeviceGetCount(self, count: Any) -> None:  # noqa: N802
        count._obj.value = COUNT

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> None:  # noqa: N802
        assert flags.value == 1
        assert ctypes.sizeof(handle) == HANDLE_BYTES
        if bytes(handle) not in self.exported:
            raise _Refusal(1)
        start, _ = self.exported[bytes(handle)]
        self.mapped[start] = self.mapped.get(start, 0) + 1
        address._obj.value = start

    def _cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> None:  # noqa: N802
        found = next(place for place in self.exported.values() if place[0] == address.value)
        start._obj.value, size._obj.value = found

    def _cuIpcCloseMemHandle(self, address: Any) -> None:  # noqa: N802
        self.mapped[address.value] -= 1
        if not self.mapped[address.value]:
            del self.mapped[address.value]

    def _cuMemcpyDtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        self._cuMemcpyHtoDAsync_v2(target, source, size, stream)


class _Error(enum.IntEnum):
    cudaSuccess = 0  # noqa: N815 - the library's names
    cudaErrorInvalidValue = 1  # noqa: N815


class _Handle:
    def __init__(self, content: bytes):
        self._content = ctypes.create_string_buffer(content, HANDLE_BYTES)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self._content)


def client_library(gpu: SharedGpu) -> dict[str, ModuleType]:
    """Return the modules of NVIDIA's package ``cuda`` that tritonclient imports, by name."""
    held: dict[int, Any] = {}
    runtime, driver = ModuleType("cuda.bindings.runtime"), ModuleType("cuda.bindings.driver")

    def malloc(size: int) -> tuple[_Error, int]:
        memory = ctypes.create_string_buffer(size)
        held[ctypes.addressof(memory)] = memory
        return _Error.cudaSuccess, ctypes.addressof(memory)

    def free(address: int) -> tuple[_Error]:
        gpu.withdraw(address)
        del held[address]
        return (_Error.cudaSuccess,)

    def copy(target: Any, source: Any, size: int, kind: int, stream: int) -> tuple[_Error]:
        ctypes.memmove(target, source, size)
        return (_Error.cudaSuccess,)

    def done(*_: Any) -> tuple[_Error]:
        return (_Error.cudaSuccess,)

    def number(*_: Any) -> tuple[_Error, int]:
        return _Error.cudaSuccess, 1

    functions: dict[str, Any] = {
        "CUDA_IPC_HANDLE_SIZE": HANDLE_BYTES,
        "cudaError_t": _Error,
        "cudaIpcMemHandle_t": _Handle,
        "cudaDeviceAttr": enum.IntEnum("cudaDeviceAttr", {"cudaDevAttrUnifiedAddressing": 41}),
        "cudaMemcpyKind": enum.IntEnum("cudaMemcpyKind", {"cudaMemcpyDefault": 4}),
        "cudaMalloc": malloc,
        "cudaFree": free,
        "cudaIpcGetMemHandle": lambda address: (_Error.cudaSuccess, _Handle(gpu.export(address, len(held[address])))),
        "cudaMemcpyAsync": copy,
        "cudaGetDevice": number,
        "cudaSetDevice": done,
        "cudaDeviceGetAttribute": number,
        "cudaStreamCreate": number,
        "cudaStreamSynchronize": done,
        "cudaStreamDestroy": done,
        "cudaGetErrorString": lambda code: (_Error.cudaSuccess, b"an error"),
    }
    vars(runtime).update(functions)
    vars(driver).update(
        CUresult=enum.IntEnum("CUresult", {"CUDA_SUCCESS": 0}),
        cuDeviceGet=number,
        cuDevicePrimaryCtxGetState=lambda device: (_Error.cudaSuccess, 0, 0),
    )
    package, bindings = ModuleType("cuda"), ModuleType("cuda.bindings")
    vars(bindings).update(runtime=runtime, driver=driver)
    vars(package).update(bindings=bindings)
    return {module.__name__: module for module in (package, bindings, runtime, driver)}


@contextmanager
def machine_with(gpu: SharedGpu) -> Iterator[None]:
    """Let this process find the GPU, as a server and as a client of one."""
    load = ctypes.CDLL
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ctypes, "CDLL", lambda name, *rest, **named: gpu if name == "libcuda.so.1" else load(name, *rest, **named)
        )
        patch.setattr(devices, "has_cuda", lambda: True)
        for name, module in client_library(gpu).items():
            patch.setitem(sys.modules, name, module)
        opening.open_device.cache_clear()
        yield
        for name in list(sys.modules):
            if name.startswith("tritonclient.utils.cuda_shared_memory"):
                del sys.modules[name]
    opening.open_device.cache_clear()
