"""Types of the shared fixtures, and what several tests check with; the fixtures themselves are in conftest.py."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).parents[1]
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0")
"""Options of ``ingot serve``, so that servers on the usual ports do not matter."""


def matrix(*values: Any) -> list[Any]:
    """Return parameters of which `make test` runs the first, and `make test-matrix` the others."""
    first, *others = values
    return [first, *(pytest.param(other, marks=pytest.mark.matrix) for other in others)]


# Commands that end by themselves and answer to no signal: a separate process would prove nothing more, and take
# a second, or three where PyTorch is imported.
_IN_PROCESS = """
bench compare config copy deploy diff export graph import infer inspect quantize server store trust
"""
IN_PROCESS = frozenset(_IN_PROCESS.split())


class RunIngot(Protocol):
    """Runs ``ingot ARGS`` with a store of the test's own: in this process where that suffices, otherwise in another."""

    def __call__(self, *args: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]: ...


class RequireTool(Protocol):
    """Returns the path of a system tool; skips the test without it, or fails when INGOT_REQUIRE_TOOLS is 1."""

    def __call__(self, name: str) -> str: ...


def run_in_process(args: list[str], cwd: Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the command as ``python -m ingot ARGS`` would, with its own streams, environment and working folder."""
    from ingot.cli import main, output

    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    code: int | str | None = 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Warning filters of a new interpreter; pytest's would turn all warnings into errors.
        warnings.resetwarnings()
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        patch.setattr(sys, "path", [str(cwd), *sys.path])
        patch.chdir(cwd)
        patch.setenv("INGOT_HOME", str(home))
        patch.setattr(sys, "argv", ["ingot", *args])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        patch.setattr(output, "_STDERR", streams[1])
        output.stdout.cache_clear()
        output.stderr.cache_clear()
        try:
            main.run()
        except SystemExit as end:
            code = end.code
        finally:
            output.stdout.cache_clear()
            output.stderr.cache_clear()
            for name, module in list(sys.modules.items()):  # another test's folder has modules of the same names
                if (getattr(module, "__file__", None) or "").startswith(f"{cwd}/"):
                    del sys.modules[name]
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in streams)
    status = code if isinstance(code, int) else int(code is not None)
    return subprocess.CompletedProcess(["ingot", *args], status, stdout, stderr)


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "Warning" not in result.stderr
    return result.stdout


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """Check that a command failed as commands must: one paragraph on stderr, nothing on stdout, exit code 1."""
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "bug in Ingot" not in result.stderr
    return result.stderr.removeprefix("error: ").rstrip()


def run_python(code: str, **variables: str) -> str:
    """Run a program in a fresh interpreter, with these environment variables, and return what it prints."""
    command, environment = [sys.executable, "-c", code], os.environ | variables
    result = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment)
    return result.stdout


class Page(HTMLParser):
    """Checks that elements are closed in order, and collects the text and the attributes."""

    VOID = ("meta", "br")

    def __init__(self, page: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] != ["style"]:
            self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def count(self, tag: str, kind: str | None = None, **attributes: str) -> int:
        """Return the number of elements with these attributes; ``kind`` is their class."""
        if kind is not None:
            attributes["class"] = kind
        return sum(tag == name and attributes.items() <= found.items() for name, found in self.seen)
