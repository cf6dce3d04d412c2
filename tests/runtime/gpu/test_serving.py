"""Models served by engines in pipelines on fake devices."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot.errors import EngineLost, InvalidArgument, TooLarge, Unavailable
from ingot.runtime import EngineSpec, Limits, Metrics, Model, ModelSource, ServingTerms, Settings
from ingot.runtime.engines import loader
from ingot.tensors import Array
from tests import onnx_models
from tests.runtime.gpu.pipelined import SessionDevice, pipelined

pytestmark = pytest.mark.matrix  # against a fake device, until they have run on a GPU

Serve = Callable[..., Model]
# In batches of one sample, these run on all workers at once.
PARTS = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [12, 3], "data": [[1, 2, 3]] * 12}]}


@pytest.fixture
def devices() -> list[SessionDevice]:
    return [SessionDevice(), SessionDevice()]


@pytest.fixture
def opened(devices: list[SessionDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines run on the fake devices, by the index of the setting."""

    def open_engine(spec: EngineSpec) -> Any:
        return pipelined(spec.path, devices[int(spec.device.partition(":")[2])])

    monkeypatch.setattr(loader, "open_engine", open_engine)


@pytest.fixture
def serve(opened: None, tmp_path: Path) -> Serve:
    def load(metrics: Metrics | None = None, **settings: Any) -> Model:
        chosen: dict[str, Any] = {"warm_time": 0, "isolate": "none", "device": "fake:0", **settings}
        made = Settings(**chosen)
        source = ModelSource.of_file(onnx_models.affine(tmp_path), made, "m")
        model = Model("m", "1", source, ServingTerms(made), metrics)
        model.load()
        return model

    return load


def row(number: int) -> dict[str, Array]:
    return {"x": np.full((1, 3), number, np.float32)}


async def ask(model: Model, count: int) -> list[Any]:
    """Return the first value of each answer, which is 2 * number + 1, or the error."""
    answers = await asyncio.gather(*(model.infer(row(number)) for number in range(count)), return_exceptions=True)
    return [each if isinstance(each, BaseException) else float(each["y"][0, 0]) for each in answers]


def right(count: int) -> list[float]:
    return [2.0 * number + 1 for number in range(count)]


@pytest.mark.parametrize("build", [onnx_models.embedding, onnx_models.lookup])
def test_indices_that_a_gpu_would_not_refuse_are_noted_or_checked(
    opened: None, tmp_path: Path, caplog: pytest.LogCaptureFixture, build: Callable[[Path], Path]
) -> None:
    settings = Settings(warm_time=0, isolate="none", device="fake:0")
    model = Model("m", "1", ModelSource.of_file(build(tmp_path), settings, "m"), ServingTerms(settings))
    model.load()
    noted = "a GPU does not refuse indices out of range, and the values of ids are not checked"
    assert (noted in caplog.text) is (build is onnx_models.embedding)
    with pytest.raises(InvalidArgument, match="10"):
        asyncio.run(model.infer({"ids": np.array([[10]])}))
    model.close()


@pytest.mark.matrix
def test_a_model_has_a_worker_for_each_lane_of_each_device(serve: Serve, devices: list[SessionDevice]) -> None:
    model = serve(device="fake:0,1", instances=2, lanes=3, limits=Limits(max_batch=4))
    assert len(model.workers) == 12
    assert model.instances == 4
    assert model.engine_settings["instances"] == "4"
    assert model.engine_settings["lanes"] == "3"
    assert asyncio.run(ask(model, 300)) == right(300)
    assert all(device.pinned for device in devices)
    model.close()


def test_unloading_returns_the_memory(serve: Serve, devices: list[SessionDevice]) -> None:
    device = devices[0]
    free = device.memory, device.pinnable
    model = serve(lanes=3)
    assert asyncio.run(ask(model, 20)) == right(20)
    assert device.memory < free[0]
    model.close()
    gc.collect()
    assert (device.memory, device.pinnable) == free


