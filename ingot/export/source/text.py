"""Foreign errors in one line."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """Return an error's message without its line breaks."""
    return " ".join(str(error).split())[:500]


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its class."""
    return str(error).split("\n", 1)[0] or type(error).__name__
