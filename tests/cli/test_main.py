from __future__ import annotations

import errno
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import ingot
from ingot._build import BUILD
from ingot.cli.main import RENAMED, app
from ingot.cli.options import with_options
from ingot.config import ServerConfig
from ingot.model_store import Store
from tests import onnx_models
from tests.runtime.variants import Made, archive
from tests.support import RunIngot, run_python, succeeded

COMMANDS = [
    *("export", "import", "quantize", "compare"),
    *("inspect", "diff", "graph", "profile", "copy", "store", "trust"),
    *("serve", "server", "infer", "bench", "config", "deploy", "demo"),
]


def test_the_commands_are_those_that_are_documented() -> None:
    names = [command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands]
    groups = [group.name for group in app.registered_groups]
    assert sorted([*names, *map(str, groups)]) == sorted(COMMANDS)


@pytest.mark.matrix
def test_help_lists_every_command_and_version_is_the_packages(run_ingot: RunIngot) -> None:
    shown = run_ingot("--help").stdout
    for name in COMMANDS:
        assert re.search(rf"^\W*{name}\s", shown, re.MULTILINE)
    assert run_ingot("--version").stdout == f"ingot {ingot.__version__} ({BUILD})\n"
    assert run_ingot().stdout.strip() == shown.strip()


@dataclass(frozen=True, kw_only=True)
class Load:
    rate: Annotated[float, typer.Option(help="Requests per second.")]
    clients: Annotated[int, typer.Option("--clients", "-c", envvar="CLIENTS")] = 4


def test_a_group_of_options_is_one_argument_in_its_panel() -> None:
    made, seen = typer.Typer(), list[tuple[object, ...]]()

    @made.command()
    @with_options
    def command(name: Annotated[str, typer.Argument()], load: Annotated[Load, "Load"], quiet: bool = False) -> None:
        seen.append((name, load, quiet))

    assert CliRunner().invoke(made, ["digits", "--rate", "2", "--quiet"], env={"CLIENTS": "3"}).exit_code == 0
    assert seen == [("digits", Load(rate=2.0, clients=3), True)]
    shown = CliRunner().invoke(made, ["--help"]).stdout
    assert shown.index("--quiet") < shown.index(" Load ") < shown.index("--rate") < shown.index("--clients")
    refused = CliRunner().invoke(made, ["digits"])
    assert (refused.exit_code, len(seen)) == (2, 1)
    assert "Missing option '--rate'" in refused.output


@dataclass(frozen=True)
class Units:
    load: Annotated[str, typer.Option()] = "requests"


@dataclass(frozen=True)
class Listed:
    names: Annotated[list[str], typer.Option()] = field(default_factory=list)


def test_an_option_may_have_the_name_of_a_group_but_no_default_that_is_made() -> None:
    def command(load: Load, units: Units) -> tuple[Load, Units]:
        return load, units

    def listing(listed: Listed) -> None: ...

    run: Callable[..., object] = with_options(command)
    assert run(rate=2.0, clients=3, load="tokens") == (Load(rate=2.0, clients=3), Units("tokens"))
    with pytest.raises(TypeError, match=r"Listed\.names has a default_factory"):
        with_options(listing)


