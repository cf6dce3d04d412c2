from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as gpu
from tests import onnx_models


def test_it_prints_a_row_for_each_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs on the CPU, where there is no pipeline; on a GPU the program is the same."""
    path = onnx_models.affine(tmp_path)
    arguments = [str(path), "--device", "cpu", "--batches", "1,4", "--seconds", "0.01"]
    monkeypatch.setattr(sys, "argv", ["benchmarks.gpu", *arguments])
    gpu.main()
    printed = capsys.readouterr().out
    assert printed.count("x \u2502") == 2
    assert "pipeline off" in printed
