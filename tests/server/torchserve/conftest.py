from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import ingot
from ingot import RunningServer, Store
from ingot.model_store import Archive
from tests import onnx_models
from tests.server.test_image_steps import make

PORTS = "0,0,0,0,0"


def net(folder: Path) -> Archive:
    """Return an archive of y = [sum of the columns of x, itself times 2]."""
    return ingot.export_model(onnx_models.affine(folder), name="net")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with ``net`` in two versions, and a classifier of pictures."""
    folder = tmp_path_factory.mktemp("torchserve")
    store = Store(folder / "store")
    archive = net(folder)
    for target in ("net:1", "net:2", "other:1"):
        store.push(archive, target)
    store.push(make(folder), "colour:1")
    return store


@pytest.fixture(scope="session")
def torchserve(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    models = [str(build(folder)) for build in (onnx_models.affine, onnx_models.pair, onnx_models.unbatched)]
    with ingot.serve(
        "colour:1",
        *models,
        store=store,
        http_port=0,
        grpc_port=0,
        torchserve=True,
        torchserve_ports=PORTS,
        insecure=True,
        max_body_mb=4,
    ) as running:
        yield running


def client(server: RunningServer, name: str) -> httpx.Client:
    return httpx.Client(base_url=server.torchserve_urls[name], trust_env=False, timeout=60)


@pytest.fixture(scope="session")
def inference(torchserve: RunningServer) -> Iterator[httpx.Client]:
    with client(torchserve, "inference") as found:
        yield found


@pytest.fixture(scope="session")
def management(torchserve: RunningServer) -> Iterator[httpx.Client]:
    with client(torchserve, "management") as found:
        yield found
