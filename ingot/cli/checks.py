"""Checks before a command's work, and limits on its time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ingot.cli import interrupts
from ingot.cli.output import note
from ingot.errors import InvalidArgument
from ingot.report import units


def check_out(out: Path) -> None:
    """Raise InvalidArgument if ``out`` cannot be written; called before minutes of work, not after."""
    if not out.parent.is_dir():
        raise InvalidArgument(f"cannot write {out}: there is no folder {out.parent}")
    if out.is_dir():
        raise InvalidArgument(f"cannot write {out}: it is a folder; name a file such as {out / 'model.ingot'}")
    if out.exists() and not out.is_file():
        raise InvalidArgument(f"cannot write {out}: it is a device, pipe or socket; name a file")
    if not os.access(out.parent, os.W_OK):
        raise InvalidArgument(f"cannot write {out}: the folder {out.parent} is read-only")


def check_apart(out: Path, **others: str | Path | None) -> None:
    """Raise InvalidArgument if a file to write is another file of the command.

    Args:
        out: the file to write.
        others: the command's other files by their role; None and names that are not files are ignored.
    """
    for what, other in others.items():
        if other is not None and Path(other).expanduser().resolve() == out.resolve():
            raise InvalidArgument(f"cannot write {out}: it is also the file of the {what}; name another")


def note_stored(name: str) -> None:
    """Note the name of a stored model if it differs from the user's.

    Raises:
        InvalidArgument: the name cannot be that of a stored model.
    """
    from ingot.model_store.references import stored_name

    if (stored := stored_name(name)) != name:
        note(f"'{name}' is stored as '{stored}'")


@contextlib.contextmanager
def limited_load(
    seconds: float, source: str, step: Callable[[str], None], stages: int = 1
) -> Iterator[Callable[[str], None]]:
    """Yield ``step`` with a time limit on the first stages, in which an engine loads and runs a foreign graph.

    Args:
        seconds: the limit, after which the command ends; 0 for no limit.
        source: the model's name in the message.
        step: called with the name of each stage as it begins.
        stages: the number of stages that share the limit.
    """
    message = (
        f"{source} did not load and answer within {units.written(seconds)}. If the model is just large, raise "
        "--load-timeout (0 means no limit). A graph with a loop or nested functions may never finish loading"
    )
    with contextlib.ExitStack() as loading:
        begun = 0

        def limited_step(text: str) -> None:
            nonlocal begun
            step(text)
            if begun == 0:
                loading.enter_context(interrupts.limited(seconds, message))
            elif begun == stages:
                loading.close()
            begun += 1

        yield limited_step
