from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT

_ENDLESS = """
import subprocess, sys
from pathlib import Path

def test_endless():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path("pid").write_text(f"{process.pid} ")
    process.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.matrix
def test_an_interrupted_run_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "test_endless.py").write_text(_ENDLESS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.reaper", "-c", "/dev/null", str(tmp_path)]
    pid = tmp_path / "pid"
    with subprocess.Popen(
        command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT), "PATH": ""}, stdout=subprocess.DEVNULL
    ) as run:
        _wait_until(lambda: pid.exists() and pid.read_text().endswith(" "))
        run.send_signal(number)
    child = Path("/proc", pid.read_text().strip())
    _wait_until(lambda: not child.exists())


def _wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)
