"""Numbers and tables as people read them, and times as they write them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
# How a time is written, for texts that ask for one.
TIMES = "50ms, 90s, 5m or 1h"


def size(count: int) -> str:
    """Return a number of bytes."""
    return f"{count} B" if count < 1024 else _scaled(count / 1024, 1024, ("KiB", "MiB", "GiB", "TiB"))


def count(number: int) -> str:
    """Return a large number: ``70.6 G``."""
    return str(number) if number < 1000 else _scaled(number / 1000, 1000, ("k", "M", "G", "T", "P", "E"))


def duration(seconds: float) -> str:
    """Return a time."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def seconds(text: str) -> float | None:
    """Return a time such as ``50us``, ``90s``, ``5m`` or ``1h`` in seconds; a bare number is seconds. Else None."""
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) ?(us|ms|s|m|h)?", text.strip())
    return None if match is None else float(match[1]) * _UNITS[match[2] or "s"]


def written(seconds: float) -> str:
    """Return a time as :func:`seconds` reads it: ``50ms``, ``90s``, ``1h``."""
    whole = next((unit for unit in ("h", "m") if seconds and seconds % _UNITS[unit] == 0), "s")
    unit = "us" if 0 < seconds < 1e-3 else "ms" if 0 < seconds < 1 else whole
    return f"{seconds / _UNITS[unit]:.6g}{unit}"


def one_line(text: str, limit: int = 120) -> str:
    """Return a name out of a file as a line of at most ``limit`` characters, with control characters spelt out."""
    text = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < step:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> list[str]:
    """Return rows in columns: the first to the left, all others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return [
        indent + "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in cells).rstrip()
        for cells in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    ]
