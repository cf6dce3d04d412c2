"""The limits of a chat template's work, and Jinja's filters and methods of texts that count what they make."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.filters import do_indent
from jinja2.runtime import Context

from ingot.errors import InvalidArgument

# Loop iterations and calls of one rendering; so many take about 0.2 s. Templates need about ten for a message.
_MOST_STEPS = 200_000
# Characters that one rendering may write and join.
_MOST_CHARACTERS = 8 << 20
# Processor time of one rendering, which is seen between steps.
_MOST_SECONDS = 2.0
# Bits of the numbers of a template.
MOST_BITS = 256
_MOST_INDENT = 16
# Widths in the form of a text, or those that another value sets.
_WIDE = re.compile(r"\{[^{}]*:[^{}]*(?:\d{4}|\{)|%(?:\([^)]*\))?[-+ #.\d]*(?:\d{4}|\*)")
# The name of a rendering's Work in its context. No variable of a template has this name, as it is not an identifier.
WORK = "work of this rendering"


class Work:
    """The steps and characters of one rendering, which raise InvalidArgument over their limits."""

    def __init__(self) -> None:
        self._steps = self._characters = 0
        self._end = time.thread_time() + _MOST_SECONDS

    def step(self) -> None:
        self._steps += 1
        if time.thread_time() > self._end:
            raise InvalidArgument(f"the model's chat template takes over {_MOST_SECONDS} s; send fewer messages")
        if self._steps > _MOST_STEPS:
            raise InvalidArgument(f"the model's chat template needs over {_MOST_STEPS} steps; send fewer messages")

    def write(self, characters: int) -> None:
        self._characters += characters
        if self._characters > _MOST_CHARACTERS:
            raise InvalidArgument(
                f"the model's chat template makes over {_MOST_CHARACTERS} characters; send shorter messages"
            )


def check_form(form: str) -> None:
    """Refuse a format string of ``format`` or ``%`` that may make a text of any length.

    Raises:
        SecurityError: it has a wide field.
    """
    if _WIDE.search(form):
        raise SecurityError("a chat template cannot format values with a width of four digits, or of another value")


def _of_join(separator: Any, values: Sequence[Any] = ()) -> int:
    return size_of(separator) * len(values) + sum(map(size_of, values))


def _of_replace(text: str, old: str, new: str, count: int = -1) -> int:
    return len(text) + text.count(old, 0) * len(new)


METHODS: Mapping[str, Callable[..., int]] = {"join": _of_join, "replace": _of_replace}
"""Methods of texts whose results may be long: functions of the text and the arguments that return the characters."""


@jinja2.pass_context
def _join(context: Context, values: Iterable[Any], separator: Any = "", attribute: Any = None) -> str:
    if attribute is not None:
        values = context.environment.call_filter("map", values, kwargs={"attribute": attribute}, context=context)
    texts = [*map(str, values)]
    context[WORK].write(_of_join(str(separator), texts))
    return str(separator).join(texts)


@jinja2.pass_context
def _replace(context: Context, value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text = str(value)
    context[WORK].write(_of_replace(text, str(old), str(new)))
    return text.replace(str(old), str(new), -1 if count is None else count)


@jinja2.pass_context
def _indent(context: Context, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    context[WORK].write(len(value) + (value.count("\n") + 1) * (size_of(width) + number_of(width)))
    return do_indent(value, width, first, blank)


@jinja2.pass_context
def _each(context: Context, values: Iterable[Any]) -> Iterator[Any]:
    work = context[WORK]
    for value in values:
        work.step()
        yield value


@jinja2.pass_context
def _joined(context: Context, values: list[Any]) -> str:
    texts = [*map(str, values)]
    context[WORK].write(sum(map(len, texts)))
    return "".join(texts)


@jinja2.pass_context
def written(context: Context, value: Any) -> Any:
    """Count a value that the template writes."""
    context[WORK].write(size_of(value))
    return value


def size_of(value: Any) -> int:
    """Return the characters or items of a value; 0 if it has none."""
    return len(value) if isinstance(value, str | list | tuple) else 0


def number_of(value: Any) -> int:
    """Return how often a product with this value repeats a text or list; 0 if it is not a number."""
    return max(value, 0) if isinstance(value, int) else 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if number_of(indent) > _MOST_INDENT:
        raise SecurityError(f"a chat template cannot indent by over {_MOST_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


FILTERS: Mapping[str, Callable[..., Any]] = {
    "each_counted": _each,
    "indent": _indent,
    "join": _join,
    "joined_counted": _joined,
    "replace": _replace,
    "tojson": _to_json,
}
"""Filters that replace Jinja's, and those of loops and of joined texts."""
