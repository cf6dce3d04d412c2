"""Text in reports: sections and columns for terminals, names that are safe to print, and names that are cut to fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

_CUT = "\N{HORIZONTAL ELLIPSIS}"


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


def short(text: str, most: int) -> str:
    """Return a text without its middle if it is longer than ``most`` characters."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}{_CUT}{text[-(most - most // 2) :]}"


def short_labels(labels: Sequence[str], most: int) -> list[str]:
    """Return labels cut to ``most`` characters, without their middles: names of layers differ at their ends.

    Those that differ in the middle are cut around it, so that different labels stay different.
    """
    cut = {label: short(label, most) for label in labels}
    for text in [text for text, count in Counter(cut.values()).items() if count > 1]:
        alike = [label for label in cut if cut[label] == text]
        differ = next((at for at, chars in enumerate(zip(*alike, strict=False)) if len(set(chars)) > 1), 0)
        start = max(differ - most // 2, 1)
        cut |= {label: f"{_CUT}{label[start : start + most - 2]}{_CUT}" for label in alike}
    counts = Counter(cut.values())
    return [cut[label] if counts[cut[label]] == 1 else label for label in labels]
