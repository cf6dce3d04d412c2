"""Printing: results on stdout, progress and notes on stderr, so that ``--json`` output can be piped."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ingot.cli import interrupts
from ingot.errors import InvalidArgument
from ingot.report import units
from ingot.report.text import printable as printable
from ingot.report.units import duration as duration
from ingot.report.units import size as size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status
    from rich.text import Text

_STDERR = sys.stderr  # the real one, even if sys.stderr is redirected: progress must stay visible


# Created on first use: a server starts without importing rich.
@cache
def stdout() -> Console:
    """Return the console for results."""
    from rich.console import Console

    return Console(emoji=False)


@cache
def stderr() -> Console:
    """Return the console for progress and notes."""
    from rich.console import Console

    return Console(file=_STDERR, emoji=False)


def print_json(content: Mapping[str, Any] | list[Any]) -> None:
    """Print JSON for programs: one document, without colours."""
    print(json.dumps(content, indent=2))


@contextlib.contextmanager
def progress(first: str, *, log: bool = False, timed: bool = False) -> Iterator[Callable[[str], None]]:
    """Show the current step on stderr; the yielded function begins the next step.

    Args:
        first: the first step.
        log: if stderr is not a terminal, print each step as a line: for work that could look like a hang.
        timed: show each step with its time, and keep finished steps.
    """
    if log and not stderr().is_terminal:
        note(first)
        yield note
        return
    if timed and stderr().is_terminal:
        with _timed(first) as step:
            yield step
        return
    with stderr().status(_plain(first)) as status, interrupts.displayed(lambda text: end(status, text)):
        yield lambda step: status.update(_plain(step))


@contextlib.contextmanager
def _timed(first: str) -> Iterator[Callable[[str], None]]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(finished_text=" "), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=stderr()) as shown, interrupts.displayed(lambda text: end(shown, text)):
        running = shown.add_task(printable(first), total=1)

        def step(text: str) -> None:
            nonlocal running
            shown.update(running, completed=1)
            running = shown.add_task(printable(text), total=1)

        yield step
        shown.update(running, completed=1)


def end(shown: Status | Progress, text: str) -> None:
    """Stop an animation, and print a last remark: with the animation under it, the command would seem to continue."""
    shown.stop()
    note(text)


def _plain(step: str) -> Text:
    """Return a step as it is: brackets in names of layers and files are not markup."""
    from rich.text import Text

    return Text(printable(step))


def say(text: str) -> None:
    """Print a line of the result, as it is: never wrapped, so that other programs can read it."""
    stdout().print(printable(text), markup=False, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """Print a remark on stderr."""
    stderr().print(printable(text), markup=False, highlight=False, soft_wrap=True)


def seconds(option: str, text: str) -> float:
    """Return an option's duration in seconds, from text such as ``50ms``, ``90s``, ``5m`` or ``1h``.

    Raises:
        InvalidArgument: it is not a duration.
    """
    found = units.seconds(text)
    if found is None:
        raise InvalidArgument(f"{option} '{text}' is not a duration; write it as {units.TIMES}")
    return found
