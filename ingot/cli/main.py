"""The ``ingot`` command, and the errors and exit codes of its subcommands."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ingot._build import BUILD
from ingot._version import __version__
from ingot.cli import completion, interrupts
from ingot.cli.output import note, stderr
from ingot.errors import FULL_DISK, Code, IngotError

if TYPE_CHECKING:
    app: typer.Typer  # created on first access

# Long commands that use temporary folders. Those that serve handle signals themselves.
_LONG = ("export", "import", "quantize", "compare", "copy", "trust sign", "deploy capacity")
# The panels of the help with the function of each command; only the called command's module is imported.
_COMMANDS = {
    "Create models": {
        "export": "create.export.export",
        "import": "create.importing.import_model",
        "quantize": "create.quantize.quantize",
        "compare": "archives.compare.compare",
    },
    "Inspect, move and sign archives": {
        "inspect": "archives.inspect.inspect",
        "diff": "archives.compare.diff",
        "graph": "archives.graph.graph",
        "profile": "archives.profile.profile",
        "copy": "archives.transfers.copy",
        "store": "store.store",
        "trust": "archives.trust.trust",
    },
    "Serve models": {
        "serve": "serving.serve.serve",
        "server": "server.server",
        "infer": "serving.infer.infer",
        "bench": "serving.bench.bench",
        "config": "serving.config.config",
        "deploy": "deploy.deploy.deploy",
        "demo": "demo.demo.demo",
    },
}
# Former commands, and what replaced them.
RENAMED = {
    "push": "copy ARCHIVE NAME:TAG",
    "pull": "copy oci://HOST/NAME:TAG",
    "save": "copy NAME:TAG FILE",
    "load": "copy FILE",
    **{name: f"store {name}" for name in ("list", "history", "promote", "rollback", "remove", "fsck", "gc")},
    **{name: f"trust {name}" for name in ("keygen", "sign", "verify")},
    "ctl": "server",
    "top": "server top",
    "keys": "server keys",
    "plan-capacity": "deploy capacity",
}
# What tempfile says if it can write to no folder.
_NO_FOLDER = "No usable temporary directory"
# The prefix of the names of Ingot's threads, and those that call no engine.
_OWN_THREADS = "ingot-"
_HARMLESS_THREADS = ("ingot-log", "ingot-signals")
# Commands whose options are settings of the server.
_OF_SETTINGS = ("serve", "config", "deploy")
_NAMES = [name for commands in _COMMANDS.values() for name in commands]


class _Commands(typer.core.TyperGroup):
    """The commands; errors name the successor of a former command or option, and the group that a command is in."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, new = args[0], RENAMED.get(args[0])
        grouped = [] if name in self.commands else [path for path in _grouped(self, name) if path != new]
        meant = "did you mean " + " or ".join(f"'ingot {path}'" for path in grouped) + "?"
        if new is not None:
            ctx.fail(f"'ingot {name}' is now 'ingot {new}'{f'; {meant}' if grouped else '.'}")
        if grouped:
            ctx.fail(f"No such command '{name}'; {meant}")
        if name in _OF_SETTINGS:
            from ingot.cli.settings import replacement

            for option in (text.partition("=")[0] for text in args[1:] if text.startswith("--")):
                if (instead := replacement(option)) is not None:
                    ctx.fail(f"No such option: {option}; {instead}.")
        return super().resolve_command(ctx, args)


def _grouped(group: Any, name: str) -> Iterator[str]:
    """Yield the commands of that name in the groups, with the names of these: ``server reload``."""
    for outer, inner in group.commands.items():
        commands = getattr(inner, "commands", {})
        if name in commands:
            yield f"{outer} {name}"
        if commands:
            yield from (f"{outer} {path}" for path in _grouped(inner, name))


