"""The server names exactly the extensions that work with its settings."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import ingot
from benchmarks.serving.processes import free_ports
from ingot import RunningServer
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from tests import onnx_models
from tests.server.extensions.conftest import Addresses, Triton, clients
from tests.support import matrix

X = np.ones((1, 3), np.float32)
KEY = f"/ingot-test-{uuid.uuid4().hex}"


@pytest.fixture(scope="module", params=["default", "all", "management"])
def addresses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """Servers with their defaults and with all that clients may be allowed, and a management listener."""
    folder = tmp_path_factory.mktemp("models")
    on: dict[str, Any] = {"shared_memory": "*", "log_control": True}
    places = [f"127.0.0.1:{port}" for port in free_ports(2)]
    management = {"management": places[0], "management_grpc": places[1], "insecure": True}
    settings = {"default": {}, "all": on, "management": management}[request.param]
    models = [str(onnx_models.affine(folder)), str(onnx_models.running_sum(folder))]
    lines = [f'[[model]]\nsource = "{model}"' for model in models]
    (folder / "ingot.toml").write_text("\n".join((*lines, 'states = "total=total_next,past=past_next"')))
    memory = Path("/dev/shm") / KEY[1:]
    memory.write_bytes(bytes(64))
    try:
        with ingot.serve(config=folder / "ingot.toml", http_port=0, grpc_port=0, **settings) as running:
            if request.param == "management":
                yield Addresses(f"http://{places[0]}", f"grpc://{places[1]}")
            else:
                yield Addresses(running.http_url, running.grpc_url)
    finally:
        memory.unlink()


@pytest.fixture(scope="module")
def both(addresses: Addresses) -> Iterator[dict[str, Triton]]:
    yield from clients(addresses)


@pytest.fixture
def triton(both: dict[str, Triton], protocol: str) -> Triton:
    return both[protocol]


def infer(triton: Triton, **options: Any) -> Any:
    return triton.infer("affine", [triton.input("x", X)], **options)


def classes(triton: Triton) -> None:
    found = infer(triton, outputs=[triton.output("y", class_count=1)]).as_numpy("y")
    assert found.tolist() == [[b"3.000000:0"]]


def sequence(triton: Triton) -> None:
    for count in (1, 2):
        options: dict[str, Any] = {"sequence_id": 7, "sequence_start": count == 1, "sequence_end": count == 2}
        answer = triton.infer("running_sum", [triton.input("x", X)], **options)
        assert answer.as_numpy("y").tolist() == [[count] * 3]


def generate(triton: Triton) -> None:
    """Ask over HTTP, the only protocol of this extension."""
    url = f"{triton.server.http_url}/v2/models/affine/generate"
    answer = httpx.post(url, json={"x": [1, 1, 1]}, trust_env=False)
    if answer.status_code != 200:
        raise InferenceServerException(answer.text)
    assert answer.json()["y"] == [3, 3, 3]


def unload(triton: Triton) -> None:
    try:
        triton.client.unload_model("none", unload_dependents=True)
    except InferenceServerException as error:
        if "unknown model" not in str(error) and "no model" not in str(error):
            raise


def register(triton: Triton) -> None:
    triton.client.register_system_shared_memory("r", KEY, 64)
    triton.client.unregister_system_shared_memory("r")


# The extensions of Triton, with what works if they do.
WORKS: dict[str, Callable[[Triton], object]] = {
    "binary_tensor_data": infer,
    "classification": classes,
    "cuda_shared_memory": lambda triton: triton.client.register_cuda_shared_memory("r", base64.b64encode(b"x"), 0, 1),
    "generate": generate,
    "logging": lambda triton: triton.client.update_log_settings({"log_error": True}),
    "model_configuration": lambda triton: triton.client.get_model_config("affine"),
    "model_repository": lambda triton: triton.client.get_model_repository_index(),
    "model_repository(unload_dependents)": lambda triton: unload(triton),
    "schedule_policy": lambda triton: infer(triton, priority=1, timeout=10_000_000),
    "sequence": sequence,
    "statistics": lambda triton: triton.client.get_inference_statistics("affine"),
    "system_shared_memory": register,
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", WORKS)
def test_an_extension_is_named_if_and_only_if_it_works(triton: Triton, name: str) -> None:
    metadata = triton.client.get_server_metadata()
    named = metadata["extensions"] if isinstance(metadata, dict) else list(metadata.extensions)
    assert set(named) <= set(WORKS)
    try:
        WORKS[name](triton)
        works = True
    except InferenceServerException:
        works = False
    assert works == (name in named)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", matrix("server", "grpcio_server"))
def test_every_described_method_exists(request: pytest.FixtureRequest, kind: str) -> None:
    """Reflection describes what the server answers."""
    running: RunningServer = request.getfixturevalue(kind)
    service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert len(service.methods) >= 17
    with grpc.insecure_channel(running.grpc_url.removeprefix("grpc://")) as channel:
        for method in service.methods:
            path = f"/{proto_codec.SERVICE}/{method.name}"
            stream: Any = channel.stream_stream(path, None, None)
            unary: Any = channel.unary_unary(path, None, None)
            try:
                if method.client_streaming:
                    list(stream(iter([b""]), timeout=30))
                else:
                    unary(b"", timeout=30)
            except grpc.RpcError as caught:
                error: Any = caught
                text = str(error.details())
                assert "there is no method" not in text
                assert "Method not found" not in text


def test_every_described_path_exists(addresses: Addresses) -> None:
    with httpx.Client(base_url=addresses.http_url, trust_env=False) as client:
        paths = client.get("/openapi.json").json()["paths"]
        for path, methods in paths.items():
            address = path.format(model="affine", version="1", region="none")
            for method in methods:
                answer = client.request(method, address, content=json.dumps({}) if method == "post" else None)
                assert answer.status_code not in (403, 405, 501), (method, path)
                assert "Not Found" not in answer.text
