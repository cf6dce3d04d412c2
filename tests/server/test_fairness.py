"""A client with many or large requests does not keep others from being answered, nor from being accepted."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
import numpy as np
import pytest

import ingot
from ingot.protocol import open_inference_pb2 as pb
from tests import onnx_models
from tests.server.gates import Gate, hold
from tests.server.outside import INFER, affine, wait_until

MIB = 1 << 20


def infer(channel: grpc.Channel) -> Any:
    return channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)


def waiting(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=30, trust_env=False).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith('ingot_queued_requests{model="held"'))


@pytest.mark.matrix
def test_a_request_is_answered_before_the_backlog_of_another_client(
    folder: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 calls of one connection are queued, in batches of 4, when another connection sends one."""
    hold(gate.path, monkeypatch.setattr)
    model = str(onnx_models.held(folder))
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] = {"max_batch": 4, "isolate": "none"}
        server = stack.enter_context(ingot.serve(model, http_port=0, grpc_port=0, **settings))
        address = server.grpc_url.removeprefix("grpc://")
        heavy, light = (
            stack.enter_context(
                grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), ("client", number)])
            )
            for number in range(2)
        )
        order: list[str] = []
        with gate.closed():
            calls = [infer(heavy).future(affine([1, 2], "held"), timeout=120) for _ in range(400)]
            wait_until(lambda: waiting(server.http_url) >= 396)
            last = infer(light).future(affine([1, 2], "held"), timeout=120)
            wait_until(lambda: waiting(server.http_url) >= 397)
            for call in calls:
                call.add_done_callback(lambda _: order.append("heavy"))
            last.add_done_callback(lambda _: order.append("light"))
        for call in (*calls, last):
            assert list(call.result().outputs[0].shape) == [1, 2]
        wait_until(lambda: len(order) == 401)
        assert order.index("light") <= 16


def test_large_bodies_leave_room_for_small_ones(folder: Path) -> None:
    """Four bodies of 2 MiB that never end would hold all of the memory for bodies, which is 8 MiB."""
    settings: dict[str, Any] = {"max_bodies_mb": 8, "max_body_mb": 4}
    with ingot.serve(str(onnx_models.affine(folder)), http_port=0, grpc_port=0, **settings) as server:
        host, port = server.http_url.removeprefix("http://").split(":")
        with contextlib.ExitStack() as stack:
            head = f"POST /v2/models/affine/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {2 * MIB}\r\n\r\n".encode()
            refused = 0
            for _ in range(4):
                large = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
                with contextlib.suppress(ConnectionError):
                    large.sendall(head + b" " * (2 * MIB - 1))
                large.settimeout(0.5)
                with contextlib.suppress(TimeoutError, ConnectionError):
                    refused += b"503" in large.recv(4096)
            with ingot.Client(server.http_url) as client:
                answer = client.infer("affine", {"x": np.ones((1, 3), np.float32)})
            assert answer["y"].tolist() == [[3, 3, 3]]
            assert refused == 1


@pytest.mark.parametrize("isolate", ["none", "all"])
@pytest.mark.matrix
def test_a_model_is_answered_despite_the_backlog_of_another(folder: Path, isolate: Literal["none", "all"]) -> None:
    """24 connections keep a batch each queued for a heavy model; requests for a light one wait for few of them."""

    def batches(url: str) -> int:
        found = httpx.get(f"{url}/v2/models/heavy/stats", timeout=60, trust_env=False).json()
        return int(found["model_stats"][0]["execution_count"])

    def ask(url: str) -> None:
        with ingot.Client(url) as client:
            while not ended.is_set():
                client.infer("heavy", {"x": heavy})

    models = [str(onnx_models.affine(folder, "light")), str(onnx_models.matmuls(folder / "heavy.onnx", 768, 60))]
    heavy, light, ended = np.zeros((64, 768), np.float32), np.zeros((1, 3), np.float32), threading.Event()
    with ingot.serve(*models, http_port=0, grpc_port=0, max_batch=64, isolate=isolate) as server:
        threads = [threading.Thread(target=ask, args=(server.grpc_url,)) for _ in range(24)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: batches(server.http_url) > 3)
            waited = []
            with ingot.Client(server.grpc_url) as client:
                for _ in range(9):
                    before = batches(server.http_url)
                    client.infer("light", {"x": light})
                    waited.append(batches(server.http_url) - before)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    # Of the three requests of a round, each may wait for the batch that runs.
    assert np.median(waited) <= 16, waited
