"""The boundary to code that raises errors of any type: PyTorch, onnxscript, and the user's modules."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TypeVar

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@contextlib.contextmanager
def reported_as(kind: type[Exception], message: str | Callable[[Exception], str]) -> Iterator[None]:
    """Raise any error of the block as ``kind``.

    Args:
        kind: the type to raise.
        message: the new message, from the error, or as a text that the error's type and message are appended to.
    """
    try:
        yield
    except Exception as error:  # the boundary that this module is for
        text = f"{message}: {typed(error)}" if isinstance(message, str) else message(error)
        raise kind(text) from error


def attempt(function: Callable[[], _T]) -> _T | None:
    """Return the result of a function, or None, with a debug message in the log, if it raises any error."""
    try:
        return function()
    except Exception:  # the boundary that this module is for
        log.debug("an optional step of the export failed", exc_info=True)
        return None


def typed(error: Exception) -> str:
    """Return an error's type and message in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: Exception) -> str:
    """Return an error's message without line breaks, at most 500 characters of it."""
    return " ".join(str(error).split())[:500]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if it has no message."""
    return str(error).split("\n", 1)[0] or type(error).__name__
