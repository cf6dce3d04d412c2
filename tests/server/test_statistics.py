"""Triton's statistics and configuration, as its client reads them, over both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from tests import onnx_models
from tests.server.test_padding import masked_sum, request
from tests.support import matrix

X = np.ones((3, 3), np.float32)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningServer]:
    """A server for this module, so that other tests do not change its counts."""
    models = [onnx_models.affine(tmp_path), onnx_models.embedding(tmp_path), onnx_models.unbatched(tmp_path)]
    with ingot.serve(*map(str, models), http_port=0, grpc_port=0, max_batch=8) as running:
        yield running


def client(server: RunningServer, protocol: str) -> Any:
    module, url = (triton_http, server.http_url) if protocol == "http" else (triton_grpc, server.grpc_url)
    return module.InferenceServerClient(url.partition("://")[2])


def statistics(server: RunningServer, protocol: str, *name: str) -> list[dict[str, Any]]:
    """Return statistics as Triton's client parses them; JSON of a message has numbers as text and omits zeros."""
    asked = client(server, protocol)
    options = {} if protocol == "http" else {"as_json": True}
    found: list[dict[str, Any]] = asked.get_inference_statistics(*name, **options)["model_stats"]
    asked.close()
    return found


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_rows_calls_and_times_are_counted(own: RunningServer, protocol: str) -> None:
    with ingot.Client(own.http_url) as http, ingot.Client(own.grpc_url) as grpc:
        for _ in range(5):
            http.infer("affine", {"x": X})
            grpc.infer("affine", {"x": X[:1]})
    (found,) = statistics(own, protocol, "affine")
    assert (found["name"], found["version"]) == ("affine", "1")
    assert int(found["inference_count"]) == 5 * 3 + 5
    assert int(found["execution_count"]) == 10
    assert int(found["last_inference"]) > 1_700_000_000_000
    counted = found["inference_stats"]
    for kind in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
        assert int(counted[kind]["count"]) == 10
    assert 0 < int(counted["compute_infer"]["ns"]) < int(counted["success"]["ns"])
    assert int(counted["fail"].get("count", 0)) == 0
    batches = {int(item["batch_size"]): int(item["compute_infer"]["count"]) for item in found["batch_stats"]}
    assert batches == {1: 5, 3: 5}


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_failures_are_counted_apart(own: RunningServer, protocol: str) -> None:
    with ingot.Client(own.http_url) as asked:
        with pytest.raises(InvalidArgument):
            asked.infer("embedding", {"ids": np.array([[99]])})
        asked.infer("embedding", {"ids": np.array([[9]])})
    (found,) = statistics(own, protocol, "embedding")
    assert int(found["inference_stats"]["fail"]["count"]) == 1
    assert int(found["inference_stats"]["success"]["count"]) == int(found["inference_count"]) == 1
    assert int(found["execution_count"]) == 2


@pytest.mark.matrix
def test_late_requests_count_as_failures(own: RunningServer) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    body = {"inputs": [tensor], "parameters": {"timeout": 1}}
    assert httpx.post(f"{own.http_url}/v2/models/affine/infer", json=body, trust_env=False).status_code == 504
    (found,) = statistics(own, "http", "affine")
    assert (found["inference_stats"]["fail"]["count"], found["execution_count"]) == (1, 0)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_without_a_name_all_models_are_listed(own: RunningServer, protocol: str) -> None:
    assert {item["name"] for item in statistics(own, protocol)} == {"affine", "embedding", "unbatched"}
    assert [item["name"] for item in statistics(own, protocol, "affine", "1")] == ["affine"]


@pytest.mark.parametrize("protocol", matrix("http", "grpc"))
@pytest.mark.parametrize("name", [("nothing",), ("affine", "7")])
def test_a_model_that_is_not_there_has_no_statistics(own: RunningServer, protocol: str, name: tuple[str, ...]) -> None:
    with pytest.raises(InferenceServerException, match=r"unknown model: '(nothing'|affine' version 7) is not"):
        statistics(own, protocol, *name)


