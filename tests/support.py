"""Types of the shared fixtures, and small helpers; the fixtures themselves are in conftest.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Protocol

ROOT = Path(__file__).parents[1]


class RunIngot(Protocol):
    """Runs ``python -m ingot ARGS`` in a subprocess whose store is the test's own."""

    def __call__(self, *args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]: ...


class RequireTool(Protocol):
    """Returns the path of a system tool; skips the test without it, or fails when INGOT_REQUIRE_TOOLS is 1."""

    def __call__(self, name: str) -> str: ...


def run_python(code: str) -> str:
    """Run a program in a fresh interpreter and return what it prints."""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return result.stdout
