from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def without_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("REGISTRY_AUTH_FILE", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
