from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import ingot
from ingot import RunningServer
from ingot.tensors import DType
from tests import onnx_models
from tests.server.apponly import serve_app
from tests.server.gates import Gate


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of all the hand-made models, on free ports."""
    made = hand_made(tmp_path_factory.mktemp("models"))
    with ingot.serve(*made, http_port=0, grpc_port=0, max_body_mb=4) as running:
        yield running


@pytest.fixture(scope="session")
def grpcio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The same models behind grpcio's server."""
    made = hand_made(tmp_path_factory.mktemp("models"))
    with ingot.serve(*made, http_port=0, grpc_port=0, max_body_mb=4, grpc_server="grpcio") as running:
        yield running


def hand_made(folder: Path) -> list[str]:
    """Return the paths of all the hand-made models."""
    made = [onnx_models.identity(folder, dtype) for dtype in DType]
    made += [build(folder) for build in (onnx_models.affine, onnx_models.embedding, onnx_models.pair)]
    made += [onnx_models.reciprocal(folder), onnx_models.unbatched(folder)]
    made += [onnx_models.quotient(folder), onnx_models.reshaped(folder)]
    return [str(path) for path in made]


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def app_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same models behind FastAPI alone."""
    with serve_app(hand_made(tmp_path_factory.mktemp("models")), 4 << 20) as url:
        yield url


@pytest.fixture
def still_answers(http: httpx.Client) -> Iterator[None]:
    """After each test, the server must answer as before."""
    yield
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    answer = http.post("/v2/models/affine/infer", json=body)
    assert answer.status_code == 200
    assert answer.json()["outputs"][0]["data"] == [3, 5, 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path) as made:
        yield made
