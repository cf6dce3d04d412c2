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
from ingot.server.main import RunningServer
from tests import onnx_models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = onnx_models.affine(tmp_path_factory.mktemp("models"))
    with ingot.serve(str(model), http_port=0, grpc_port=0) as running:
        yield running


def test_each_parameter_of_a_path_is_described(server: RunningServer) -> None:
    paths = httpx.get(f"{server.http_url}/openapi.json", trust_env=False).json()["paths"]
    assert "/v2/models/{model}/versions/{version}/infer" in paths
    for path, methods in paths.items():
        for operation in methods.values():
            named = {item["name"] for item in operation.get("parameters", ()) if item["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path
            assert {"4XX", "5XX"} <= set(operation["responses"]), path


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
