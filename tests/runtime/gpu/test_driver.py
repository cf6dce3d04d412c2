"""The calls to NVIDIA's driver, against a library that keeps memory of the host and checks its arguments."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ingot.errors import EngineLost, InternalError, TooLarge, Unsupported
from ingot.runtime.gpu import driver, opening
from ingot.runtime.gpu.driver import CudaDevice
from ingot.runtime.gpu.pinned import PinnedPool
from ingot.runtime.gpu.pipeline import Lane, OnDevice, Pipeline
from ingot.runtime.machine import devices
from ingot.tensors import Array, DType

CONTEXT = 0xC0


class FakeLibrary:
    """The functions of ``libcuda.so.1``: work is done at once. ``failing`` is the code that a function returns."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.calls: list[str] = []
        self.held: dict[int, Any] = {}
        self.handles: set[int] = set()
        self.current = 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(type(self), f"_{name}", None)
        if function is None:
            raise AttributeError(f"the driver has no function {name}")

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.failing:
                return self.failing[name]
            needs_context = not name.startswith(("cuDevice", "cuCtx", "cuGet"))
            assert not needs_context or self.current == CONTEXT, "no context is current in this thread"
            function(self, *arguments)
            return 0

        return call

    def _cuDevicePrimaryCtxRetain(self, context: Any, index: int) -> None:  # noqa: N802 - the driver's names
        context._obj.value = CONTEXT

    def _cuDeviceGetAttribute(self, value: Any, attribute: int, index: int) -> None:  # noqa: N802
        assert attribute == 115
        value._obj.value = 1

    def _cuCtxSetCurrent(self, context: Any) -> None:  # noqa: N802
        self.current = context.value

    def _cuGetErrorName(self, code: int, text: Any) -> None:  # noqa: N802
        text._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY", 700: b"CUDA_ERROR_ILLEGAL_ADDRESS"}.get(code)

    def _made(self, handle: Any, flags: Any) -> None:
        handle._obj.value = max(self.handles, default=0x100) + 16
        self.handles.add(handle._obj.value)

    def _cuStreamCreate(self, handle: Any, flags: Any) -> None:  # noqa: N802
        assert flags.value == 1
        self._made(handle, flags)

    def _cuEventCreate(self, handle: Any, flags: Any) -> None:  # noqa: N802
        assert flags.value == 3
        self._made(handle, flags)

    def _cuStreamSynchronize(self, stream: Any) -> None:  # noqa: N802
        assert stream.value in self.handles

    def _cuStreamDestroy_v2(self, stream: Any) -> None:  # noqa: N802
        self.handles.remove(stream.value)

    _cuEventDestroy_v2 = _cuStreamDestroy_v2  # noqa: N815

    def _cuEventRecord(self, event: Any, stream: Any) -> None:  # noqa: N802
        assert {event.value, stream.value} <= self.handles

    def _cuStreamWaitEvent(self, stream: Any, event: Any, flags: Any) -> None:  # noqa: N802
        assert {event.value, stream.value} <= self.handles
        assert flags.value == 0

    def _cuEventSynchronize(self, event: Any) -> None:  # noqa: N802
        assert event.value in self.handles

    def _allocated(self, address: Any, size: Any) -> None:
        memory = ctypes.create_string_buffer(size.value)
        address._obj.value = ctypes.addressof(memory)
        self.held[address._obj.value] = memory

    def _cuMemHostAlloc(self, address: Any, size: Any, flags: Any) -> None:  # noqa: N802
        assert flags.value == 1
        self._allocated(address, size)

    def _cuMemAllocAsync(self, address: Any, size: Any, stream: Any) -> None:  # noqa: N802
        assert stream.value in self.handles
        self._allocated(address, size)

    def _cuMemFreeHost(self, address: Any) -> None:  # noqa: N802
        del self.held[address.value]

    def _cuMemFreeAsync(self, address: Any, stream: Any) -> None:  # noqa: N802
        assert stream.value in self.handles
        del self.held[address.value]

    def _cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> None:  # noqa: N802
        assert stream.value in self.handles
        ctypes.memmove(target.value, source.value, size.value)

    _cuMemcpyDtoHAsync_v2 = _cuMemcpyHtoDAsync_v2  # noqa: N815


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.mark.matrix
def test_a_pipeline_runs_on_the_drivers_functions(library: FakeLibrary) -> None:
    device = CudaDevice(library, 1)
    assert device.name == "cuda:1"
    pipeline = Pipeline(device)

    def launch(inputs: Any, addresses: Any) -> list[OnDevice]:
        array: Array = inputs["x"]
        return [OnDevice(addresses["x"], array.shape, DType.of(array), None)]

    lane = Lane(pipeline, launch, ["x"])
    for size in (3, 5000):
        values = np.arange(size, dtype=np.int32)
        (result,) = lane.run({"x": values})
        assert result.tolist() == values.tolist()
    lane.close()
    pipeline.close()
    del result
    gc.collect()
    assert not library.held
    assert not library.handles
    waits_for_all = {"cuCtxSynchronize", "cuMemAlloc_v2", "cuMemFree_v2", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"}
    assert not waits_for_all & set(library.calls)


def test_pinned_memory_beyond_what_the_system_has_is_ordinary(library: FakeLibrary) -> None:
    pool = PinnedPool(CudaDevice(library, 0), 1 << 20)
    for code in (2, 900, 901):  # there is none left, or another thread captures a graph
        library.failing = {"cuMemHostAlloc": code}
        array = pool.empty((4, 3), np.dtype(np.float32))
        array[:] = 1
        assert not library.held
    library.failing = {"cuMemHostAlloc": 1}
    with pytest.raises(InternalError, match="error 1 in cuMemHostAlloc"):
        pool.empty((4, 3), np.dtype(np.float32))
    assert pool.empty((0, 3), np.dtype(np.int64)).shape == (0, 3)
    library.failing = {}
    assert pool.empty((1 << 19,), np.dtype(np.float32)).shape == (1 << 19,)  # over the limit
    assert not library.held


def test_errors_of_the_driver(library: FakeLibrary) -> None:
    device = CudaDevice(library, 0)
    stream, event = device.stream(), device.event()
    library.failing = {"cuMemAllocAsync": 2, "cuEventRecord": 1, "cuEventSynchronize": 700}
    with pytest.raises(TooLarge, match="cuda:0 has too little memory left for this input"):
        device.allocate(1, stream)
    with pytest.raises(InternalError, match="error 1 in cuEventRecord"):
        device.record(event, stream)
    assert device.lost == ""
    with pytest.raises(EngineLost, match=r"cuda:0 failed: error 700 \(CUDA_ERROR_ILLEGAL_ADDRESS\)"):
        device.synchronize(event)
    assert "700" in device.lost
    for code, fatal in ((220, True), (226, True), (721, True), (810, True), (911, True), (4, True), (802, False)):
        device = CudaDevice(library, 0)
        library.failing = {"cuEventSynchronize": code}
        with pytest.raises(EngineLost if fatal else InternalError, match=f"error {code}"):
            device.synchronize(event)
        assert bool(device.lost) == fatal


def test_devices_that_cannot_be_used(library: FakeLibrary) -> None:
    for function in ("cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute"):
        library.failing = {function: 101}
        with pytest.raises(Unsupported, match="cuda:2"):
            CudaDevice(library, 2)
    if not devices.has_cuda():
        with pytest.raises(Unsupported, match="'cuda:0' is not available"):
            driver.cuda_device(0)
    with pytest.raises(Unsupported, match="unknown device 'npu:0'; there are cpu, cuda"):
        opening.open_device("npu:0")
