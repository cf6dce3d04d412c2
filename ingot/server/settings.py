"""One setting of the server: its name, limits and texts, and how its values are read."""

from __future__ import annotations

import math
import numbers
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.report import units

_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")


class NotDurationError(ValueError):
    """A text is not a duration; the error's text is the remedy."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The name, limits and texts of one field.

    Attributes:
        help: for ``--help`` and the docs, without a period.
        more: what the docs add, in Markdown.
        group: one of the groups of options.
        unset: the default in words, where it is None.
        least: the lowest value.
        above: what the value must exceed.
        most: the highest value.
        duration: whether it is a time, in seconds.
        needs_unit: whether a text must have a unit, as its number could be meant as milliseconds.
        name: the field's.
        kind: ``bool``, ``int``, ``float``, ``str`` or ``Path``.
        choices: the texts that it takes, if not all.
        default: its value where none is given.
    """

    help: str
    more: str = ""
    group: str
    unset: str = ""
    least: float | None = None
    above: float | None = None
    most: float | None = None
    duration: bool = False
    needs_unit: bool = False
    name: str = ""
    kind: type = str
    choices: tuple[str, ...] = ()
    default: Any = None

    @property
    def variable(self) -> str:
        """The environment variable."""
        return f"INGOT_{self.name.upper()}"

    @property
    def option(self) -> str:
        """The option of ``ingot serve``."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def shown_default(self) -> str:
        """The default as help and docs show it."""
        if self.default is None:
            return self.unset
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return units.written(self.default) if self.duration else str(self.default)

    @property
    def bounds(self) -> str:
        """The limits in words: ``over 0 and at most 1h``; empty if there are none."""
        limits = {"over": self.above, "at least": self.least, "at most": self.most}
        return " and ".join(f"{word} {self._written(limit)}" for word, limit in limits.items() if limit is not None)

    @property
    def takes(self) -> str:
        """What the value may be, in words."""
        if self.choices:
            *first, last = self.choices
            return f"{', '.join(first)} or {last}"
        if self.kind is bool:
            return "true or false"
        if self.duration:
            return self.bounds
        if self.kind in (int, float):
            what = "a whole number" if self.kind is int else "a number"
            return f"{what}, {self.bounds}" if self.bounds else what
        return "a path" if self.kind is Path else "text"

    def _written(self, limit: float) -> str:
        return units.written(limit) if self.duration and limit else f"{limit:g}"

    def read(self, value: Any) -> Any:
        """Return a value as the field has it; texts are those of options and variables.

        Raises:
            ValueError: it is not one that the setting takes.
        """
        if value is None and self.default is None:
            return None
        if self.choices and value in self.choices:
            return value
        if self.choices:
            raise ValueError(value)
        if self.duration and isinstance(value, str):
            value = self._seconds(value)
        if self.kind in (int, float):
            return self._number(value)
        if self.kind is bool:
            return _flag(value)
        if self.kind is Path and isinstance(value, str | os.PathLike):
            return Path(value)
        if self.kind is str and isinstance(value, str):
            return value
        raise ValueError(value)

    def _number(self, value: Any) -> int | float:
        if isinstance(value, bool) or not isinstance(value, str | numbers.Real):
            raise ValueError(value)
        number: int | float = int(value) if isinstance(value, str) and self.kind is int else float(value)
        if self.kind is int and number != int(number):
            raise ValueError(value)
        inside = (
            math.isfinite(number)
            and (self.above is None or number > self.above)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
        )
        if not inside:
            raise ValueError(value)
        return self.kind(number)  # type: ignore[no-any-return]

    def _seconds(self, text: str) -> float:
        """Return a written time, such as ``10s``, in seconds; a bare number is seconds."""
        text = text.strip()
        found = units.seconds(text.removeprefix("-"))
        if found is None:
            raise NotDurationError(f"not a duration; write it as {units.TIMES}")
        if self.needs_unit and found and text[-1] in "0123456789.":
            raise NotDurationError(f"write a unit: {text}ms or {text}s")
        return -found if text.startswith("-") else found  # the limits refuse a negative one


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower() if isinstance(value, str | int) else ""
    if text not in (*_TRUE, *_FALSE):
        raise ValueError(value)
    return text in _TRUE
