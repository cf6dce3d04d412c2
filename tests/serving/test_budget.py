"""Models beyond the memory budget leave, and are loaded again when a request comes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import ingot
from ingot import RunningServer
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument, Unavailable
from ingot.model_store import Store
from ingot.runtime import LoadSpec, Metrics, Model, ModelSource, ServingTerms, Settings, State, single_variant
from ingot.serving import residency
from ingot.serving.loading import load_model
from ingot.serving.residency import Residency
from tests import onnx_models
from tests.runtime.fake_engines import FunctionEngine
from tests.server.outside import wait_until
from tests.serving.rolling import X, archive
from tests.support import RunIngot, succeeded

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))


def large(folder: Path, factor: float, mib: int = 24) -> Path:
    """Write a model of y = factor * x whose weights take so much memory, and return its file."""
    weights = np.zeros((mib * MIB // 4 // 4, 4), np.float32)
    weights[0] = factor
    nodes = [
        helper.make_node("Gather", ["weights", "first"], ["factor"]),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    constants = [numpy_helper.from_array(weights, "weights"), numpy_helper.from_array(np.array(0), "first")]
    path, shape, kind = folder / f"m{factor:g}.onnx", ("batch", 4), TensorProto.FLOAT
    return onnx_models.save(path, nodes, [("x", kind, shape)], [("y", kind, shape)], constants)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[int, Path]:
    """Four models; two of them are within 64 MiB."""
    folder = tmp_path_factory.mktemp("models")
    return {factor: large(folder, factor) for factor in (1, 2, 3, 4)}


def states(server: RunningServer) -> dict[str, str]:
    return {each["name"]: each["state"] for each in server.status()}


def metric(server: RunningServer, name: str) -> float:
    """Return the sum of a metric over its labels."""
    text = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"{name}{{"))


@pytest.mark.matrix
def test_requests_wait_until_their_model_is_in_memory(models: Mapping[int, Path]) -> None:
    def ask(seed: int) -> int:
        """Ask models at random, and return how many answers were right."""
        chosen = random.Random(seed)
        with ingot.Client(server.http_url if seed % 2 else server.grpc_url) as client:
            factors = [chosen.choice([1, 1, 1, 2, 2, 3, 4]) for _ in range(15)]
            return sum(np.allclose(client.infer(f"m{factor}", {"x": X})["y"], factor * X) for factor in factors)

    sources = [str(path) for path in models.values()]
    with ingot.serve(*sources, memory_budget="64MiB", **FREE) as server:
        assert sorted(states(server).values()) == ["ready", "ready", "unloaded", "unloaded"]
        with ingot.Client(server.http_url) as client:
            assert client.ready()
            assert client.metadata("m1")["inputs"][0]["name"] == "x"
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(ask, range(4))) == 60
        assert list(states(server).values()).count("ready") == 2
        assert metric(server, "ingot_model_evictions_total") > 4
        assert metric(server, "ingot_demand_waits_total") > 4
        assert metric(server, "ingot_memory_budget_bytes") == 64 * MIB
        assert 40 * MIB < metric(server, "ingot_model_memory_bytes") < 64 * MIB
        assert metric(server, "ingot_model_ready") == 4


@pytest.mark.matrix
def test_the_least_recently_used_leaves(models: Mapping[int, Path], run_ingot: RunIngot) -> None:
    with (
        ingot.serve(*map(str, models.values()), memory_budget="64MiB", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        for factor in (1, 2, 1, 3):
            client.infer(f"m{factor}", {"x": X})
        assert states(server) == {"m1": "ready", "m2": "unloaded", "m3": "ready", "m4": "unloaded"}
        statistics = httpx.get(f"{server.http_url}/v2/models/m2/stats", trust_env=False).json()
        assert statistics["model_stats"][0]["inference_count"] == 1
        shown = succeeded(run_ingot("server", "status"))
        assert "m2:1  unloaded" in shown
        assert "it is loaded when a request comes (memory budget)" in shown
        assert "m1.onnx  24" in shown
        assert " MiB of cpu" in shown


@pytest.mark.matrix
def test_a_response_from_the_cache_is_a_use(models: Mapping[int, Path]) -> None:
    sources = [str(path) for path in models.values()]
    with (
        ingot.serve(*sources, memory_budget="64MiB", cache="1MiB", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        for factor in (1, 2, 1, 3):
            client.infer(f"m{factor}", {"x": X})
        assert states(server) == {"m1": "ready", "m2": "unloaded", "m3": "ready", "m4": "unloaded"}
        assert metric(server, "ingot_cache_hits_total") == 1
        for factor in (2, 4, 1):  # whose cache was dropped
            assert np.allclose(client.infer(f"m{factor}", {"x": X})["y"], factor * X)
        statistics = httpx.get(f"{server.http_url}/v2/models/m1/stats", trust_env=False).json()
        counted = statistics["model_stats"][0]["inference_stats"]
        assert (counted["cache_hit"]["count"], counted["cache_miss"]["count"]) == (1, 2)


@pytest.mark.matrix
def test_a_deadline_that_is_too_short(models: Mapping[int, Path]) -> None:
    with (
        ingot.serve(*map(str, models.values()), memory_budget="64MiB", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        body = {
            "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": X.ravel().tolist()}],
            "parameters": {"timeout": 1},
        }
        client.infer("m3", {"x": X})
        client.infer("m4", {"x": X})
        refused = httpx.post(f"{server.http_url}/v2/models/m1/infer", json=body, trust_env=False)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert "is not in memory, and loading it takes" in refused.json()["error"]
        assert states(server)["m1"] == "unloaded"


@pytest.mark.matrix
def test_what_does_not_fit(models: Mapping[int, Path], tmp_path: Path, run_ingot: RunIngot) -> None:
    with pytest.raises(Unavailable, match=r"takes 24.* of memory; the budget of the cpu is 16 MiB. Raise --memory"):
        ingot.serve(str(models[1]), memory_budget="16MiB", **FREE)
    with pytest.raises(InvalidArgument, match="memory_budget is 'much': it must be a size: 4GB"):
        ingot.serve(str(models[1]), memory_budget="much", **FREE)
    assert ServerConfig.of({"memory_budget": "cpu=1GB,cuda=2GiB"}).memory_by_device == {
        "cpu": 10**9,
        "cuda": 2 << 30,
    }
    served = tmp_path / "m.onnx"
    served.write_bytes(models[1].read_bytes())
    with (
        ingot.serve(str(served), memory_budget="40MiB", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        new = tmp_path / "new.onnx"
        new.write_bytes(models[2].read_bytes())
        new.replace(served)
        result = run_ingot("server", "reload")
        assert result.returncode == 1
        [status] = server.status()
        assert "of the one that answers; the budget of the cpu is 40 MiB" in status["update_failed"]
        assert "unload the model first" in status["update_failed"]
        assert np.allclose(client.infer("m", {"x": X})["y"], X)


@pytest.mark.matrix
def test_changes_of_a_model_that_is_not_in_memory(
    models: Mapping[int, Path], tmp_path: Path, run_ingot: RunIngot
) -> None:
    store = Store(tmp_path / "store")
    for version, factor in ((1, 2.0), (2, 3.0)):
        nodes = [helper.make_node("Mul", ["x", "factor"], ["y"])]
        store.push(
            archive(nodes, [numpy_helper.from_array(np.array(factor, np.float32), "factor")], factor * X),
            f"times:{version}",
        )
    store.promote("times:1", "prod")
    with (
        ingot.serve("times:prod", *map(str, models.values()), store=store, memory_budget="64MiB", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        for factor in (3, 4):
            client.infer(f"m{factor}", {"x": X})
        wait_until(lambda: states(server)["m1"] == "unloaded")
        succeeded(run_ingot("server", "unload", "m1"))
        assert httpx.get(f"{server.http_url}/v2/models/m1/ready", trust_env=False).status_code == 404
        succeeded(run_ingot("server", "load", "m1"))
        assert np.allclose(client.infer("m1", {"x": X})["y"], X)
        store.promote("times:2", "prod")
        wait_until(lambda: np.allclose(client.infer("times", {"x": X})["y"], 3 * X))


@pytest.mark.matrix
def test_a_model_that_cannot_be_loaded_again(models: Mapping[int, Path], tmp_path: Path) -> None:
    served = tmp_path / "m.onnx"
    served.write_bytes(models[1].read_bytes())
    with (
        ingot.serve(str(served), str(models[2]), memory_budget="40MiB", **FREE) as server,
        ingot.Client(server.http_url) as client,
    ):
        client.infer("m2", {"x": X})
        os.truncate(served, 1000)
        for _ in range(2):  # the second is refused at once
            with pytest.raises(Unavailable, match="model 'm' could not be loaded"):
                client.infer("m", {"x": X})
        assert np.allclose(client.infer("m2", {"x": X})["y"], 2 * X)


class SlowModel:
    """A model of y = 2 * x; while ``slow`` is true, its load waits for ``gate``, and ``on_wait`` is called there."""

    def __init__(self) -> None:
        self.slow, self.gate = False, threading.Event()
        self.on_wait: Callable[[], object] = dict  # nothing is done
        self.engines: list[FunctionEngine] = []
        form = LoadSpec(self._open)
        settings = Settings(warm_time=0, load_timeout=300)
        self.model = Model("m", "1", ModelSource(single_variant(form, settings)), ServingTerms(settings))

    def _open(self, device: str, threads: int) -> FunctionEngine:
        if self.slow:
            self.on_wait()
            assert self.gate.wait(60)
        self.engines.append(FunctionEngine())
        return self.engines[-1]

    async def answer(self) -> list[list[float]]:
        found: list[list[float]] = (await self.model.infer({"x": np.ones((1, 2), np.float32)}))["y"].tolist()
        return found

    async def end_load(self) -> None:
        """Let the load that waits continue, until its thread has ended."""
        self.slow = False
        self.gate.set()
        for thread in threading.enumerate():
            if thread.name == "ingot-load-m":
                await asyncio.to_thread(thread.join, 60)


@pytest.fixture
def expire(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that lets the time limit of the last load expire; it may be called in any thread."""
    scopes: list[tuple[asyncio.AbstractEventLoop, asyncio.Timeout]] = []
    timeout = asyncio.timeout

    def kept(limit: float | None) -> asyncio.Timeout:
        scopes.append((asyncio.get_running_loop(), timeout(None)))
        return scopes[-1][1]

    def expire() -> None:
        loop, scope = scopes[-1]
        loop.call_soon_threadsafe(lambda: scope.reschedule(loop.time()))

    monkeypatch.setattr(asyncio, "timeout", kept)
    monkeypatch.setattr(residency, "_PAUSE", 0.0)
    return expire


