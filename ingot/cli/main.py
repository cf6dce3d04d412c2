"""The ``ingot`` command and what is common to its subcommands: errors and exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

import ingot
from ingot.cli import archives, compare, demo, export, infer, maintenance, quantize, serve, tags, transfers
from ingot.cli.output import note, stderr
from ingot.errors import Code, IngotError

app = typer.Typer(
    name="ingot",
    help="From a PyTorch model to HTTP and gRPC answers: export, quantize, archive, serve.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# Commands that work with temporary folders for minutes. Those that serve end by themselves.
_LONG = ("export", "quantize", "compare", "push", "pull", "copy", "save", "load")
app.command()(export.export)
app.command()(quantize.quantize)
app.command()(compare.compare)
app.command()(archives.inspect)
app.command()(transfers.push)
app.command()(transfers.pull)
app.command()(transfers.copy)
app.command()(transfers.save)
app.command()(transfers.load)
app.command("list")(tags.list_models)
app.command()(tags.history)
app.command()(tags.promote)
app.command()(tags.rollback)
app.command()(tags.remove)
app.command()(maintenance.fsck)
app.command()(maintenance.gc)
app.command()(serve.serve)
app.command()(infer.infer)
app.command()(demo.demo)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ingot {ingot.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand in _LONG:
        context.with_resource(_terminable())


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the command as an error does, so that it leaves no temporary folders."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Run the command. Errors are one paragraph on stderr; exit code 1 is the user's, 70 ours; Ctrl-C is 130."""
    # PyTorch's threads wait by spinning unless this is set before it is loaded. Then they take the cores from whatever
    # else runs, also from each other: on a busy machine, compiled models answered 10 times as slowly as with it.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except IngotError as error:
        _fail(str(error), 70 if error.code is Code.INTERNAL else 1, getattr(error, "detail", ""))
    except Exception as error:
        if os.environ.get("INGOT_TRACEBACK"):
            raise
        _fail(f"{type(error).__name__}: {error}. This is a bug in Ingot; INGOT_TRACEBACK=1 shows where.", 70)


def _fail(text: str, code: int, detail: str = "") -> None:
    stderr.print("[bold red]error:[/]", end=" ")
    note(text)
    if detail:
        note(f"\n{detail}")
    sys.exit(code)
