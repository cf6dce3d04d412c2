"""The benchmark of tokens: what its ways need."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.generation import openvino
from benchmarks.generation.load import asked


def test_a_way_that_is_not_installed_names_its_command(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"pip install -r benchmarks/generation/requirements-openvino\.txt"):
        openvino.rate(tmp_path / "gpt2", asked(1), 1, 1, "fp32")


def test_answers_of_another_length_are_no_figures(tmp_path: Path) -> None:
    """The program's failure ends the benchmark with its message."""
    binaries = tmp_path / "openvino-env" / "bin"
    binaries.mkdir(parents=True)
    for name in ("optimum-cli", "python"):
        (binaries / name).write_text("#!/bin/sh\necho answers have 3 tokens >&2; exit 1\n")
        (binaries / name).chmod(0o755)
    (tmp_path / "gpt2-openvino-int8").mkdir()
    (tmp_path / "gpt2-openvino-int8" / "openvino_model.bin").touch()
    with pytest.raises(SystemExit, match="failed: answers have 3 tokens"):
        openvino.rate(tmp_path / "gpt2", asked(1), 1, 1, "int8")
