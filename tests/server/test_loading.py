"""Models that never become ready: the command ends by its limit, and by a signal."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import onnx_models
from tests.server.outside import wait_until
from tests.support import FREE_PORTS, RunIngot, refused

Endless = Callable[[Path], Path]
both = pytest.mark.parametrize("endless", [onnx_models.endless_load, onnx_models.endless_run])


@both
@pytest.mark.matrix
def test_the_command_ends_when_the_limit_is_reached(run_ingot: RunIngot, tmp_path: Path, endless: Endless) -> None:
    endless(tmp_path / "odd.onnx")
    message = refused(run_ingot("serve", "odd.onnx", *FREE_PORTS, "--load-timeout", "1s"))
    assert message.startswith("model 'odd' version 1 was not ready within 1s")
    assert "raise --load-timeout (INGOT_LOAD_TIMEOUT; 0 means no limit)" in message


@both
@pytest.mark.matrix
def test_the_limit_also_ends_the_python_call(tmp_path: Path, endless: Endless) -> None:
    program = f"""
import os, ingot
from ingot.errors import DeadlineExceeded
try:
    ingot.serve({str(endless(tmp_path / "odd.onnx"))!r}, http_port=0, grpc_port=0, load_timeout=1)
except DeadlineExceeded as error:
    print(error, flush=True)
os._exit(0)  # the engine never ends
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "model 'odd' version 1 was not ready within 1s" in result.stdout


@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("options", [(), ("--isolate", "none")], ids=["", "inside"])
@pytest.mark.matrix
def test_one_signal_ends_the_command(
    tmp_path: Path, endless: Endless, number: signal.Signals, options: tuple[str, ...]
) -> None:
    endless(tmp_path / "odd.onnx")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "ingot", "serve", "odd.onnx", "--http-port", str(port), "--grpc-port", "0"]
    with subprocess.Popen([*command, *options], cwd=tmp_path, env={**os.environ, "INGOT_LOAD_TIMEOUT": "0"}) as process:
        try:
            wait_until(lambda: _live(port))  # the ports are open before models are loaded
            process.send_signal(number)
            assert process.wait(60) == 0
        finally:
            process.kill()


def _live(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/live", timeout=5):
            return True
    except OSError:
        return False