@pytest.mark.one_case
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run_ingot: RunIngot, command: str) -> None:
    result = run_ingot(command, "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    assert f"ingot {command}" in result.stdout
    assert "--help" in result.stdout
    assert "typer." not in result.stdout


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("arguments", "new"),
    [
        (["push", "a.ingot", "a:1"], "'ingot push' is now 'ingot copy ARCHIVE NAME:TAG'"),
        (["keygen"], "'ingot keygen' is now 'ingot trust keygen'"),
        (["ctl", "status"], "'ingot ctl' is now 'ingot server'"),
        (["plan-capacity", "--help"], "'ingot plan-capacity' is now 'ingot deploy capacity'"),
        (["load", "x"], "'ingot load' is now 'ingot copy FILE'; did you mean 'ingot server load'?"),
        (["reload"], "No such command 'reload'; did you mean 'ingot server reload'?"),
        (["capacity"], "No such command 'capacity'; did you mean 'ingot deploy capacity'?"),
        (["create"], "No such command 'create'; did you mean 'ingot server keys create'?"),
        (["serve", "x:1", "--no-watch"], "No such option: --no-watch; write --watch off."),
        (["config", "show", "--no-management"], "No such option: --no-management; write --management off."),
        (["serve", "--sticky-header=x"], "No such option: --sticky-header; set sticky_header in ingot.toml."),
        (["serve", "--canary", "5,25"], "set canary in ingot.toml, or see ingot server canary --help."),
    ],
)
def test_the_error_for_former_and_ungrouped_words_has_the_new_ones(
    run_ingot: RunIngot, arguments: list[str], new: str
) -> None:
    result = run_ingot(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    text = " ".join(result.stderr.replace("│", " ").split())  # typer draws a box around it
    assert new in text


@pytest.mark.one_case
@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_former_commands_have_become_commands(run_ingot: RunIngot, old: str, new: str) -> None:
    assert old not in COMMANDS
    words = [word for word in new.split() if word.islower() and "/" not in word]
    assert f"ingot {' '.join(words)}" in succeeded(run_ingot(*words, "--help"))


def test_the_help_of_serve_fits_two_screens_and_help_all_has_every_setting(run_ingot: RunIngot) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        short, everything = run_ingot("serve", "--help").stdout, run_ingot("serve", "--help-all").stdout
    assert len(short.splitlines()) <= 96  # two screens of 48 lines
    settings = [setting for setting in ServerConfig.settings().values() if not setting.file_only]
    shown = [setting.name for setting in settings if f"{setting.option} " in short]
    assert 18 <= len(shown) <= 24
    assert [setting.name for setting in settings if setting.option not in everything] == []


@pytest.mark.parametrize("arguments", [["frobnicate"], ["export"], ["store", "list", "--nope"]])
def test_a_misspelt_command_line_is_exit_code_2(run_ingot: RunIngot, arguments: list[str]) -> None:
    result = run_ingot(*arguments)
    assert result.returncode == 2
    assert "Usage:" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/tmp/ingot-1"),
            "no space is left for /tmp/ingot-1: free some",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space is left: free some"),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "no space is left: free"),
    ],
)
def test_a_full_temporary_folder_is_no_bug(
    run_ingot: RunIngot, monkeypatch: pytest.MonkeyPatch, error: OSError, found: str
) -> None:
    def full(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    result = run_ingot("export", "m:M", "--out", "m.ingot")
    assert result.returncode == 1
    assert found in result.stderr
    assert "set TMPDIR to a folder with free space" in result.stderr


_INTERRUPTED = """
import runpy, signal, sys
from importlib.abc import MetaPathFinder

class Interrupt(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            {interrupt}

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["serve", {model!r}, "--http-port", "0", "--grpc-port", "0"]
runpy.run_module("ingot", run_name="__main__", alter_sys=True)
"""


@pytest.mark.one_case
@pytest.mark.parametrize(
    "module", ["ingot.cli.main", "typer", "ingot.cli.serving.serve", "ingot.server.lifecycle", "uvloop"]
)
def test_ctrl_c_while_modules_are_read_prints_one_word(module: str) -> None:
    interrupt = "signal.raise_signal(signal.SIGINT)"
    code = _INTERRUPTED.format(module=module, interrupt=interrupt, model="nowhere.onnx")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr.strip()) == (130, "", "interrupted")


@pytest.mark.matrix
@pytest.mark.parametrize("module", ["typer", "ingot.server.lifecycle"])
def test_ctrl_c_that_the_interpreter_passes_over_starts_no_server(module: str, tmp_path: Path) -> None:
    """As it does with all that is raised in some callbacks, which imports are full of."""
    model = str(onnx_models.affine(tmp_path))
    code = _INTERRUPTED.format(module=module, interrupt="Dropped()", model=model)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "Exception ignored" in result.stderr
    assert (result.returncode, result.stdout) == (130, "")


@pytest.mark.matrix
def test_the_end_of_a_command_collects_no_garbage() -> None:
    """The interpreter does so with all objects that are not frozen: with PyTorch's, for seconds."""
    lines = ["import atexit, gc, sys", "from ingot.cli import main", "sys.argv = ['ingot', '--version']"]
    lines += ["atexit.register(lambda: print('frozen', gc.get_freeze_count() > len(gc.get_objects())))", "main.main()"]
    assert run_python("\n".join(lines)).splitlines()[-1] == "frozen True"


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("shell", "words", "found"),
    [
        ("bash", "ingot inspect dig", ["digits:1", "digits:prod"]),
        ("bash", "ingot inspect digits : p", ["prod"]),  # bash splits words at colons
        ("zsh", "ingot inspect digits:p", [r"""_arguments '*: :(("digits\\:prod"))'"""]),
        ("fish", "ingot store history t", ["team/net"]),
    ],
)
def test_the_shell_completes_commands_models_and_tags(tmp_path: Path, shell: str, words: str, found: list[str]) -> None:
    store = Store(tmp_path)
    for reference in ("digits:1", "digits:prod", "team/net:2"):
        store.push(archive([Made("fp32")]), reference)
    asked = {"_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    if shell == "bash":
        asked = {"COMP_WORDS": words.replace(" ", "\n"), "COMP_CWORD": str(words.count(" "))}
    asked |= {"INGOT_HOME": str(tmp_path), "_INGOT_COMPLETE": f"complete_{shell}"}
    code = "import sys; from ingot.cli.main import main; sys.argv[:] = ['ingot']; main()"
    assert run_python(code, **asked).splitlines() == found
