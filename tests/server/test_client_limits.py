"""Connections, requests in flight and the rate of each client are limited."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest

import ingot
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument, TooManyRequests, Unavailable
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.server.net.limits import ClientLimits, Share
from tests import onnx_models
from tests.server import gates
from tests.server.access.served import BODY, make_key
from tests.server.outside import INFER, affine, floats, wait_until

# Requests per second: one request, and the next after 1000 s.
ONE = 0.001


def test_a_rate_is_that_of_a_bucket_of_one_second() -> None:
    now, refused = [100.0], list[str]()
    limits, share = ClientLimits(refused.append, rate=4, clock=lambda: now[0]), Share()
    for _ in range(4):
        limits.spend(share)
    with pytest.raises(TooManyRequests, match="4 requests per second"):
        limits.spend(share)
    now[0] += 0.25
    limits.spend(share)
    with pytest.raises(TooManyRequests):
        limits.spend(share)
    now[0] += 1000  # which does not add up to more than a second's
    for _ in range(4):
        limits.spend(share)
    with pytest.raises(TooManyRequests):
        limits.spend(share)
    assert refused == ["rate"] * 3


def test_a_request_that_exceeds_the_rate_is_not_in_flight() -> None:
    limits, share = ClientLimits(list[str]().append, in_flight=1, rate=1), Share()
    limits.leave(limits.admit("", share))
    with pytest.raises(TooManyRequests, match="per second"):
        limits.admit("", share)
    assert share.in_flight == 0


def test_clients_that_use_nothing_are_forgotten_and_others_are_not() -> None:
    now = [100.0]
    limits, own = ClientLimits(list[str]().append, in_flight=1, rate=1, clock=lambda: now[0]), Share()
    held = limits.admit("held", own)
    for number in range(5000):
        now[0] += 1
        limits.leave(limits.admit(f"token:{number}", own))
    assert len(limits._shares) <= 1025
    assert limits.share("held", own) is held


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[ingot.server.main.RunningServer]:
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0, **settings) as server:
        yield server


@contextlib.contextmanager
def caller(url: str) -> Iterator[Any]:
    """Yield a function for calls on one connection, shared with no other channel."""
    with grpc.insecure_channel(url.removeprefix("grpc://"), [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)


def limited(url: str, limit: str, **headers: str) -> float:
    text = httpx.get(f"{url}/metrics", headers=headers, trust_env=False, timeout=60).text
    prefix = f'ingot_limited_total{{limit="{limit}"}} '
    return sum(float(line.removeprefix(prefix)) for line in text.splitlines() if line.startswith(prefix))


@pytest.mark.matrix
def test_connections_of_both_protocols_over_the_limit_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path, max_connections=2) as server:
        host, port = server.http_url.removeprefix("http://").split(":")
        with (
            httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as first,
            caller(server.grpc_url) as ask,
        ):
            assert first.post("/v2/models/affine/infer", json=BODY).status_code == 200
            assert floats(ask(affine([1, 2, 3]), timeout=60)) == [3, 5, 7]
            refused = httpx.post(f"{server.http_url}/v2/models/affine/infer", json=BODY, trust_env=False, timeout=60)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.headers["connection"] == "close"
            assert "2 connections, its limit" in refused.json()["error"]
            live = httpx.get(f"{server.http_url}/v2/health/live", trust_env=False, timeout=60)
            assert (live.status_code, live.json()) == (200, {"live": True})
            ready = httpx.get(f"{server.http_url}/v2/health/ready", trust_env=False, timeout=60)
            assert ready.status_code == 503
            with caller(server.grpc_url) as other, pytest.raises(grpc.RpcError) as error:
                other(affine([1, 2, 3]), timeout=60)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            with socket.create_connection((host, int(port)), 60) as silent, contextlib.suppress(ConnectionError):
                assert silent.recv(1) == b""  # closed, though it sent nothing
            assert floats(ask(affine([1, 2, 3]), timeout=60)) == [3, 5, 7]
            text = first.get("/metrics").text
            assert float(text.split('ingot_limited_total{limit="connections"} ')[1].split()[0]) >= 5

        def serves() -> bool:
            url = f"{server.http_url}/v2/models/affine/infer"
            return httpx.post(url, json=BODY, trust_env=False, timeout=60).status_code == 200

        wait_until(serves)  # once the two have left


@pytest.mark.matrix
def test_a_client_over_its_rate_is_refused_and_another_is_served(tmp_path: Path) -> None:
    with serving(tmp_path, max_rate=ONE) as server:
        with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
            assert client.post("/v2/models/affine/infer", json=BODY).status_code == 200
            refused = client.post("/v2/models/affine/infer", json=BODY)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert "0.001 requests per second" in refused.json()["error"]
            assert client.get("/v2/health/ready").status_code == 200
            assert client.post("/v2/models/%61ffine/infer", json=BODY).status_code == 429  # served by FastAPI
        with caller(server.grpc_url) as ask:
            assert floats(ask(affine([1, 2, 3]), timeout=60)) == [3, 5, 7]
            with pytest.raises(grpc.RpcError) as error:
                ask(affine([1, 2, 3]), timeout=60)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for url in (server.http_url, server.grpc_url):
            with ingot.Client(url) as ours:
                x = {"x": np.ones((1, 3), np.float32)}
                with contextlib.suppress(TooManyRequests):  # gRPC's channels may share the connection of an earlier one
                    ours.infer("affine", x)
                with pytest.raises(TooManyRequests):
                    ours.infer("affine", x)
        assert limited(server.http_url, "rate") >= 5


def test_each_message_of_a_stream_counts_for_the_rate(tmp_path: Path) -> None:
    with (
        serving(tmp_path, max_rate=ONE) as server,
        grpc.insecure_channel(server.grpc_url.removeprefix("grpc://")) as channel,
    ):
        stream: Any = channel.stream_stream(
            f"/{proto_codec.SERVICE}/ModelStreamInfer",
            pb.ModelInferRequest.SerializeToString,
            pb.ModelStreamInferResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as error:
            list(stream(iter([affine([1, 2, 3])] * 3), timeout=60))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gates.Gate]:
    with gates.Gate(tmp_path) as gate:
        gates.hold(gate.path, monkeypatch.setattr)
        yield gate


@contextlib.contextmanager
def serving_held(folder: Path, **settings: Any) -> Iterator[ingot.server.main.RunningServer]:
    path = onnx_models.affine(folder).rename(folder / "held.onnx")
    with ingot.serve(str(path), http_port=0, grpc_port=0, **settings) as server:
        yield server


def test_requests_in_flight_of_a_connection_are_limited(tmp_path: Path, gate: gates.Gate) -> None:
    with (
        serving_held(tmp_path, max_in_flight=1) as server,
        caller(server.grpc_url) as ask,
        caller(server.grpc_url) as other,
    ):
        with gate.closed():
            first = ask.future(affine([1, 2, 3], "held"), timeout=60)
            wait_until(gate.waited_at)
            with pytest.raises(grpc.RpcError) as error:
                ask(affine([1, 2, 3], "held"), timeout=60)
            assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            second = other.future(affine([2, 2, 3], "held"), timeout=60)
        assert floats(first.result()) == [3, 5, 7]
        assert floats(second.result()) == [5, 5, 7]
        assert floats(ask(affine([1, 2, 3], "held"), timeout=60)) == [3, 5, 7]
        assert limited(server.http_url, "in_flight") == 1


def test_requests_in_flight_of_a_key_are_limited_over_all_its_connections(tmp_path: Path, gate: gates.Gate) -> None:
    auth = tmp_path / "keys.toml"
    mine, its = make_key(auth, "infer", "metrics"), make_key(auth, "infer", "metrics", name="other")
    with serving_held(tmp_path, max_in_flight=1, auth=auth) as server, ThreadPoolExecutor() as pool:
        url = f"{server.http_url}/v2/models/held/infer"

        def post(key: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return httpx.post(url, json=BODY, headers=headers, trust_env=False, timeout=60).status_code

        with gate.closed():
            first = pool.submit(post, mine)
            wait_until(gate.waited_at)
            assert post(mine) == 429
            second = pool.submit(post, its)
        assert (first.result(), second.result()) == (200, 200)
        assert post(mine) == 200


@pytest.mark.parametrize("name", ["max_connections", "max_in_flight", "max_rate"])
def test_a_limit_that_grpcio_lacks_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{name} has no effect on grpc_server grpcio; use the server fast"):
        ServerConfig.of({"grpc_server": "grpcio", name: 5})


def test_a_closed_connection_makes_room() -> None:
    limits = ClientLimits(list[str]().append, connections=1)
    assert limits.connect() is None
    assert isinstance(limits.connect(), Unavailable)
    limits.disconnect()
    assert limits.connect() is None
