from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.model_store.registry.fake import Fake
from tests.model_store.registry.proxy import Server, serving
from tests.model_store.samples import archive
from tests.support import RequireTool

MODEL = archive(weights=(b"w" * 5000,))


@pytest.fixture
def fake() -> Fake:
    """A registry with the archive ``tiny:1``."""
    registry = Fake()
    registry.put(MODEL, "1")
    return registry


@pytest.fixture
def server(fake: Fake) -> Iterator[Server]:
    with serving(answer=fake) as server:
        yield server


@pytest.fixture
def without_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))


@pytest.fixture
def certificate(require_tool: RequireTool, tmp_path: Path) -> Path:
    """A key and a certificate that it signed itself, in one file."""
    path = tmp_path / "server.pem"
    options = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(path), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([require_tool("openssl"), *options.split(), *names, *files], check=True, capture_output=True)
    path.write_text(path.read_text() + (tmp_path / "cert.pem").read_text())
    return path
