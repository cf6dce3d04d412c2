"""Reports as text for terminals: sections, columns, and names that are safe to print."""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return rows in columns: the first aligned to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        indent + "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in cells).rstrip()
        for cells in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    ]


def section(title: str, lines: Sequence[str]) -> list[str]:
    """Return an empty line, a title and the lines below it, or nothing if there are no lines."""
    return ["", title, *lines] if lines else []


def items(texts: Sequence[str]) -> list[str]:
    """Return texts as indented lines."""
    return [f"  {text}" for text in texts]


def printable(text: str) -> str:
    """Return text with its control characters escaped: names from a file must not control the user's terminal."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def one_line(text: str, limit: int = 120) -> str:
    """Return a name from a file as a line of at most ``limit`` characters, with control characters escaped."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