def application(*names: str) -> typer.Typer:
    """Return the ``ingot`` command with these of its subcommands, or with all."""
    made = typer.Typer(
        name="ingot",
        cls=_Commands,
        help="Export, quantize, archive and serve PyTorch models over HTTP and gRPC.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_root)
    for panel, commands in _COMMANDS.items():
        for name, place in commands.items():
            if name in (names or _NAMES):
                module, _, function = place.rpartition(".")
                command = getattr(importlib.import_module(f"ingot.cli.{module}"), function)
                if isinstance(command, typer.Typer):
                    made.add_typer(command, name=name, rich_help_panel=panel)
                else:
                    made.command(name, rich_help_panel=panel)(command)
    _join_lines(made)
    return made


def _join_lines(group: typer.Typer) -> None:
    """Join the lines of each paragraph of the help, which typer keeps; those of examples are indented, and stay."""
    for info in group.registered_commands:
        paragraphs = (inspect.getdoc(info.callback) or "").split("\n\n")
        info.help = "\n\n".join(text if text.startswith(" ") else text.replace("\n", " ") for text in paragraphs)
    for inner in group.registered_groups:
        if inner.typer_instance is not None:
            _join_lines(inner.typer_instance)


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'ingot.cli.main' has no attribute '{name}'")
    globals()["app"] = application()
    return globals()["app"]


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ingot {__version__} ({BUILD})")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if f"{' '.join(sys.argv[1:3])} ".startswith(tuple(f"{command} " for command in _LONG)):
        context.with_resource(interrupts.prompt(context.with_resource(_scratch())))


@contextlib.contextmanager
def _scratch() -> Iterator[str]:
    """Put a command's temporary folders into one, so that a signal at any time leaves nothing behind."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


def main() -> None:
    """Run the command and end the process with its exit code."""
    try:
        run()
    except SystemExit as end:
        names = [thread.name for thread in threading.enumerate() if thread.name not in _HARMLESS_THREADS]
        if any(name.startswith(_OWN_THREADS) for name in names):
            # Python ends such a thread when it returns from an engine's native code, which aborts the process.
            from ingot.model_store.blobs.folder import remove_scratch

            logging.shutdown()
            remove_scratch()
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise
    finally:
        # The interpreter collects garbage once more as it ends, which takes seconds with PyTorch's objects.
        gc.freeze()


def run() -> None:
    """Run the command. Errors are one paragraph on stderr; exit code 1 is a user error, 70 an internal error."""
    _set_up_packages()
    called = sys.argv[1:2] or completion.words()[1:2]
    try:
        with completion.with_colons():
            application(*(called if called and called[0] in _NAMES else ()))()
    except interrupts.Terminated as error:
        sys.exit(error.code)
    except IngotError as error:
        _fail(getattr(error, "text", str(error)), 70 if error.code is Code.INTERNAL else 1)
    except Exception as error:  # the process boundary: an unexpected error is a bug, reported in one line
        if isinstance(error, OSError) and (error.errno in FULL_DISK or _NO_FOLDER in str(error)):
            place = f" for {error.filename}" if error.filename else ""
            _fail(f"no space is left{place}: free some, or set TMPDIR to a folder with free space", 1)
        if os.environ.get("INGOT_TRACEBACK"):
            raise
        _fail(f"{type(error).__name__}: {error}. This is a bug in Ingot; INGOT_TRACEBACK=1 shows where.", 70)


def _set_up_packages() -> None:
    """Set options that other packages read when they are imported, in this process and its children."""
    # PyTorch's threads wait by spinning unless this is set before it is loaded. Spinning threads take the cores from
    # all other work and from each other: on a busy machine, compiled models answered 10 times as slowly as with it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Pydantic's plugins are not used, and the search for them reads the metadata of every installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    # Their warnings are for developers, such as torchao's about libraries of other devices. Errors are still shown.
    os.environ.setdefault("TORCH_LOGS", "-all")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("torchao").setLevel(logging.ERROR)


def _fail(text: str, code: int) -> None:
    stderr().print("[bold red]error:[/]", end=" ")
    note(text)
    sys.exit(code)
