"""Inputs and outputs that are in a device's memory: no copy over the host, and no use of memory after its owner's."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.errors import InternalError, InvalidArgument
from ingot.runtime import EngineSpec, Limits, Model, ModelSource, ServingTerms, Settings, load_engine
from ingot.runtime.engines import loader
from ingot.runtime.gpu import device_tensors
from ingot.runtime.gpu.array import Direct, Range, SharedBlock, Target, TargetedInputs, reachable
from ingot.runtime.gpu.driver import CudaDevice
from ingot.runtime.gpu.graphs import GraphOptions
from ingot.runtime.gpu.pipeline import Lane, Pipeline
from ingot.tensors import Array, dlpack
from tests import onnx_models
from tests.runtime.gpu.fake_device import Doubling, FakeDevice, UnorderedAccess, span_of
from tests.runtime.gpu.pipelined import SessionDevice, pipelined
from tests.runtime.gpu.shared_gpu import HANDLE_BYTES, SharedGpu

pytestmark = pytest.mark.matrix  # against a fake device, until they have run on a GPU

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def _only_objects_of_these_tests() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def shared(device: FakeDevice, array: Array) -> Any:
    """Return an array in memory of another process; only it keeps the memory mapped."""
    return SharedBlock(device, device.share(array), array.nbytes).array(0, array.shape, array.dtype)


def target(device: FakeDevice, nbytes: int) -> tuple[Target, Array]:
    """Return a place in memory of another process, and that memory."""
    block = SharedBlock(device, device.share(np.zeros(nbytes, np.uint8)), nbytes)
    return Target(device, block.address, nbytes, block), device.shared[block.address]


def mapped(device: FakeDevice) -> list[int]:
    """Return the addresses of memory of other processes that is mapped."""
    return [address for address in device.blocks if address in device.shared]


def values(memory: Array) -> list[float]:
    found: list[float] = memory.view(np.float32).tolist()
    return found


class Lanes:
    """A pipeline of a kind of device, with one lane that doubles its input."""

    def __init__(self, device: FakeDevice, kind: type[Lane] = Lane):
        self.device = device
        self.pipeline = Pipeline(device)
        self.lane = kind(self.pipeline, Doubling(device, self.pipeline.compute), ["x"])


def test_an_input_on_the_device_is_copied_there() -> None:
    device = FakeDevice()
    made = Lanes(device)
    for part in (slice(None), slice(1, 3)):
        (result,) = made.lane.run({"x": shared(device, X)[(part,)]})
        np.testing.assert_array_equal(result, 2 * X[part])
    assert device.acrosses == 2
    assert device.now == 2 * (1 + 1)  # to compute and to copy out
    assert not mapped(device)
    assert not device.early


@pytest.mark.matrix
def test_parts_on_the_device_and_on_the_host_are_joined_there() -> None:
    device = FakeDevice()
    made = Lanes(device)
    parts: list[Any] = [X[:1], shared(device, X[1:2]), shared(device, X[2:3]), X[3:]]
    out = made.pipeline.pool.empty(X.shape, X.dtype)
    out[...] = -1
    joined: Any = np.concatenate(parts, 0, out=out)
    assert (joined.shape, joined.dtype, joined.nbytes) == (X.shape, X.dtype, X.nbytes)
    assert out.tolist() == [X[0].tolist(), [-1] * 3, [-1] * 3, X[3].tolist()]
    (result,) = made.lane.run({"x": joined})
    np.testing.assert_array_equal(result, 2 * X)
    assert device.acrosses == 2
    np.testing.assert_array_equal(np.asarray(joined), X)
    with pytest.raises(TypeError):
        np.stack(parts)  # numpy joins such arrays in one way only


@pytest.mark.matrix
def test_outputs_are_copied_to_their_places() -> None:
    device = FakeDevice()
    made = Lanes(device)
    first, one = target(device, 12)
    rest, other = target(device, 100)
    (result,) = made.lane.run({"x": X}, {0: [Range(0, 1, first), Range(1, 4, rest)]})
    device.touch(span_of(one), writes=False)
    device.touch(span_of(other), writes=False)
    assert values(one) == (2 * X[0]).tolist()
    assert values(other)[:9] == (2 * X[1:]).reshape(-1).tolist()
    assert first.done
    assert rest.done
    assert result.shape == X.shape
    assert result.strides == (0, 0)  # all of it is elsewhere
    small, _ = target(device, 11)
    again, memory = target(device, 36)
    (result,) = made.lane.run({"x": X}, {0: [Range(0, 1, small), Range(1, 4, again)]})
    np.testing.assert_array_equal(result, 2 * X)  # a part of it has no other place
    assert not small.done
    assert again.done
    assert values(memory) == (2 * X[1:]).reshape(-1).tolist()


@pytest.mark.matrix
def test_a_captured_batch_reads_and_writes_tensors_on_the_device(tmp_path: Path) -> None:
    device, path = SessionDevice(), onnx_models.affine(tmp_path)
    engine = pipelined(path, device, GraphOptions(most=4, batch=None, padded=False))
    for number, samples in enumerate((2, 2, 3, 2)):  # captured, replayed, without a graph, replayed
        given = X[:samples] + number
        place, memory = target(device, given.nbytes)
        inputs: dict[str, Any] = {"x": shared(device, given)}
        engine.run(inputs, {"y": [Range(0, None, place)]})
        device.touch(span_of(memory), writes=False)
        assert place.done
        assert values(memory) == load_engine(EngineSpec(path, device="cpu")).run({"x": given})["y"].reshape(-1).tolist()
    assert engine._session.runs == [1, 1, -1, 1]
    assert device.acrosses == 8  # each input and each output: none was copied over the host
    del inputs, place
    assert not mapped(device)
    assert not device.early


class Hasty(Lane):
    """Forgets its inputs when they are enqueued, as a wrong pipeline would."""

    def start(self, inputs: Mapping[str, Array], targets: Mapping[int, Sequence[Range]] = {}) -> None:
        super().start(inputs, targets)
        self._inputs, self._delivered = {}, []


@pytest.mark.one_case
@pytest.mark.parametrize("kind", [Lane, Hasty])
def test_memory_is_unmapped_after_the_batch_only(kind: type[Lane]) -> None:
    device = FakeDevice()
    made = Lanes(device, kind)
    place, _ = target(device, X.nbytes)
    made.lane.start({"x": shared(device, X)}, {0: [Range(0, None, place)]})
    del place
    if kind is Hasty:
        assert device.early
        return
    assert len(mapped(device)) == 2
    made.lane.finish()
    assert not mapped(device)
    assert not device.early


class Faulty(FakeDevice):
    """Leaves out the waits of one stream, or those of the host."""

    fault = -1

    def wait(self, stream: int, event: int) -> None:
        if stream != self.fault:
            super().wait(stream, event)

    def synchronize(self, event: int) -> None:
        if self.fault:
            super().synchronize(event)


@pytest.mark.matrix
def test_a_missing_wait_for_a_place_is_found() -> None:
    device = Faulty()
    made = Lanes(device)
    device.fault = made.pipeline.copy_out
    place, _ = target(device, X.nbytes)
    with pytest.raises(UnorderedAccess):
        made.lane.start({"x": X}, {0: [Range(0, None, place)]})
    device = Faulty()
    made = Lanes(device)
    device.fault = 0
    place, memory = target(device, X.nbytes)
    made.lane.run({"x": X}, {0: [Range(0, None, place)]})
    with pytest.raises(UnorderedAccess):
        device.touch(span_of(memory), writes=False)


class OnGpu:
    """A tensor of a library that computes it in its own stream: ``2 * values``, in memory of the device."""

    def __init__(self, device: FakeDevice, values: Array, *, kind: int = dlpack.CUDA):
        self.device, self.kind = device, kind
        self.stream = device.stream()
        self.address = device.allocate(values.nbytes, self.stream)
        memory = device.blocks[self.address][: values.nbytes].view(values.dtype).reshape(values.shape)
        self.tensor = torch.from_numpy(memory)

        def compute() -> None:
            memory[...] = 2 * values

        device.work(self.stream, [], [(self.address, values.nbytes)], 5, compute)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, stream: int, max_version: tuple[int, int]) -> Any:
        event = self.device.event()
        self.device.record(event, self.stream)
        self.device.wait(stream, event)
        self.device.close_event(event)
        return self.tensor.__dlpack__(max_version=max_version)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Faulty]:
    device = Faulty()
    device.name = "cuda:0"
    monkeypatch.setattr(device_tensors, "open_device", lambda name: device)
    yield device
    device_tensors._arrivals.cache_clear()


@pytest.mark.matrix
def test_a_tensor_is_copied_after_the_work_that_computes_it(gpu: Faulty) -> None:
    made = Lanes(gpu)
    (result,) = made.lane.run({"x": device_tensors.resident("x", OnGpu(gpu, X))})  # type: ignore[dict-item]
    np.testing.assert_array_equal(result, 4 * X)
    assert gpu.now == 5 + 0 + 1 + 1  # computed there, copied within the device, computed here, copied out
    np.testing.assert_array_equal(np.asarray(device_tensors.resident("x", OnGpu(gpu, X))), 2 * X)
    assert len(gpu._events) == 3  # the lane's
    gpu.fault = made.pipeline.copy_in
    with pytest.raises(UnorderedAccess):
        made.lane.start({"x": device_tensors.resident("x", OnGpu(gpu, X))})  # type: ignore[dict-item]


@pytest.mark.matrix
def test_tensors_that_are_not_read_where_they_are(gpu: Faulty) -> None:
    assert device_tensors.resident("x", torch.ones(2)) is None
    empty = OnGpu(gpu, X)
    empty.tensor = empty.tensor[:0]
    assert device_tensors.resident("x", empty) is None
    turned = OnGpu(gpu, X)
    turned.tensor = turned.tensor.T
    with pytest.raises(InvalidArgument, match=r"'x' on cuda:0 is not contiguous; give tensor\.contiguous\(\)"):
        device_tensors.resident("x", turned)
    odd = OnGpu(gpu, X)
    odd.tensor = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(InvalidArgument, match=r"'x' on cuda:0 cannot be read: .*complex64"):
        device_tensors.resident("x", odd)


# A model in lanes.


@pytest.fixture
def device() -> SessionDevice:
    return SessionDevice()


Load = Callable[..., Model]


@pytest.fixture
def load(device: SessionDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    monkeypatch.setattr(loader, "open_engine", lambda spec: pipelined(spec.path, device))
    models: list[Model] = []

    def make(path: Path, **settings: Any) -> Model:
        made = Settings(**{"warm_time": 0, "isolate": "none", "device": "fake:0", **settings})
        model = Model("m", "1", ModelSource.of_file(path, made, "m"), ServingTerms(made))
        model.load()
        models.append(model)
        return model

    yield make
    for model in models:
        model.close()


@pytest.mark.matrix
def test_requests_of_both_kinds_share_batches(load: Load, device: SessionDevice, tmp_path: Path) -> None:
    model = load(onnx_models.affine(tmp_path), lanes=2, limits=Limits(max_batch=8))
    assert model.direct == Direct({"x": "fake:0"}, {"y": "fake:0", "z": "fake:0"})
    places: dict[int, tuple[Target, Array]] = {}

    def inputs(number: int) -> dict[str, Any]:
        """Return an input on the host or the device, with a place for an output or without."""
        array: Any = np.full((1 + number % 3, 3), number, np.float32)
        nbytes = array.nbytes
        if number % 2:
            array = shared(device, array)
        if number % 5:
            return {"x": array}
        places[number] = target(device, nbytes)
        return TargetedInputs({"x": array}, {"y": places[number][0]})

    async def ask() -> list[Any]:
        return await asyncio.gather(*(model.infer(inputs(number)) for number in range(200)))

    for number, answer in enumerate(asyncio.run(ask())):
        shape, wanted = (1 + number % 3, 3), 2 * number + 1
        assert answer["y"].shape == shape
        assert (answer["z"] == -number).all()
        if number % 5 == 0:
            place, memory = places[number]
            assert place.done
            device.touch(span_of(memory), writes=False)
            assert values(memory) == [wanted] * 3 * shape[0]
        else:
            assert (answer["y"] == wanted).all()
    places.clear()
    del place
    assert device.acrosses >= 100 + 40
    assert not device.early
    assert not mapped(device)


@pytest.mark.matrix
def test_a_request_of_several_batches(load: Load, device: SessionDevice, tmp_path: Path) -> None:
    model = load(onnx_models.affine(tmp_path), lanes=2, limits=Limits(max_batch=4))
    large = np.arange(60, dtype=np.float32).reshape(20, 3)
    place, _ = target(device, large.nbytes)
    answer = asyncio.run(model.infer(TargetedInputs({"x": shared(device, large)}, {"y": place})))
    np.testing.assert_array_equal(answer["y"], 2 * large + 1)
    assert not place.done  # its parts are joined on the host
    assert device.acrosses == 5


@pytest.mark.matrix
def test_values_that_an_engine_rejects_fail_their_request_only(
    load: Load, device: SessionDevice, tmp_path: Path
) -> None:
    model = load(onnx_models.embedding(tmp_path), lanes=1, limits=Limits(max_batch=8))

    async def ask() -> list[Any]:
        ids = [shared(device, np.array([[number]])) for number in (1, 10, 2)]
        return await asyncio.gather(*(model.infer({"ids": each}) for each in ids), return_exceptions=True)

    good, bad, other = asyncio.run(ask())
    assert good["y"].tolist() == [[[2, 3]]]
    assert isinstance(bad, InvalidArgument)
    assert other["y"].shape == good["y"].shape
    assert not device.early


@pytest.mark.matrix
def test_what_cannot_stay_on_a_device(load: Load, device: SessionDevice, tmp_path: Path) -> None:
    array = shared(device, X)
    elsewhere = FakeDevice()
    elsewhere.name = "fake:1"
    other = shared(elsewhere, X)
    found = reachable({"a": array, "b": array, "c": other, "d": X}, {"a": "fake:0", "c": "fake:0"})
    assert found["a"] is array
    assert found["d"] is X
    for name in "bc":
        np.testing.assert_array_equal(found[name], X)
    model = load(onnx_models.affine(tmp_path), cache_bytes=1 << 20)
    assert model.direct == Direct()  # values are compared
    asyncio.run(model.drain())
    assert model.direct == Direct()


# The driver.


@pytest.mark.matrix
def test_the_driver_maps_memory_of_others_and_copies_within_a_gpu() -> None:
    library = SharedGpu()
    gpu = CudaDevice(library, 0)
    library._cuCtxSetCurrent(gpu._context)
    memory = np.arange(6, dtype=np.float32)
    handle = library.export(memory.ctypes.data, memory.nbytes)
    block = SharedBlock(gpu, handle, 24)
    np.testing.assert_array_equal(np.asarray(block.array(4, (2,), memory.dtype)), [1, 2])
    block.write(0, np.full(2, 9, np.float32).tobytes())
    assert memory.tolist() == [9, 9, 2, 3, 4, 5]
    stream = gpu.stream()
    block.array(8, (2,), memory.dtype).copy_to(block.address, gpu, stream)
    assert memory.tolist() == [2, 3, 2, 3, 4, 5]
    gpu.close_stream(stream)
    assert library.mapped
    del block
    assert not library.mapped
    assert not library.handles
    with pytest.raises(InvalidArgument, match="fewer than the 25"):
        SharedBlock(gpu, handle, 25)
    with pytest.raises(InvalidArgument, match="error 1 in cuIpcOpenMemHandle"):
        SharedBlock(gpu, bytes(HANDLE_BYTES), 1)
    library.failing = {"cuMemGetAddressRange_v2": 1}
    with pytest.raises(InternalError, match="cuMemGetAddressRange"):
        SharedBlock(gpu, handle, 24)
    library.failing = {}
    assert not library.mapped
    assert gpu.lost == ""
