"""One setting of the server: its name, limits and texts, and how its values are read.

A setting is added in server_fields.py, or in model_fields.py if each model may have its own value.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import quoted
from ingot.report import units

# The groups of the options in --help.
ADDRESSES = "Addresses"
ACCESS = "Access"
MODELS = "Models"
BATCHING = "Batching (the defaults measure the model)"
LIMITS = "Limits"
CANARY = "Canary (new versions that take over step by step)"
OBSERVATION = "Logs and traces"
RECORDING = "Recording requests"
EXPERT = "For experts"
_TRUE, _FALSE = ("true", "1", "yes", "y", "on", "t"), ("false", "0", "no", "n", "off", "f")
# The type of each kind in JSON Schema, and the types of its values as tomllib reads them.
_TYPES: Mapping[type, tuple[str, tuple[type, ...]]] = {
    bool: ("boolean", (bool,)),
    int: ("integer", (int,)),
    float: ("number", (int, float)),
    str: ("string", (str,)),
    Path: ("string", (str,)),
}
# As units.seconds reads it.
_DURATION = r"([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)? ?(us|ms|s|m|h)"


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
        per_model: whether a ``[[model]]`` of the configuration file can have its own value; a running server changes
            it by loading models again.
        common: whether ``ingot serve --help`` shows it; ``--help-all`` shows every setting.
        file_only: whether only a configuration file has it, and no option or variable.
        off: whether the value ``off`` is allowed, which is read as None.
        name: the field's name.
        kind: ``bool``, ``int``, ``float``, ``str`` or ``Path``.
        choices: the texts that it takes, if not all.
        default: its value where none is given.
        pattern: a regular expression that a text must match.
        form: what it means, in words.
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
    per_model: bool = False
    common: bool = False
    file_only: bool = False
    off: bool = False
    name: str = ""
    kind: type = str
    choices: tuple[str, ...] = ()
    default: Any = None
    pattern: str = ""
    form: str = ""

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
        return self.shown(self.default)

    @property
    def bounds(self) -> str:
        """The limits in words: ``over 0 and at most 1h``; empty if there are none."""
        limits = {"over": self.above, "at least": self.least, "at most": self.most}
        return " and ".join(f"{word} {self._written(limit)}" for word, limit in limits.items() if limit is not None)

    @property
    def takes(self) -> str:
        """The accepted values, in words."""
        if self.choices:
            *first, last = self.choices
            return f"{', '.join(first)} or {last}"
        if self.kind is bool:
            return "true or false"
        if self.duration:
            return f"{self.bounds}, or off" if self.off else self.bounds
        if self.kind in (int, float):
            what = "a whole number" if self.kind is int else "a number"
            return f"{what}, {self.bounds}" if self.bounds else what
        return "a path" if self.kind is Path else self.form or "text"

    def shown(self, value: Any) -> str:
        """Return a value as a user would write it; the default in words, where it is None."""
        if value is None:
            return self.unset
        if isinstance(value, bool):
            return "on" if value else "off"
        return units.written(value) if self.duration else str(value)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON Schema of the values that :meth:`typed` reads."""
        schema: dict[str, Any] = {"description": f"{self.help}."}
        if self.default is not None:
            schema["default"] = units.written(self.default) if self.duration else self.default
        if self.choices:
            return {**schema, "enum": [*self.choices]}
        if self.duration:
            text = {"type": "string", "pattern": f"^{_DURATION}{'' if self.needs_unit else '?'}{'$|^off' * self.off}$"}
            number = {"const": 0} if self.needs_unit else {"type": "number", **self._limits}
            return {**schema, **(text if self.needs_unit and self.least != 0 else {"anyOf": [text, number]})}
        pattern = {"pattern": f"^{self.pattern}$"} if self.pattern else {}
        return {**schema, "type": _TYPES[self.kind][0], **self._limits, **pattern}

    @property
    def _limits(self) -> dict[str, float]:
        limits = {"exclusiveMinimum": self.above, "minimum": self.least, "maximum": self.most}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def _written(self, limit: float) -> str:
        return units.written(limit) if self.duration and limit else f"{limit:g}"

    def typed(self, value: Any) -> Any:
        """Return a value of a format that has types, such as TOML, as the field has it; see :meth:`read`.

        Raises:
            ValueError: it has another type than the setting, or is not one that the setting takes.
        """
        if self.duration and type(value) in (int, float):
            value = str(value)  # read as a text, since a number could be meant as milliseconds
        if self.duration and not isinstance(value, str):
            raise NotDurationError(f'not a duration; write it as text: "{units.TIMES.partition(",")[0]}"')
        if not self.duration and type(value) not in _TYPES[self.kind][1]:
            raise ValueError(value)
        return self.read(value)

    def fault(self, value: Any, error: Exception) -> str:
        """Return the fault of a value that :meth:`read` or :meth:`typed` refused, as text to follow the name."""
        if self.off and value == "on":
            return f"is 'on'; leave it out for the default, {self.shown_default}"
        own = isinstance(error, NotDurationError)
        unit = " seconds" if self.duration and not own and not isinstance(value, str) else ""
        return f"is {quoted(value)}{unit}: {error if own else f'it must be {self.takes}'}"

    def read(self, value: Any) -> Any:
        """Return a value as the field has it; texts are those of options and variables.

        Raises:
            ValueError: it is not one that the setting takes.
        """
        if (value is None and self.default is None) or (self.off and value in (None, "off")):
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
        if self.kind is str and isinstance(value, str) and (not self.pattern or re.fullmatch(self.pattern, value)):
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


def setting(default: Any, help: str, **about: Any) -> Any:  # noqa: A002 - as typer calls it
    """Return a field of a dataclass of settings; ``about`` are attributes of :class:`Setting`."""
    return field(default=default, metadata={"setting": Setting(help=help, default=default, **about)})
