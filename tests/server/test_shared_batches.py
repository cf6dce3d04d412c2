"""Requests of both protocols in one engine call, requests larger than a call, and failures of one among others."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import ingot
from ingot import RunningServer
from ingot.errors import InternalError, InvalidArgument
from ingot.runtime import Latency
from ingot.runtime.loading import load_spec
from ingot.tensors import Array, DType, Signature, TensorSpec
from tests import onnx_models
from tests.runtime.fake_engines import FunctionEngine
from tests.server.test_batching import metric

SIGNATURE = Signature(
    (TensorSpec("x", DType.FP32, ("batch", 2)), TensorSpec("scale", DType.FP32, (1,))),
    (TensorSpec("y", DType.FP32, ("batch", 2)),),
    "batch",
)
REFUSED, BROKEN = 13, 66
PROTOCOLS = ["http", "grpc"]


def scaled(inputs: Mapping[str, Array]) -> dict[str, Array]:
    time.sleep(0.001)  # as `gated` says of it
    if (inputs["x"] == REFUSED).any():
        raise InvalidArgument("no thirteens")
    if (inputs["x"] == BROKEN).any():
        raise ZeroDivisionError("a secret")
    return {"y": inputs["x"] * inputs["scale"]}


class Gated:
    """A server whose engine works only while its gate is open."""

    def __init__(self, server: RunningServer, engine: FunctionEngine, gate: threading.Event):
        self.server = server
        self.engine = engine
        self.gate = gate
        self.http = httpx.Client(base_url=server.http_url, trust_env=False, timeout=60)
        self.pool = ThreadPoolExecutor(16)

    def url(self, protocol: str) -> str:
        return self.server.http_url if protocol == "http" else self.server.grpc_url

    def ask(self, protocol: str, x: Array, scale: float = 2) -> Array:
        with ingot.Client(self.url(protocol)) as client:
            return client.infer("scaled", {"x": x, "scale": np.array([scale], np.float32)})["y"]

    def start(self, protocol: str, x: Array, scale: float = 2) -> Future[Array]:
        return self.pool.submit(self.ask, protocol, x, scale)

    def close_gate(self) -> Future[Array]:
        """Let one request into the engine, where it stays until the gate opens."""
        self.gate.clear()
        self.engine.calls.clear()
        first = self.start("http", row(0))
        self.until(lambda: self.engine.calls == [1])
        return first

    def post_unread(self, x: Array) -> HTTPConnection:
        """Send a request, and do not wait for its answer."""
        connection = HTTPConnection(self.server.http_url.partition("://")[2])
        connection.request("POST", "/v2/models/scaled/infer", json.dumps(body_of(x)))
        return connection

    def until_waiting(self, count: int) -> None:
        self.until(lambda: metric(self.http, "ingot_queued_requests", "scaled") == count)

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.005)


def row(value: float) -> Array:
    return np.full((1, 2), value, np.float32)


def body_of(x: Array) -> dict[str, Any]:
    return {
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.ravel().tolist()},
            {"name": "scale", "datatype": "FP32", "shape": [1], "data": [2]},
        ]
    }


def rows(count: int) -> Array:
    return np.arange(2 * count, dtype=np.float32).reshape(count, 2) + 100


@pytest.fixture
def gated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gated]:
    gate = threading.Event()
    gate.set()
    engine = FunctionEngine(scaled, SIGNATURE, gate)
    monkeypatch.setattr(load_spec, "load_engine", lambda *_: engine)
    # Batches pay, even on a busy machine.
    monkeypatch.setattr("ingot.runtime.loading.warmup.measure", lambda *_: Latency({1: 0.001, 2: 0.001, 4: 0.001}))
    path = onnx_models.affine(tmp_path, "scaled")  # whose name alone counts
    with ingot.serve(str(path), http_port=0, grpc_port=0, max_batch=4) as server:
        made = Gated(server, engine, gate)
        engine.calls.clear()
        yield made
        gate.set()
        made.pool.shutdown()
        made.http.close()


@pytest.mark.matrix
def test_requests_of_both_protocols_share_an_engine_call(gated: Gated) -> None:
    first = gated.close_gate()
    waiting = [gated.start(PROTOCOLS[number % 2], row(number)) for number in range(4)]
    gated.until_waiting(4)
    gated.gate.set()
    first.result(30)
    for number, answer in enumerate(waiting):
        assert np.array_equal(answer.result(30), 2 * row(number))
    assert gated.engine.calls == [1, 4]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_request_of_more_rows_than_a_batch_runs_in_parts_that_share_the_rest(gated: Gated, protocol: str) -> None:
    answer = gated.ask(protocol, rows(10), scale=3)
    assert np.array_equal(answer, 3 * rows(10))
    assert sorted(gated.engine.calls) == [2, 4, 4]


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_last_part_shares_its_batch_with_others(gated: Gated, protocol: str) -> None:
    first = gated.close_gate()
    large = gated.start(protocol, rows(6))
    gated.until_waiting(2)
    small = gated.start("http", row(5))
    gated.until_waiting(3)
    other = gated.start("http", row(5), scale=7)  # another content of the input that all rows of a call have
    gated.until_waiting(4)
    gated.gate.set()
    assert np.array_equal(large.result(30), 2 * rows(6))
    assert np.array_equal(small.result(30), 2 * row(5))
    assert np.array_equal(other.result(30), 7 * row(5))
    first.result(30)
    assert gated.engine.calls == [1, 4, 3, 1]


@pytest.mark.one_case
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_part_that_fails_fails_only_its_request(gated: Gated, protocol: str) -> None:
    x = rows(12)
    x[5] = REFUSED
    first = gated.close_gate()
    bad = gated.start(protocol, x)
    gated.until_waiting(2)  # of its three parts
    good = gated.start("http", row(5))
    gated.until_waiting(3)
    gated.gate.set()
    with pytest.raises(InvalidArgument, match="no thirteens"):
        bad.result(30)
    assert np.array_equal(good.result(30), 2 * row(5))
    first.result(30)
    assert sum(gated.engine.calls) <= 1 + 4 + 4 + 1  # the third part, whose request has failed, is left out


def test_parts_whose_time_is_up_are_left_out(gated: Gated) -> None:
    first = gated.close_gate()
    body = {**body_of(rows(12)), "parameters": {"timeout": 3_000_000}}  # with less, a busy machine refuses it at once
    assert gated.http.post("/v2/models/scaled/infer", json=body).status_code == 504
    gated.gate.set()
    first.result(30)
    assert np.array_equal(gated.ask("grpc", row(3)), 2 * row(3))
    assert gated.engine.calls == [1, 1]


def test_parts_whose_client_left_are_left_out(gated: Gated) -> None:
    first = gated.close_gate()
    leaving = gated.post_unread(rows(12))
    gated.until_waiting(2)  # of its three parts
    leaving.close()
    gated.until_waiting(0)
    gated.gate.set()
    first.result(30)
    assert np.array_equal(gated.ask("grpc", row(3)), 2 * row(3))
    assert gated.engine.calls == [1, 1]


def test_a_full_queue_refuses_requests_and_a_large_one_is_queued_a_few_parts_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    engine = FunctionEngine(scaled, SIGNATURE, gate)
    monkeypatch.setattr(load_spec, "load_engine", lambda *_: engine)
    path = onnx_models.affine(tmp_path, "scaled")
    gate.set()
    with ingot.serve(str(path), http_port=0, grpc_port=0, max_batch=4, max_queue=2) as server:
        made = Gated(server, engine, gate)
        first = made.close_gate()
        large = made.start("grpc", rows(40))
        made.until_waiting(2)  # of its ten parts
        for size in (1, 8):
            with pytest.raises(ingot.errors.Unavailable, match="the queue is full"):
                made.ask("http", rows(size))
        assert metric(made.http, "ingot_queued_requests", "scaled") == 2
        assert metric(made.http, "ingot_in_flight_requests", "scaled") == 2
        gate.set()
        first.result(60)
        assert np.array_equal(large.result(60), 2 * rows(40))
        made.pool.shutdown()
        made.http.close()


@pytest.mark.parametrize(("value", "error"), [(REFUSED, InvalidArgument), (BROKEN, InternalError)])
def test_an_engine_that_fails_on_a_batch_fails_only_the_one_to_blame(
    gated: Gated,
    value: float,
    error: type[Exception],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ingot.faults._MOST", 1000)  # the limit counts the errors of earlier tests too
    first = gated.close_gate()
    waiting = [gated.start(PROTOCOLS[number % 2], row(value if number == 2 else number)) for number in range(4)]
    gated.until_waiting(4)
    gated.gate.set()
    first.result(30)
    for number, answer in enumerate(waiting):
        if number == 2:
            with pytest.raises(error) as failure:
                answer.result(30)
            assert "secret" not in str(failure.value)
        else:
            assert np.array_equal(answer.result(30), 2 * row(number))
    assert gated.engine.calls[:2] == [1, 4]
    assert np.array_equal(gated.ask("http", row(1)), 2 * row(1))
    assert error is InvalidArgument or "a secret" in caplog.text


def test_a_client_that_leaves_while_its_batch_runs_hurts_no_neighbour(gated: Gated) -> None:
    entered, hold = threading.Event(), threading.Event()

    def held(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if (inputs["x"] == 4).any():
            entered.set()
            hold.wait(30)
        return scaled(inputs)

    gated.engine._function = held
    first = gated.close_gate()
    staying = gated.start("grpc", row(4))
    leaving = gated.post_unread(row(3))
    gated.until_waiting(2)
    gated.gate.set()
    assert entered.wait(30)
    leaving.close()
    gated.until(lambda: 'code="cancelled"' in gated.http.get("/metrics").text)
    hold.set()
    assert np.array_equal(staying.result(30), 2 * row(4))
    first.result(30)
    assert gated.engine.calls == [1, 2]
