"""Numbers with units as people read them, and durations as they write them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPANS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
# The forms of a duration, for messages that ask for one.
TIMES = "50ms, 90s, 5m or 1h"


def size(count: int) -> str:
    """Return a number of bytes, such as ``1.5 MiB``."""
    return f"{count} B" if count < 1024 else _scaled(count / 1024, 1024, ("KiB", "MiB", "GiB", "TiB"))


def parse_size(text: str) -> int | None:
    """Parse a number of bytes, such as ``500MB``, ``1.5 GiB`` or ``4096``. None if it is not one."""
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(?:([KMGT])(i?)B|B)?", text.strip(), re.IGNORECASE)
    if match is None:
        return None
    step = 1024 if match[3] else 1000
    return int(float(match[1]) * step ** (" KMGT".index(match[2].upper()) if match[2] else 0))


def count(number: int) -> str:
    """Return a large count, such as ``70.6 G``."""
    return str(number) if number < 1000 else _scaled(number / 1000, 1000, ("k", "M", "G", "T", "P", "E"))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 core`` or ``2 cores``."""
    return f"{number} {noun}{'s' if number != 1 else ''}"


def rate(per_second: float) -> str:
    """Return a number per second, such as ``1,200`` or ``0.25``."""
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def duration(seconds: float) -> str:
    """Return a duration in ms, or in us below one."""
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def seconds(text: str) -> float | None:
    """Parse a duration such as ``50us``, ``90s``, ``5m`` or ``1h``; a bare number is seconds. None if it is not one."""
    match = re.fullmatch(r"((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?) ?(us|ms|s|m|h)?", text.strip())
    return None if match is None else float(match[1]) * _UNITS[match[2] or "s"]


def span(text: str) -> timedelta | None:
    """Parse a span of seconds to days, such as ``90m``, ``24h`` or ``7d``. None if it is not one."""
    match = re.fullmatch(r"(\d{1,5})([smhd])", text)
    return None if match is None else timedelta(**{_SPANS[match[2]]: int(match[1])})


def written(seconds: float) -> str:
    """Return a duration in the form that :func:`seconds` parses: ``50ms``, ``90s``, ``1h``."""
    if 0 < seconds < 1:  # as in refusals, of which there may be many
        unit = "us" if seconds < 1e-3 else "ms"
    else:
        unit = next((unit for unit in ("h", "m") if seconds and seconds % _UNITS[unit] == 0), "s")
    return f"{seconds / _UNITS[unit]:.6g}{unit}"


def number(value: float) -> str:
    """Return a measured value with four digits."""
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.3g}"


def times(speedup: float | None) -> str:
    """Return a speed-up, such as ``1.50x``; empty if it is unknown."""
    return "" if speedup is None else f"{speedup:.2f}x"


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 in percent; empty if it is unknown."""
    return "" if share is None else f"{share:.2%}"


def _scaled(value: float, step: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if value < step:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= step
    return f"{value:.3g} {units[-1]}"
