"""Clients of other servers, unmodified, in a separate environment: only the address differs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot import RunningServer
from tests.server import test_apis, test_steps

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
TEXTS = ["a fine film", "good", "the story was never dull"]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clients") / "env"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(HERE / "api_clients.txt")]
    subprocess.run([python, *install], check=True)
    return python


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("models")
    models = {"table": test_apis.table, "ranker": test_apis.ranker, "length": test_steps.make}
    for name, make in models.items():
        make(folder).save(folder / f"{name}.ingot")
    with ingot.serve(*(str(folder / f"{name}.ingot") for name in models), http_port=0, grpc_port=0) as running:
        yield running


def vectors() -> list[list[float]]:
    return [test_apis.mean(*text.split()).tolist() for text in TEXTS]


@pytest.fixture(scope="module")
def found(python: Path, server: RunningServer) -> dict[str, Any]:
    command = [str(python), str(HERE / "api_clients.py"), server.http_url, json.dumps(TEXTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


@pytest.mark.parametrize("client", ["openai", "openai, async", "openai, floats", "langchain", "llama-index", "hub"])
def test_embeddings(found: dict[str, Any], client: str) -> None:
    np.testing.assert_allclose(found[client], vectors(), atol=1e-6)


def test_other_tasks(found: dict[str, Any]) -> None:
    assert [item[0] for item in found["hub, classes"]] == ["LONG", "SHORT"]
    assert found["hub, similarity"] == pytest.approx([1.0], abs=1e-6)
    assert found["cohere"] == [1, 2]
    assert found["openai, models"] == ["table", "ranker", "length"]


def test_errors_are_read_by_the_clients(found: dict[str, Any]) -> None:
    assert "check_embedding_ctx_length=False" in found["langchain, ids"]
    assert found["openai, error"] == ["BadRequestError", "dimensions"]
