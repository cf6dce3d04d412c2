"""``ingot export`` from the shell: its ways of looking into a model, and leaving nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support import ROOT, RunIngot

ROWS = "x:float32[batch,4]"


def test_the_report_travels_in_the_archive(run_ingot: RunIngot, tmp_path: Path) -> None:
    out = tmp_path / "net.ingot"
    assert run_ingot("export", "tests.export.models:net", "--input", ROWS, "--out", out).returncode == 0
    for suffix in ("html", "json", "txt"):
        result = run_ingot("inspect", out, "--report", tmp_path / f"net.{suffix}")
        assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "net.json").read_text())
    assert report["attempts"] == [{"route": "export", "failure": ""}]
    assert {stage["name"] for stage in report["stages"]} >= {"probe", "capture", "lower", "pack"}
    assert next(graph["title"] for graph in report["graphs"]) == "FX graph as captured"
    HTMLParser().feed((tmp_path / "net.html").read_text())
    assert "aten.linear.default" in (tmp_path / "net.html").read_text()
    assert "aten.linear.default" in (tmp_path / "net.txt").read_text()


def test_a_report_of_another_kind_is_refused(run_ingot: RunIngot, digits_archive: Path, tmp_path: Path) -> None:
    result = run_ingot("inspect", digits_archive, "--report", tmp_path / "a.pdf")
    assert result.returncode == 1
    assert "no report.pdf" in result.stderr


def test_the_plan_needs_no_place_for_an_archive(run_ingot: RunIngot) -> None:
    result = run_ingot("export", "tests.export.models:net", "--input", ROWS, "--plan", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["weights"]


def test_bisecting_a_sound_model_finds_nothing(run_ingot: RunIngot) -> None:
    result = run_ingot("export", "tests.export.models:net", "--input", ROWS, "--bisect", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["departure"] is None
    assert found["cases"] > 4


def test_a_failure_shows_the_line_and_an_edit(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot("export", "tests.export.models:Branch", "--input", ROWS, "--out", tmp_path / "a.ingot")
    assert result.returncode == 1
    assert "if x.sum() > 0:" in result.stderr
    assert "torch.cond(x.sum() > 0" in result.stderr
    assert not (tmp_path / "a.ingot").exists()


def test_explain_looks_further(run_ingot: RunIngot, tmp_path: Path) -> None:
    out = tmp_path / "a.ingot"
    result = run_ingot("export", "tests.export.models:Branch", "--input", ROWS, "--out", out, "--explain")
    assert result.returncode == 1
    assert "the decision:" in result.stderr


@pytest.mark.parametrize("constant", ["flag", "=1"])
def test_a_malformed_constant(run_ingot: RunIngot, tmp_path: Path, constant: str) -> None:
    result = run_ingot(
        "export", "tests.export.models:net", "--input", ROWS, "--constant", constant, "--out", tmp_path / "a.ingot"
    )
    assert result.returncode == 1
    assert f"'{constant}' is no constant; write name=value" in result.stderr


SLOW = """
import time
import torch

class Slow(torch.nn.Module):
    def forward(self, x):
        print("running", flush=True)
        time.sleep(0.5)
        return x * 2
"""


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ingot", "export", "slow:Slow", "--input", ROWS, "--out", "slow.ingot"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):  # in the midst of the proofs
            assert process.stdout.readline() == "running\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (tmp_path / "slow.ingot").exists()
    assert [path.name for path in temporary.iterdir() if path.name.startswith("ingot-")] == []
