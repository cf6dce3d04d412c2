"""Each server and client of the extensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http

from ingot import RunningServer


@dataclasses.dataclass(frozen=True)
class Addresses:
    """Where a server listens, as :class:`RunningServer` has it."""

    http_url: str
    grpc_url: str


@dataclasses.dataclass(frozen=True)
class Triton:
    """NVIDIA's client of one protocol."""

    module: ModuleType
    client: Any
    server: Addresses | RunningServer

    def infer(self, model: str, inputs: list[Any], outputs: list[Any] | None = None, **options: Any) -> Any:
        return self.client.infer(model, inputs, outputs=outputs, **options)

    def input(self, name: str, array: Any, datatype: str = "FP32") -> Any:
        made = self.module.InferInput(name, list(array.shape), datatype)
        made.set_data_from_numpy(array)
        return made

    def shared(self, name: str, shape: list[int], datatype: str, region: str, size: int, offset: int = 0) -> Any:
        made = self.module.InferInput(name, shape, datatype)
        made.set_shared_memory(region, size, offset)
        return made

    def output(self, name: str, **options: Any) -> Any:
        return self.module.InferRequestedOutput(name, **options)


def clients(server: Addresses | RunningServer) -> Iterator[dict[str, Triton]]:
    """Yield a client of each protocol."""
    with (
        triton_http.InferenceServerClient(server.http_url.removeprefix("http://")) as http,
        triton_grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as grpc,
    ):
        yield {"http": Triton(triton_http, http, server), "grpc": Triton(triton_grpc, grpc, server)}


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name
