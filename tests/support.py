"""Types of the shared fixtures, and small helpers; the fixtures themselves are in conftest.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).parents[1]


def matrix(*values: Any) -> list[Any]:
    """Return parameters of which `make test` runs the first, and `make test-matrix` the others."""
    first, *others = values
    return [first, *(pytest.param(other, marks=pytest.mark.matrix) for other in others)]


class RunIngot(Protocol):
    """Runs ``python -m ingot ARGS`` in a subprocess whose store is the test's own."""

    def __call__(self, *args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]: ...


class RequireTool(Protocol):
    """Returns the path of a system tool; skips the test without it, or fails when INGOT_REQUIRE_TOOLS is 1."""

    def __call__(self, name: str) -> str: ...


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr
    return result.stdout


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """Check that a command failed as every one must: one paragraph on stderr, nothing on stdout, exit code 1."""
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "bug in Ingot" not in result.stderr
    return result.stderr.removeprefix("error: ").rstrip()


def run_python(code: str) -> str:
    """Run a program in a fresh interpreter and return what it prints."""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return result.stdout
