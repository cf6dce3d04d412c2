"""Concurrent clients share batches across protocols, and each gets its own answer."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from onnx import TensorProto, helper

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from tests import onnx_models

CLIENTS = 32
REQUESTS = 20


def metric(http: httpx.Client, name: str, model: str) -> float:
    found = re.search(rf'^{name}{{model="{model}",[^}}]*}} (\S+)$', http.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_32_clients_share_batches_and_get_their_own_answers(server: RunningServer, http: httpx.Client) -> None:
    def ask(number: int) -> bool:
        rng = np.random.default_rng(number)
        url = server.grpc_url if number % 2 else server.http_url
        with ingot.Client(url) as client:
            for _ in range(REQUESTS):
                x = rng.standard_normal((int(rng.integers(1, 4)), 3)).astype(np.float32)
                if not np.array_equal(client.infer("affine", {"x": x})["y"], 2 * x + 1):
                    return False
        return True

    batches = metric(http, "ingot_batch_requests_count", "affine")
    requests = metric(http, "ingot_batch_requests_sum", "affine")
    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(ask, range(CLIENTS)))
    requests = metric(http, "ingot_batch_requests_sum", "affine") - requests
    batches = metric(http, "ingot_batch_requests_count", "affine") - batches
    assert requests == CLIENTS * REQUESTS
    assert batches < requests  # some were batched
    assert metric(http, "ingot_batch_size_sum", "affine") > metric(http, "ingot_batch_requests_sum", "affine")


@pytest.mark.matrix
def test_a_bare_file_that_mixes_samples_runs_one_request_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [
        helper.make_node("ReduceMin", ["x"], ["least"], keepdims=1),
        helper.make_node("Mul", ["x", "least"], ["y"]),
    ]
    dims = ("batch", 3)
    path = onnx_models.save(
        tmp_path / "mixing.onnx", nodes, [("x", TensorProto.FLOAT, dims)], [("y", TensorProto.FLOAT, dims)]
    )

    def ask(number: int) -> bool:
        x = np.full((1, 3), number, np.float32)
        with ingot.Client(server.http_url) as client:
            return all(np.array_equal(client.infer("mixing", {"x": x})["y"], x * number) for _ in range(REQUESTS))

    with ingot.serve(str(path), http_port=0, grpc_port=0, device="cpu") as server, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(1, 9)))
    assert "requests run one at a time: node 'least' (ReduceMin): it reduces over the samples" in caplog.text


@pytest.mark.matrix
def test_a_bad_request_fails_alone(server: RunningServer) -> None:
    def ask(number: int) -> str:
        ids = np.full((1, 4), 99 if number == 7 else number % 10)
        with ingot.Client(server.http_url) as client:
            for _ in range(REQUESTS):
                try:
                    answer = client.infer("embedding", {"ids": ids})["y"]
                except InvalidArgument:
                    if number != 7:
                        return "failed for another's sake"
                else:
                    if number == 7 or not np.array_equal(answer[0, :, 0], ids[0] * 2):
                        return "wrong"
        return "right"

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert set(pool.map(ask, range(CLIENTS))) == {"right"}


@pytest.mark.matrix
def test_requests_of_different_shapes_are_not_mixed(server: RunningServer) -> None:
    def ask(number: int) -> bool:
        a = np.full((1, 1 + number % 5), number, dtype=np.float32)
        with ingot.Client(server.grpc_url) as client:
            return all(np.array_equal(client.infer("pair", {"a": a, "b": a})["y"], 2 * a) for _ in range(REQUESTS))

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert all(pool.map(ask, range(CLIENTS)))


@pytest.mark.parametrize("rows", [1, 64, 65, 1000])
def test_a_request_of_any_size_is_answered_whole(server: RunningServer, rows: int) -> None:
    x = np.arange(rows * 3, dtype=np.float32).reshape(rows, 3)
    with ingot.Client(server.http_url) as client:
        assert np.array_equal(client.infer("affine", {"x": x})["y"], 2 * x + 1)
