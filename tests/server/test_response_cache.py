"""Equal requests are answered from memory, by the model that answers now, and within the bound."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.utils.shared_memory as shm
from onnx import TensorProto, helper

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from ingot.model_store import Store
from ingot.runtime.dispatch.response_cache import LARGEST_INPUTS, ResponseCache, digest_of
from ingot.tensors import Array, DType
from tests import onnx_models
from tests.server.gates import Gate, hold
from tests.server.outside import wait_until
from tests.server.test_recorder import cases
from tests.server.test_statistics import client as triton_client
from tests.server.test_statistics import statistics
from tests.serving.rolling import X, load, times
from tests.support import RunIngot, succeeded

FREE: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "device": "cpu"}
ROW = np.array([[1, -2, 0.1]], np.float32)


def metric(server: RunningServer, name: str) -> float:
    text = httpx.get(f"{server.http_url}/metrics", trust_env=False, timeout=60).text
    return sum(map(float, re.findall(rf"^ingot_cache_{name}{{.*}} (\S+)$", text, re.MULTILINE)))


def counts(server: RunningServer) -> tuple[float, float]:
    return metric(server, "hits_total"), metric(server, "misses_total")


def calls(server: RunningServer, name: str) -> int:
    return int(statistics(server, "http", name)[0]["execution_count"])


@pytest.mark.matrix
def test_equal_requests_are_answered_without_the_engine(tmp_path: Path) -> None:
    path = onnx_models.affine(tmp_path)
    with (
        ingot.serve(str(path), cache="1MiB", **FREE) as server,
        ingot.Client(server.http_url) as http,
        ingot.Client(server.grpc_url) as grpc,
    ):
        first = http.infer("affine", {"x": ROW})
        answers = [client.infer("affine", {"x": ROW}, binary=raw) for client in (http, grpc) for raw in (True, False)]
        for answer in answers:
            assert {name: each.tobytes() for name, each in answer.items()} == {
                name: each.tobytes() for name, each in first.items()
            }
        assert [*grpc.infer("affine", {"x": ROW}, outputs=["z"])] == ["z"]
        assert (calls(server, "affine"), *counts(server)) == (1, 5, 1)
        http.infer("affine", {"x": -ROW})
        for protocol in ("http", "grpc"):
            [found] = statistics(server, protocol, "affine")
            counted = {name: int(each.get("count", 0)) for name, each in found["inference_stats"].items()}
            assert (counted["success"], counted["cache_hit"], counted["cache_miss"]) == (7, 5, 2)
            assert (int(found["inference_count"]), int(found["execution_count"])) == (2, 2)
            assert int(found["inference_stats"]["cache_miss"]["ns"]) > 0
            asked = triton_client(server, protocol)
            config = asked.get_model_config("affine", **({} if protocol == "http" else {"as_json": True}))
            assert config.get("config", config)["response_cache"] == {"enable": True}
            asked.close()
        assert 1000 < metric(server, "bytes") < 4000
        assert http.metadata("affine")["properties"]["response_cache"] == "1 MiB"


@pytest.mark.matrix
def test_a_replaced_model_never_answers(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    for version in (1, 2):
        store.push(times(version), f"times:{version}")
    store.promote("times:1", "prod")
    with ingot.serve("times:prod", store=store, cache="1MiB", **FREE) as server:
        held = server.rollouts.repository.held
        with load([server.http_url, server.grpc_url]) as clients:
            for version in (2, 1, 2):
                store.promote(f"times:{version}", "prod")
                wait_until(lambda: all(c.seen[-1] == version or c.failure for c in clients))  # noqa: B023
        assert [client.seen for client in clients] == [[1, 2, 1, 2]] * len(clients)
        assert counts(server)[1] >= 4
        wait_until(lambda: len(held) == 1)
        with ingot.Client(server.http_url) as http, ingot.Client(server.grpc_url) as grpc:
            before = counts(server)
            for client in (http, grpc, http):
                assert np.array_equal(client.infer("times", {"x": X}, version="prod")["y"], 2 * X)
            assert counts(server)[0] - before[0] >= 2
        gc.collect()
        [cache] = [each for each in gc.get_objects() if type(each) is ResponseCache]
        assert metric(server, "bytes") == cache.nbytes > 0


@pytest.mark.matrix
def test_the_cache_keeps_to_its_bound_and_drops_the_least_recently_used(tmp_path: Path) -> None:
    path = onnx_models.identity(tmp_path, DType.FP32)
    with (
        ingot.serve(str(path), cache="1MiB", **FREE, max_batch=1 << 20) as server,
        ingot.Client(server.grpc_url) as client,
    ):

        def ask(number: int, rows: int = 10_000) -> tuple[float, float]:
            """Return how often a request of 80 kB, or another size, was a hit and a miss."""
            sent = np.full((rows, 2), number, np.float32)
            before = counts(server)
            assert client.infer("identity-fp32", {"x": sent})["y"].tobytes() == sent.tobytes()
            hits, misses = counts(server)
            return hits - before[0], misses - before[1]

        assert [ask(number) for number in range(12)] == [(0, 1)] * 12
        assert metric(server, "evictions_total") == 0
        assert ask(0) == (1, 0)
        assert ask(12) == (0, 1)
        assert metric(server, "evictions_total") == 1
        assert 900_000 < metric(server, "bytes") <= 1 << 20
        assert (ask(0), ask(2), ask(1)) == ((1, 0), (1, 0), (0, 1))
        held = metric(server, "bytes")
        assert (ask(0, 15_000), ask(0, 15_000)) == ((0, 1), (0, 1))  # over a tenth of the bound
        assert metric(server, "bytes") == held
        large = LARGEST_INPUTS // 8 + 1
        assert ask(0, large) == (0, 0)
        assert ask(0) == (1, 0)


@pytest.mark.matrix
def test_errors_and_texts(tmp_path: Path) -> None:
    models = [onnx_models.embedding(tmp_path), onnx_models.identity(tmp_path, DType.BYTES)]
    with ingot.serve(*map(str, models), cache="1MiB", **FREE) as server, ingot.Client(server.http_url) as client:
        for _ in range(2):
            with pytest.raises(InvalidArgument):
                client.infer("embedding", {"ids": np.array([[99]])})
            with pytest.raises(InvalidArgument, match="datatype FP32, the model takes INT64"):
                client.infer("embedding", {"ids": np.array([[1]], np.float32)})
        assert (calls(server, "embedding"), *counts(server)) == (2, 0, 2)
        for texts in ([b"ab", b"c"], [b"a", b"bc"], [b"ab", b"c"]):
            sent = np.array([texts], object)
            for raw in (True, False):
                assert client.infer("identity-bytes", {"x": sent}, binary=raw)["y"].tolist() == [texts]
        assert counts(server) == (4, 4)


@pytest.mark.matrix
def test_classes_shared_memory_and_recordings_of_cached_responses(tmp_path: Path) -> None:
    path, region = onnx_models.affine(tmp_path), f"/ingot-cache-{os.getpid()}"
    settings: dict[str, Any] = {"shared_memory": "ingot-*", "record": tmp_path / "record", "record_share": 1.0, **FREE}
    memory = shm.create_shared_memory_region("r", region, 24)
    try:
        with ingot.serve(str(path), cache="1MiB", **settings) as server:
            asked = triton.InferenceServerClient(server.http_url.partition("://")[2])
            asked.register_system_shared_memory("r", region, 24)
            given, classes, placed = (
                triton.InferInput("x", [1, 3], "FP32"),
                triton.InferRequestedOutput("y", class_count=2),
                triton.InferRequestedOutput("y"),
            )
            placed.set_shared_memory("r", 12, offset=12)
            given.set_shared_memory("r", 12)
            for sent in (ROW, ROW, -ROW, ROW):  # the values count, not their place
                shm.set_shared_memory_region(memory, [sent])
                asked.infer("affine", [given], outputs=[placed])
                assert np.array_equal(shm.get_contents_as_numpy(memory, np.float32, [1, 3], 12), 2 * sent + 1)
            found = [asked.infer("affine", [given], outputs=[classes]).as_numpy("y").tolist() for _ in range(2)]
            assert found == [[[b"3.000000:0", b"1.200000:2"]]] * 2
            asked.close()
            assert (calls(server, "affine"), *counts(server)) == (2, 4, 2)
    finally:
        shm.destroy_shared_memory_region(memory)
    recorded = cases(tmp_path / "record" / "affine" / "1")
    assert len(recorded) == 6
    assert all(np.array_equal(case.outputs["z"], -case.inputs["x"]) for case in recorded)


@pytest.mark.matrix
def test_random_and_stateful_models_are_not_cached(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, shape = TensorProto.FLOAT, ("batch", 3)
    node = helper.make_node("RandomNormalLike", ["x"], ["y"], name="noise")
    noise = onnx_models.save(tmp_path / "noise.onnx", [node], [("x", kind, shape)], [("y", kind, shape)])
    with ingot.serve(str(noise), cache="1MiB", **FREE) as server, ingot.Client(server.http_url) as client:
        answers = {client.infer("noise", {"x": ROW})["y"].tobytes() for _ in range(3)}
        assert len(answers) == 3
        why = "node 'noise' (RandomNormalLike) is random"
        assert client.metadata("noise")["properties"]["response_cache"] == f"off: {why}"
        assert f"model noise: its responses are not cached: {why}" in caplog.text
        assert (*counts(server), metric(server, "bytes")) == (0, 0, 0)
    summed = onnx_models.running_sum(tmp_path)
    settings: dict[str, Any] = {"states": "total=total_next,past=past_next", **FREE}
    with ingot.serve(str(summed), cache="1MiB", **settings) as server, ingot.Client(server.grpc_url) as client:
        for number in range(1, 4):
            step = {"sequence_id": 7, "sequence_start": number == 1}
            assert np.array_equal(client.infer("running_sum", {"x": ROW}, parameters=step)["y"], number * ROW)


@pytest.mark.matrix
def test_the_cache_rests_during_a_canary(tmp_path: Path, run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    store = Store(tmp_path / "store")
    for version in (1, 3):
        store.push(times(version), f"times:{version}")
    with ingot.serve("times:1", store=store, cache="1MiB", **FREE) as server, ingot.Client(server.http_url) as client:

        def ask(factor: int = 1) -> Array:
            return client.infer("times", {"x": factor * X})["y"] / factor

        assert [ask()[0, 0] for _ in range(2)] == [1, 1]
        before = counts(server)
        succeeded(run_ingot("server", "canary", "times", "times:3", "--weight", "50"))
        wait_until(lambda: {ask()[0, 0] for _ in range(20)} == {1, 3})
        wait_until(lambda: ask(2)[0, 0] == 3)
        assert counts(server) == before
        succeeded(run_ingot("server", "canary", "times", "--stop"))
        assert {each[0, 0] for each in (ask(), ask(2), ask(), ask(2))} == {1}
        assert counts(server) == (before[0] + 3, before[1] + 1)


@pytest.mark.matrix
def test_equal_requests_at_once_are_each_computed(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(gate.path, monkeypatch.setattr)
    with (
        ingot.serve(str(onnx_models.held(tmp_path)), cache="1MiB", max_batch=1, **FREE) as server,
        ThreadPoolExecutor(3) as threads,
    ):

        def ask() -> Any:
            with ingot.Client(server.http_url) as client:
                return client.infer("held", {"x": ROW})["y"].tolist()

        with gate.closed():
            waiting = [threads.submit(ask) for _ in range(3)]
            wait_until(lambda: counts(server) == (0, 3))
        assert [each.result(60) for each in waiting] == [(ROW + 1).tolist()] * 3
        assert ask() == (ROW + 1).tolist()
        assert counts(server) == (1, 3)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"x": ROW}, {"y": ROW}),
        ({"x": ROW}, {"x": ROW.reshape(3, 1)}),
        ({"x": ROW}, {"x": ROW.view(np.int32)}),
        ({"x": ROW, "y": -ROW}, {"x": -ROW, "y": ROW}),
        ({"x": np.zeros((0, 3), np.float32)}, {"x": np.zeros((3, 0), np.float32)}),
        ({"x": np.array(0.0)}, {"x": np.array(-0.0)}),
        ({"x": np.array([b"a", b""], object)}, {"x": np.array([b"", b"a"], object)}),
    ],
)
def test_digests_of_unequal_inputs_differ(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert digest_of(one) == digest_of({name: array.copy() for name, array in one.items()})
    assert digest_of(one) != digest_of(other)


def test_a_digest_depends_on_values_alone(tmp_path: Path) -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert digest_of({"x": table[:, ::2]}) == digest_of({"x": table[:, ::2].copy()})
    wrong: Sequence[Any] = ("text", 7)
    assert [digest_of({"x": np.array([each], object)}) for each in wrong] == [None, None]