def test_a_batch_without_memory_runs_in_parts_and_later_batches_are_smaller(
    serve: Serve, devices: list[SessionDevice], caplog: pytest.LogCaptureFixture
) -> None:
    devices[0].memory = 4096  # 341 samples of 12 bytes
    metrics = Metrics()
    model = serve(metrics, lanes=1, limits=Limits(max_batch=512))
    assert asyncio.run(ask(model, 512)) == right(512)
    assert 'ingot_batches_out_of_memory_total{model="m",version="1"} 1.0' in metrics.render().decode()
    assert "too little memory for a batch of 512 samples; batches have at most 256 for 10s" in caplog.text
    assert asyncio.run(ask(model, 512)) == right(512)
    assert 'ingot_batches_out_of_memory_total{model="m",version="1"} 1.0' in metrics.render().decode()
    assert 'ingot_batch_size_bucket{le="256.0",model="m",version="1"} 2.0' in metrics.render().decode()
    model.close()


def test_a_request_without_memory_fails_alone(serve: Serve, devices: list[SessionDevice]) -> None:
    devices[0].memory = 4096
    model = serve(lanes=2, limits=Limits(max_batch=512))

    async def work() -> None:
        large = asyncio.create_task(model.infer({"x": np.zeros((512, 3), np.float32)}))
        assert await ask(model, 5) == right(5)
        with pytest.raises(TooLarge, match="little memory"):
            await large
        assert await ask(model, 5) == right(5)

    asyncio.run(work())
    model.close()


def test_a_failed_device_gets_no_more_batches_and_without_any_the_model_fails(
    serve: Serve, devices: list[SessionDevice]
) -> None:
    metrics = Metrics()
    model = serve(metrics, device="fake:0,1", lanes=2, limits=Limits(max_batch=2))

    async def work() -> None:
        assert await ask(model, 40) == right(40)
        devices[1].fail("error 700")
        answers = await ask(model, 40)
        lost = [answer for answer in answers if isinstance(answer, EngineLost)]
        assert 0 < len(lost) <= 4
        assert all(answer == wanted for answer, wanted in zip(answers, right(40), strict=True) if answer not in lost)
        assert await ask(model, 40) == right(40)
        assert model.ready
        devices[0].fail("error 719")
        answers = await ask(model, 40)
        assert all(isinstance(answer, Unavailable) for answer in answers)
        assert not model.ready
        assert not model.loaded
        assert "error 719" in model.reason
        with pytest.raises(Unavailable):
            await model.infer(row(1))

    asyncio.run(work())
    assert 'ingot_lost_devices{device="cpu:0"} 1.0' in metrics.render().decode()
    model.close()


@pytest.mark.matrix
@pytest.mark.usefixtures("opened")
def test_over_http_and_grpc_until_the_last_device_fails(devices: list[SessionDevice], tmp_path: Path) -> None:
    path = str(onnx_models.affine(tmp_path))
    settings: dict[str, Any] = {"device": "fake:0,1", "max_batch": 1, "isolate": "none", "http_port": 0, "grpc_port": 0}
    with ingot.serve(path, **settings) as server, httpx.Client(base_url=server.http_url, trust_env=False) as http:

        def request(number: int) -> float:
            with ingot.Client(server.http_url if number % 2 else server.grpc_url) as client:
                return float(client.infer("affine", row(number))["y"][0, 0])

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(request, range(40))) == right(40)
        assert server.status()[0]["device"] == "cpu:0"  # the fake device's memory, by ONNX Runtime's name
        for device, ready in zip(devices, (200, 503), strict=True):
            assert http.post("/v2/models/affine/infer", json=PARTS).status_code == 200
            device.fail("error 700")
            assert http.post("/v2/models/affine/infer", json=PARTS).status_code == 503
            assert http.get("/v2/health/ready").status_code == ready
        assert http.get("/v2/health/live").status_code == 200
        assert 'ingot_lost_devices{device="cpu:0"} 1.0' in http.get("/metrics").text


def test_an_engine_behind_a_proxy_stays_there(
    devices: list[SessionDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lanes of an engine are those of what stands for it, except the first."""
    calls: list[int] = []

    class Proxy:
        def __init__(self, engine: Any):
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def run(self, inputs: dict[str, Array]) -> Any:
            calls.append(len(inputs["x"]))
            return self._engine.run(inputs)

    monkeypatch.setattr(loader, "open_engine", lambda spec: Proxy(pipelined(spec.path, devices[0])))
    settings = Settings(warm_time=0, isolate="none", lanes=2, limits=Limits(max_batch=4))
    source = ModelSource.of_file(onnx_models.affine(tmp_path), settings, "m")
    model = Model("m", "1", source, ServingTerms(settings))
    model.load()
    assert len(model.workers) == 2
    calls.clear()
    assert asyncio.run(ask(model, 200)) == right(200)
    assert 0 < sum(calls) < 200
    model.close()
