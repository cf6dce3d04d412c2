from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

import ingot
from ingot import RunningServer
from tests.server.completion import written


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of decoders: one that writes greedily, one that draws, and one without a chat template."""
    folder = tmp_path_factory.mktemp("writers")
    made = [
        written.archive(folder),
        written.archive(folder, "draws", defaults=written.DRAWS),
        written.archive(folder, "plain", chat_template=""),
        written.archive(folder, "ids", chat_template="", tokenizer=""),
    ]
    with ingot.serve(*map(str, made), http_port=0, grpc_port=0, slots=4, isolate="none") as running:
        yield running


@pytest.fixture(scope="package")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client:
        yield client
