"""NVIDIA's client in all four forms, in the same process as Ingot: its stubs and ours must not collide."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_grpc_aio
import tritonclient.http as triton_http
import tritonclient.http.aio as triton_http_aio
from tritonclient.utils import InferenceServerException

from ingot import RunningServer

# Its asyncio form leaves answers to health checks unread, and aiohttp warns when they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <function Connection.__del__:pytest.PytestUnraisableExceptionWarning"
)

X = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)
FORMS = ["http", "http.aio", "grpc", "grpc.aio"]
MODULES = {"http": triton_http, "http.aio": triton_http_aio, "grpc": triton_grpc, "grpc.aio": triton_grpc_aio}


class Asked:
    """One form of the client as blocking calls, so that the same test runs on all four."""

    def __init__(self, form: str, server: RunningServer):
        self.form = form
        self.module: ModuleType = MODULES[form]
        url = server.http_url if form.startswith("http") else server.grpc_url
        self._runner = asyncio.Runner() if form.endswith("aio") else None
        self._client = self._do(lambda: self.module.InferenceServerClient(url.partition("://")[2]))

    def _do(self, make: Callable[[], Any]) -> Any:
        if self._runner is None:
            return make()

        async def run() -> Any:
            made = make()
            return await made if asyncio.iscoroutine(made) else made

        return self._runner.run(run())

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: self._do(lambda: getattr(self._client, method)(*args, **kwargs))

    def shut(self) -> None:
        self._do(lambda: self._client.close())
        if self._runner is not None:
            self._runner.close()

    def infer_x(self, array: Any, model: str = "affine", *, binary: bool | None = None, **options: Any) -> Any:
        described = self.module.InferInput("x", list(array.shape), "FP32")
        if binary is None:
            described.set_data_from_numpy(array)
            outputs = None
        else:
            described.set_data_from_numpy(array, binary_data=binary)
            outputs = [self.module.InferRequestedOutput(name, binary_data=binary) for name in ("y", "z")]
        return self.infer(model, [described], outputs=outputs, **options)


@pytest.fixture(params=FORMS)
def client(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Asked]:
    asked = Asked(request.param, server)
    yield asked
    asked.shut()


def test_ready(client: Asked) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("affine")
    assert client.is_model_ready("affine", "1")
    assert not client.is_model_ready("unknown")
    assert not client.is_model_ready("affine", "9")


def test_metadata(client: Asked) -> None:
    server, model = client.get_server_metadata(), client.get_model_metadata("affine")
    if client.form.startswith("grpc"):
        assert server.name == "ingot"
        assert [(item.name, list(item.shape)) for item in model.inputs] == [("x", [-1, 3])]
    else:
        assert server["name"] == "ingot"
        assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}]


def test_infer(client: Asked) -> None:
    answer = client.infer_x(X, request_id="7")
    assert np.array_equal(answer.as_numpy("y"), 2 * X + 1)
    assert np.array_equal(answer.as_numpy("z"), -X)


@pytest.mark.parametrize("client", ["http", "http.aio"], indirect=True)
def test_infer_in_json_and_binary(client: Asked) -> None:
    for binary in (True, False):
        assert np.array_equal(client.infer_x(X, binary=binary).as_numpy("y"), 2 * X + 1)


def test_infer_compressed(client: Asked) -> None:
    if client.form.startswith("grpc"):
        answers = [client.infer_x(X, compression_algorithm=name) for name in ("gzip", "deflate")]
    else:
        answers = [
            client.infer_x(X, request_compression_algorithm=name, response_compression_algorithm=name)
            for name in ("gzip", "deflate")
        ]
    assert all(np.array_equal(answer.as_numpy("y"), 2 * X + 1) for answer in answers)


def test_text(client: Asked) -> None:
    words = np.array([["a", "\u00e9"]], dtype=object)
    described = client.module.InferInput("x", [1, 2], "BYTES")
    described.set_data_from_numpy(words)
    answer = client.infer("identity-bytes", [described])
    assert [item.decode() for item in answer.as_numpy("y").reshape(-1)] == ["a", "\u00e9"]


def test_errors_arrive_as_the_clients_own(client: Asked) -> None:
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope'"):
        client.infer_x(X, model="nope")
    with pytest.raises(InferenceServerException, match="dimension 1"):
        client.infer_x(X[:, :2].copy())
