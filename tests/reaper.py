"""End processes that tests leave running, also when pytest is interrupted or killed.

Every process that a test starts inherits a variable; a small process that outlives pytest ends all processes with it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

VARIABLE = "TESTS_SESSION"
_REAPER = f"""
import os, signal, sys
from pathlib import Path
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.read()  # to the end of pytest, which holds the other end
mark = b"{VARIABLE}=" + sys.argv[1].encode()
for folder in Path("/proc").glob("[0-9]*"):
    try:
        if mark in (folder / "environ").read_bytes().split(bytes(1)) and int(folder.name) != os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)
    except OSError:
        pass
"""
_held: list[subprocess.Popen[bytes]] = []


def pytest_configure(config: pytest.Config) -> None:
    """Start the reaper of this process: pytest's own, or one of its workers."""
    if sys.platform != "linux" or _held:
        return
    token = uuid.uuid4().hex
    command = [sys.executable, "-S", "-c", _REAPER, token]
    _held.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True))
    os.environ[VARIABLE] = token


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let the reaper end the remaining processes."""
    for process in _held:
        process.communicate(timeout=60)
    _held.clear()
