"""The servers that are compared, each with its own environment."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.texts import corpus
from ingot.tensors import Array

_PEERS = Path(__file__).parent / "peers"
# Without CUDA: where pip offers other builds, give it an index of CPU wheels first.
_CONSTRAINTS = _PEERS.parents[1] / "serving" / "peers" / "constraints.txt"


@dataclass(frozen=True)
class Server:
    """A server of ``/v1/embeddings``; ``options`` are for this one."""

    name: str
    options: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return "/embeddings" if self.name == "infinity" else "/v1/embeddings"

    @property
    def own(self) -> bool:
        """Whether it is this server."""
        return self.name.startswith("ingot")

    def python(self, build: Path) -> Path:
        return Path(sys.executable) if self.own else build / "envs" / self.name / "bin" / "python"

    def command(self, build: Path, archive: Path, port: int) -> list[str]:
        """Return the command that starts it."""
        python, model = str(self.python(build)), str(corpus.folder())
        if self.own:
            ports = ["--http-port", str(port), "--grpc-port", "0", "--device", "cpu"]
            return [python, "-m", "ingot", "serve", str(archive), *ports, *self.options]
        if self.name == "naive":
            return [python, str(_PEERS / "naive.py"), model, str(port)]
        program = str(self.python(build).parent / "infinity_emb")
        options = ["--engine", "torch", "--device", "cpu", "--served-model-name", "minilm", "--port", str(port)]
        return [program, "v2", "--model-id", model, "--host", "127.0.0.1", "--no-bettertransformer", *options]

    def install(self, build: Path) -> None:
        """Make its environment.

        Raises:
            CalledProcessError: pip failed.
        """
        folder = build / "envs" / self.name
        if self.own or (folder / "installed").exists():
            return
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        given = ["-c", str(_CONSTRAINTS), "-r", str(_PEERS / f"requirements-{self.name}.txt")]
        subprocess.run([str(self.python(build)), "-m", "pip", "install", "-q", *given], check=True)
        (folder / "installed").touch()

    def body(self, texts: Sequence[str]) -> bytes:
        """Return a request as the SDK of OpenAI sends it."""
        return json.dumps({"model": "minilm", "input": list(texts), "encoding_format": "base64"}).encode()


def vectors(answer: bytes) -> Array:
    """Return the vectors of an answer, float32[n, d]."""
    items: list[dict[str, Any]] = sorted(json.loads(answer)["data"], key=lambda item: int(item["index"]))
    return np.stack([_vector(item["embedding"]) for item in items])


def _vector(given: str | list[float]) -> Array:
    if isinstance(given, str):
        return np.frombuffer(base64.b64decode(given), "<f4")
    return np.array(given, np.float32)
