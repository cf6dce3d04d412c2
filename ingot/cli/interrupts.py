"""Ctrl-C that is not lost: the interpreter passes over what is raised in some callbacks, also while it imports."""

from __future__ import annotations

import signal
from types import FrameType

_seen: list[int] = []


def watch() -> None:
    """Remember Ctrl-C besides raising KeyboardInterrupt, unless the caller of this process has chosen otherwise."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def check() -> None:
    """Raise KeyboardInterrupt if there was a Ctrl-C; for those who go on for ever."""
    if _seen:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    _seen.append(number)
    raise KeyboardInterrupt
