from __future__ import annotations

import re
import subprocess
import sys

import pytest

import ingot
from ingot.cli.main import app
from tests.support import RunIngot

COMMANDS = [
    *("export", "import", "quantize", "compare"),
    *("inspect", "diff", "push", "pull", "copy", "save", "load"),
    *("list", "history", "promote", "rollback", "remove", "fsck", "gc"),
    *("keygen", "sign", "verify"),
    *("serve", "infer", "demo"),
]


def test_the_commands_are_those_that_are_documented() -> None:
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    assert names == COMMANDS


def test_help_lists_every_command_and_version_is_the_packages(run_ingot: RunIngot) -> None:
    shown = run_ingot("--help").stdout
    for name in COMMANDS:
        assert re.search(rf"^\W*{name}\s", shown, re.MULTILINE)
    assert run_ingot("--version").stdout == f"ingot {ingot.__version__}\n"
    assert run_ingot().stdout.strip() == shown.strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run_ingot: RunIngot, command: str) -> None:
    result = run_ingot(command, "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    assert f"ingot {command}" in result.stdout
    assert "--help" in result.stdout
    assert "typer." not in result.stdout


@pytest.mark.parametrize("arguments", [["frobnicate"], ["export"], ["list", "--nope"]])
def test_a_misspelt_command_line_is_exit_code_2(run_ingot: RunIngot, arguments: list[str]) -> None:
    result = run_ingot(*arguments)
    assert result.returncode == 2
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.stderr


_INTERRUPTED = """
import runpy, signal, sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["serve", "nowhere.onnx"]
runpy.run_module("ingot", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("module", ["ingot.cli.main", "typer", "ingot.cli.serve", "ingot.server.lifecycle", "uvloop"])
def test_ctrl_c_while_modules_are_read_is_quiet(module: str) -> None:
    command = [sys.executable, "-c", _INTERRUPTED.format(module=module)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.strip()) == (130, "", "")
