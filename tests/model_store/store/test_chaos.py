"""No state is lost or torn while many processes use a store and are killed at any moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT


@pytest.mark.parametrize("seconds", [3, pytest.param(120, marks=pytest.mark.long)])
@pytest.mark.matrix
def test_eight_processes_that_are_killed_at_random(tmp_path: Path, seconds: int) -> None:
    command = [sys.executable, "-m", "tests.model_store.chaos", str(tmp_path / "run" / "store"), str(seconds), "5"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=seconds + 120)
    assert result.returncode == 0, result.stdout + result.stderr
    told = json.loads(result.stdout)
    assert told["faults"] == []
    assert told["killed"] > seconds
    assert {"push", "promote", "collect", "read"} <= set(told["done"])
