"""Clients of OpenAI's API, unmodified, in separate environments, on a model that writes text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ingot
from tests.server.completion import written

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
PROMPT = "hello there"


@pytest.mark.parametrize(
    ("library", "packages"), [("langchain", "api_clients.txt"), ("llama-index", "llama_clients.txt")]
)
def test_clients_get_the_texts_of_the_model(tmp_path: Path, library: str, packages: str) -> None:
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "-r", str(HERE / packages)]
    subprocess.run([python, *install], check=True)
    check(str(python), library, tmp_path)


def check(python: str, library: str, folder: Path) -> None:
    """Run the clients of an environment, and compare what they print."""
    with ingot.serve(str(written.archive(folder)), http_port=0, grpc_port=0) as server:
        command = [python, str(HERE / "writing_clients.py"), server.http_url, written.NAME, PROMPT, library]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    behind, next_message = (written.text(prompt, 12) for prompt in (PROMPT, f"u:{PROMPT};a:"))
    assert found.pop("openai, usage") == ["assistant", [], 12]
    assert "".join(found.pop("openai, logprobs")) == next_message[:3]
    assert found.pop("openai, errors") == [["BadRequestError", "logit_bias"], ["NotFoundError", None]]
    assert found.pop("openai, models") == [written.NAME]
    assert found == {name: next_message if "chat" in name or "async" in name else behind for name in found}
    assert len(found) == 11
