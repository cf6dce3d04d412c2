"""The description of the HTTP API is complete, and random requests made from it are answered as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import ingot
from ingot import RunningServer
from ingot.protocol import open_inference_pb2 as pb
from ingot.server.grpc import as_json
from ingot.server.http.parser import LIVE, READY, read_head
from ingot.server.plane.operations import METHODS, OPERATIONS
from tests import onnx_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = onnx_models.affine(tmp_path_factory.mktemp("models"))
    with ingot.serve(str(model), http_port=0, grpc_port=0) as running:
        yield running


@pytest.mark.matrix
def test_each_parameter_of_a_path_is_described(server: RunningServer) -> None:
    paths = httpx.get(f"{server.http_url}/openapi.json", trust_env=False).json()["paths"]
    assert "/v2/models/{model}/versions/{version}/infer" in paths
    for path, methods in paths.items():
        for operation in methods.values():
            named = {item["name"] for item in operation.get("parameters", ()) if item["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path
            assert {"4XX", "5XX"} <= set(operation["responses"]), path


def test_each_operation_is_stated_once_and_served() -> None:
    """The parts of a protocol that are not generated from the table agree with it."""
    routes = [route for operation in OPERATIONS for route in operation.http]
    assert len(routes) == len({*routes})
    assert METHODS.keys() == {method.name for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    converted = {name for name, operation in METHODS.items() if operation.handler is not None}
    assert as_json.READ.keys() == converted
    assert as_json.WRITE.keys() <= converted
    by_name = {operation.name: operation for operation in OPERATIONS}
    assert (by_name["live"].http, by_name["ready"].http) == ((f"GET {LIVE.decode()}",), (f"GET {READY.decode()}",))
    for route in by_name["infer"].http:
        url = route.split()[1].format(model="m", version="7").encode()
        head = read_head(b"POST", url, "1.1", [(b"host", b"x"), (b"content-length", b"2")], 64, keep_alive=True)
        assert head.infer is not None
        assert (head.infer.model, head.infer.version) == ("m", "7" if b"versions" in url else "")


def test_bodies_of_settings_are_small(server: RunningServer) -> None:
    """They are decoded in the event loop, where a large one would delay all other requests."""
    small = [
        each for each in OPERATIONS if each.handler is not None and each.refusal is None and each.request is not None
    ]
    with httpx.Client(base_url=server.http_url, trust_env=False) as client:
        for path in [route.removeprefix("POST ") for operation in small for route in operation.http]:
            answer = client.post(path.format(model="m", region="r", repository="r"), content=bytes((1 << 20) + 1))
            assert answer.status_code == 413, path
            assert "over the limit of 1 MiB, which --max-body-mb raises for inference only" in answer.json()["error"]


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.matrix
def test_random_requests_are_answered_as_described(server: RunningServer, tmp_path: Path, examples: int) -> None:
    """By schemathesis: valid and invalid requests of each operation."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{server.http_url}/openapi.json"]
    command += ["--max-examples", str(examples), "--checks", checks, "--no-color", "--seed", "1"]
    environment = {**os.environ, "NO_PROXY": "127.0.0.1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-6000:]
