"""CUDA shared memory of models in lanes, over HTTP and gRPC, with tritonclient and a fake device."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.model_store.format import goldens
from ingot.protocol.regions import Place
from ingot.runtime.engines import loader
from ingot.runtime.gpu import device_tensors
from ingot.runtime.machine import devices
from ingot.server.triton import cuda_memory
from ingot.server.triton.cuda_memory import CudaRegion
from ingot.tensors import DType
from tests import onnx_models
from tests.runtime.gpu.fake_device import span_of
from tests.runtime.gpu.pipelined import SessionDevice, pipelined
from tests.runtime.gpu.test_array import OnGpu, mapped, values
from tests.server.extensions.conftest import clients
from tests.server.outside import wait_until


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SessionDevice]:
    """The only GPU of the machine."""
    made = SessionDevice()
    monkeypatch.setattr(devices, "has_cuda", lambda: True)
    monkeypatch.setattr(devices, "gpu_count", lambda: 1)
    monkeypatch.setattr(loader, "open_engine", lambda spec: pipelined(spec.path, made))
    for module in (cuda_memory, device_tensors):
        monkeypatch.setattr(module, "open_device", lambda name: made)
    yield made
    device_tensors._arrivals.cache_clear()


@pytest.fixture
def server(device: SessionDevice, tmp_path: Path) -> Iterator[RunningServer]:
    path = str(onnx_models.affine(tmp_path))
    settings: dict[str, Any] = {"device": "fake:0", "isolate": "none", "shared_memory": "*", "lanes": 2, "max_batch": 8}
    with ingot.serve(path, http_port=0, grpc_port=0, **settings) as running:
        yield running


@pytest.mark.matrix
def test_tensors_of_clients_stay_on_the_device(server: RunningServer, device: SessionDevice) -> None:
    """Requests with tensors there and in the message share batches; an output in a region is there with the answer."""
    numbers = itertools.count(1)

    def ask(protocol: str) -> None:
        pair = clients(server)
        triton = next(pair)[protocol]
        for number in itertools.islice(numbers, 12):
            samples = 1 + number % 3
            given = np.full((samples, 3), number, np.float32)
            handle = device.share(np.concatenate([given, np.zeros_like(given)]))
            memory = device.shared[int.from_bytes(handle, "little")]
            name, size = f"r{number}", given.nbytes
            triton.client.register_cuda_shared_memory(name, base64.b64encode(handle), 0, 2 * size)
            x = triton.shared("x", list(given.shape), "FP32", name, size) if number % 2 else triton.input("x", given)
            y = triton.output("y")
            if number % 4 < 2:
                y.set_shared_memory(name, size, size)
            answer = triton.infer("affine", [x], [y, triton.output("z")])
            assert (answer.as_numpy("z") == -number).all()
            if number % 4 < 2:
                device.touch(span_of(memory[size:]), writes=False)
                assert values(memory[size:]) == [2 * number + 1] * 3 * samples
            else:
                assert answer.as_numpy("y").tolist() == [[2 * number + 1] * 3] * samples
            triton.client.unregister_cuda_shared_memory(name)
        pair.close()  # type: ignore[attr-defined]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, ["http", "grpc"] * 2))
    assert device.acrosses == 24 + 24  # of 48 requests, half of the inputs and half of the outputs
    wait_until(lambda: not mapped(device))
    assert not device.early


def test_inputs_and_targets_keep_the_memory_of_a_region(device: SessionDevice) -> None:
    """A request may be over, by its timeout, while its batch runs."""
    place = Place("r", 0, 12)
    uses: list[Callable[[CudaRegion], object]] = [
        lambda region: region.array(place, DType.FP32, (1, 3)),
        lambda region: region.target(place),
    ]
    for use in uses:
        region = CudaRegion(device.share(np.ones((1, 3), np.float32)), 0, 12)
        kept = use(region)
        del region
        assert mapped(device)
        del kept
        assert not mapped(device)


def test_tensors_of_the_servers_own_process_stay_on_the_device(server: RunningServer, device: SessionDevice) -> None:
    for number in range(5):
        tensor = OnGpu(device, np.full((2, 3), number, np.float32))
        assert server.infer("affine", {"x": tensor})["y"].tolist() == [[4 * number + 1] * 3] * 2
    assert device.acrosses == 5
    assert len(device._events) == 2 * 3  # those of the lanes


def test_a_recorder_gets_copies_on_the_host(device: SessionDevice, tmp_path: Path) -> None:
    path = str(onnx_models.affine(tmp_path))
    settings: dict[str, Any] = {"device": "fake:0", "isolate": "none", "record": tmp_path / "rec", "record_share": 1.0}
    with ingot.serve(path, http_port=0, grpc_port=0, **settings) as server:
        answer = server.infer("affine", {"x": OnGpu(device, np.ones((1, 3), np.float32))})
        assert answer["y"].tolist() == [[5] * 3]
    assert device.acrosses == 0
    (file,) = (tmp_path / "rec").rglob("*.safetensors")
    (case,) = goldens.decode(file.read_bytes())
    assert case.inputs["x"].tolist() == [[2] * 3]
