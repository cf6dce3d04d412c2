from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest

from ingot.protocol import open_inference_pb2 as pb
from tests.server.outside import INFER, Service, affine, affine_of, floats, row, serving
from tests.server.outside import still_answers as still_answers

# Floods of gRPC's core test mostly that library, so they are not part of the suite for every change.
SERVERS = [pytest.param("grpcio", marks=pytest.mark.long), "fast"]


@pytest.fixture(scope="session", params=SERVERS)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with serving(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
def others(service: Service) -> Iterator[None]:
    """Regular clients of both protocols that send requests throughout; each answer must arrive and be right."""
    stop = threading.Event()
    asking = [_Asking(stop, service, ask) for ask in (_over_http, _over_grpc)]
    yield
    stop.set()
    for thread in asking:
        thread.join(60)
        assert not thread.is_alive(), "another client waits for an answer"
        assert thread.failure is None, thread.failure
        assert thread.answered > 0


@pytest.fixture
def bounded_memory(service: Service) -> Iterator[None]:
    """The server may keep little of the test's bytes; the bound is coarse, as allocators return memory late."""
    service.check()
    before = service.resident()
    yield
    grown = service.resident() - before
    # Forty calls of 4 MiB in work at once, with their answers, are the most that any test here can make it hold. gRPC's
    # core keeps further memory beyond our control.
    assert grown < (800 if service.kind == "grpcio" else 400) << 20, f"the server has grown by {grown >> 20} MiB"


class _Asking(threading.Thread):
    def __init__(self, stop: threading.Event, service: Service, ask: Any):
        super().__init__(daemon=True)
        self.failure: str | None = None
        self.answered = 0
        self._stopped = stop
        self._service = service
        self._ask = ask
        self.start()

    def run(self) -> None:
        number = 0
        try:
            for answer in self._ask(self._service):
                if answer != affine_of(row(number)):
                    self.failure = f"row {number} was answered with {answer}"
                    return
                number = self.answered = number + 1
                if self._stopped.wait(0.002):
                    return
        except (grpc.RpcError, httpx.HTTPError) as error:
            self.failure = f"after {number} answers: {error!r}"


def _over_http(service: Service) -> Iterator[list[float]]:
    with httpx.Client(base_url=f"http://{service.http}", trust_env=False, timeout=30) as client:
        number = 0
        while True:
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": row(number)}
            reply = client.post("/v2/models/affine/infer", json={"inputs": [tensor]})
            reply.raise_for_status()
            yield reply.json()["outputs"][0]["data"]
            number += 1


def _over_grpc(service: Service) -> Iterator[list[float]]:
    with grpc.insecure_channel(service.grpc) as channel:
        ask: Any = channel.unary_unary(INFER, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
        number = 0
        while True:
            yield floats(ask(affine(row(number)), timeout=30))
            number += 1