def test_the_schedulers_estimates_are_reported(own: RunningServer) -> None:
    (found,) = statistics(own, "http", "affine")
    described = found["ingot"]
    assert described["max_batch"] == 8
    assert 1 <= described["rows_at_best"] <= 8
    assert [item["rows"] for item in described["latency"]][:2] == [1, 2]
    assert all(item["seconds"] > 0 for item in described["latency"])
    assert (described["state"], described["device"], described["waiting"]) == ("ready", "cpu", 0)
    assert "padding" not in described


def test_learnt_times_by_row_size_are_reported(tmp_path: Path) -> None:
    with ingot.serve(str(onnx_models.pair(tmp_path)), http_port=0, grpc_port=0) as server:
        with ingot.Client(server.http_url) as client:
            for elements in (4, 4000):
                for _ in range(4):
                    row = np.ones((1, elements), np.float32)
                    client.infer("pair", {"a": row, "b": row})
        (found,) = statistics(server, "http")
    learnt = {item["row_bytes"]: item["latency"] for item in found["ingot"]["by_row_bytes"]}
    assert {32, 32768} <= set(learnt)
    assert all(entry["seconds"] > 0 for latency in learnt.values() for entry in latency)
    assert found["ingot"]["latency"] in learnt.values()


@pytest.mark.matrix
def test_the_waste_of_padding_is_reported(tmp_path: Path) -> None:
    with ingot.serve(masked_sum(tmp_path), http_port=0, grpc_port=0) as server:

        def ask(length: int) -> None:
            with ingot.Client(server.http_url) as asked:
                asked.infer("masked-sum", request(length))

        with ThreadPoolExecutor(16) as pool:
            list(pool.map(ask, [1 + number % 40 for number in range(200)]))
        (found,) = statistics(server, "http")
    told = found["ingot"]["padding"]
    assert told["dimensions"] == ["seq"]
    assert told["elements"] == 2 * sum(1 + number % 40 for number in range(200))
    assert told["waste"] == told["padding"] / told["elements"]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_configuration_is_what_load_generators_read(own: RunningServer, protocol: str) -> None:
    asked = client(own, protocol)
    options = {} if protocol == "http" else {"as_json": True}

    def config(name: str) -> dict[str, Any]:
        found: dict[str, Any] = asked.get_model_config(name, **options)
        return found if protocol == "http" else found["config"]

    affine = config("affine")
    assert (affine["name"], affine["platform"], affine["backend"]) == ("affine", "onnxruntime_onnx", "onnxruntime")
    assert int(affine["max_batch_size"]) == 8
    assert affine["input"][0]["data_type"] == "TYPE_FP32"
    assert [int(size) for size in affine["input"][0]["dims"]] == [3]
    assert [item["name"] for item in affine["output"]] == ["y", "z"]
    assert not affine["model_transaction_policy"].get("decoupled", False)
    unbatched = config("unbatched")
    assert int(unbatched.get("max_batch_size", 0)) == 0
    assert [int(size) for size in unbatched["input"][0]["dims"]] == [-1]
    assert "dynamic_batching" not in unbatched
    asked.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_extensions_that_work_are_named(own: RunningServer, protocol: str) -> None:
    asked = client(own, protocol)
    metadata = asked.get_server_metadata(**({} if protocol == "http" else {"as_json": True}))
    asked.close()
    works = {"binary_tensor_data", "classification", "generate", "model_configuration"}
    assert works | {"schedule_policy", "sequence", "statistics"} == set(metadata["extensions"])


@pytest.mark.matrix
def test_a_model_called_stats_keeps_its_other_addresses(tmp_path: Path) -> None:
    with (
        ingot.serve(str(onnx_models.affine(tmp_path, "stats")), http_port=0, grpc_port=0) as server,
        httpx.Client(base_url=server.http_url, trust_env=False) as http,
    ):
        assert http.get("/v2/models/stats").json()["model_stats"][0]["name"] == "stats"
        assert http.get("/v2/models/stats/ready").json() == {"name": "stats", "ready": True}
        assert http.get("/v2/models/stats/versions/1").json()["name"] == "stats"
