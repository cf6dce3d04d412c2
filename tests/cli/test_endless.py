"""ONNX files whose load or run never ends, passed to ``ingot export`` and ``ingot import``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import onnx_models
from tests.support import ROOT, RunIngot, refused

Endless = Callable[[Path], Path]
both = pytest.mark.parametrize("endless", [onnx_models.endless_load, onnx_models.endless_run])
# Announces each call of the engine.
PROGRAM = """
import sys
from onnxruntime import InferenceSession
init, run = InferenceSession.__init__, InferenceSession.run

def announced(of):
    def call(*args, **named):
        print("engine", flush=True)
        return of(*args, **named)
    return call

InferenceSession.__init__, InferenceSession.run = announced(init), announced(run)
from ingot.__main__ import main
main()
"""


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@both
@pytest.mark.one_case
@pytest.mark.one_case
@pytest.mark.matrix
def test_the_command_ends_when_the_limit_is_reached(
    run_ingot: RunIngot, tmp_path: Path, scratch: Path, endless: Endless
) -> None:
    endless(tmp_path / "odd.onnx")
    message = refused(run_ingot("export", "odd.onnx", "-o", "odd.ingot", "--load-timeout", "1s"))
    assert message.startswith("odd.onnx did not load and answer within 1s")
    assert "raise --load-timeout (0 means no limit)" in message
    assert not list(scratch.glob("ingot-*"))
    assert not (tmp_path / "odd.ingot").exists()


@pytest.mark.matrix
def test_the_limit_also_ends_an_import(run_ingot: RunIngot, tmp_path: Path, scratch: Path) -> None:
    onnx_models.endless_load(tmp_path / "odd.onnx")
    message = refused(run_ingot("import", "odd.onnx", "-o", "odd.ingot", "--load-timeout", "3s"))
    assert message.startswith("odd.onnx did not load and answer within 3s")
    assert not (tmp_path / "odd.ingot").exists()


@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.one_case
@pytest.mark.matrix
def test_one_signal_ends_the_command(tmp_path: Path, scratch: Path, endless: Endless, number: signal.Signals) -> None:
    endless(tmp_path / "odd.onnx")
    command = [sys.executable, "-c", PROGRAM, "export", "odd.onnx", "-o", "odd.ingot"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    calls = 1 if endless is onnx_models.endless_load else 2
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            for _ in range(calls):
                assert process.stdout.readline() == b"engine\n"
            process.send_signal(number)
            assert process.wait(60) == 128 + number
        finally:
            late.cancel()
            process.kill()
    assert not list(scratch.glob("ingot-*"))


@pytest.mark.matrix
def test_ctrl_c_is_confirmed_while_an_engine_is_working(tmp_path: Path, scratch: Path) -> None:
    onnx_models.endless_load(tmp_path / "odd.onnx")
    patient = PROGRAM.replace("main()", "from ingot.cli import interrupts\ninterrupts.GRACE = 600\nmain()")
    command = [sys.executable, "-c", patient, "export", "odd.onnx", "-o", "odd.ingot"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        late = threading.Timer(120, process.kill)
        late.start()
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == b"engine\n"
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == b"interrupted\n"
            assert process.poll() is None
        finally:
            late.cancel()
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.matrix
def test_a_signal_whose_exception_was_ignored_ends_the_command(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "odd.py").write_text(
        f"""
import os, time
import torch

class Left:
    def __del__(self):
        os.kill(os.getpid(), {number.value})
        time.sleep(1)

class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        Left()
        print("ignored", flush=True)
        time.sleep(100)
"""
    )
    command = [sys.executable, "-m", "ingot", "export", "odd:Odd", "--input", "x:float32[2]", "-o", "odd.ingot"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90)
    assert result.returncode == 128 + number
    assert "ignored" in result.stdout


def test_a_limit_that_is_not_a_duration_is_refused(run_ingot: RunIngot) -> None:
    assert "--load-timeout 'soon' is not a duration" in refused(
        run_ingot("export", "a.onnx", "-o", "a.ingot", "--load-timeout", "soon")
    )