@pytest.mark.matrix
async def test_a_load_for_a_request_that_took_too_long_once(expire: Any) -> None:
    slow = SlowModel()
    model, repository = slow.model, SimpleNamespace(metrics=Metrics(), deployments={})
    residents = Residency(repository, {"cpu": 1 << 50}, asyncio.Lock())  # type: ignore[arg-type]
    await residents.load(model, "start")
    await residents._park(model)

    slow.slow, slow.on_wait = True, expire
    with pytest.raises(Unavailable, match=r"could not be loaded: .* was not ready within 5m: it was loading"):
        await slow.answer()
    assert (model.state, model.parked, model.ready) == (State.UNLOADED, True, True)
    assert model.reason == "its load took longer than 5m"
    with pytest.raises(Unavailable, match=r"an earlier load of model 'm' version 1, .* has not ended; try again"):
        await slow.answer()
    assert (model.state, model.parked, len(slow.engines)) == (State.UNLOADED, True, 1)

    await slow.end_load()
    assert (model.state, model.parked, slow.engines[1].closed) == (State.UNLOADED, True, True)
    assert await slow.answer() == [[2, 2]]
    assert (model.state, len(slow.engines), slow.engines[2].closed) == (State.READY, 3, False)
    model.close()


async def test_a_load_that_is_cancelled_closes_its_engines() -> None:
    slow, waits = SlowModel(), asyncio.Event()
    loop = asyncio.get_running_loop()
    slow.slow, slow.on_wait = True, lambda: loop.call_soon_threadsafe(waits.set)
    task = asyncio.create_task(load_model(slow.model))
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await slow.end_load()
    assert (slow.model.state, slow.engines[0].closed) == (State.UNLOADED, True)


async def test_a_load_that_is_ready_when_its_time_ends_is_used(expire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowModel()
    load = slow.model.load

    def loaded(*args: Any, **options: Any) -> None:
        load(*args, **options)
        expire()
        assert slow.gate.wait(60)

    monkeypatch.setattr(slow.model, "load", loaded)
    await load_model(slow.model, parkable=True)
    assert await slow.answer() == [[2, 2]]
    await slow.end_load()
    assert slow.model.state is State.READY
    slow.model.close()
