"""Check configurations by the types of their fields."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import fields
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from ingot.errors import InvalidArgument
from ingot.runtime.machine import devices

# Threads of a call per core: more only wait for each other, and thousands cannot be started.
_THREADS = 16
# No metric of float32 outputs is so large.
_LARGEST_DROP = 1e100
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "text"}


def settle(config: Any) -> None:
    """Check that each field of a frozen configuration is of its type; NumPy's numbers and lists become Python's.

    Raises:
        InvalidArgument: one is not.
    """
    hints = get_type_hints(type(config))
    for item in fields(config):
        value = _plain(getattr(config, item.name))
        if not _fits(value, hints[item.name]):
            raise InvalidArgument(f"{item.name} is {reprlib.repr(value)}; it must be {_words(hints[item.name])}")
        object.__setattr__(config, item.name, value)


def check_threads(threads: int | None) -> None:
    """Check a number of CPU threads.

    Raises:
        InvalidArgument: it is not a usable number.
    """
    most = _THREADS * devices.cpu_count()
    if threads is not None and not 1 <= threads <= most:
        limit = "give 1 or more" if threads < 1 else f"give at most {most}, {_THREADS} per core"
        raise InvalidArgument(f"{threads} threads cannot run a model; {limit}, or None for one per core")


def check_drop(largest: float) -> None:
    """Check the largest drop that is allowed.

    Raises:
        InvalidArgument: it is negative, or larger than any drop of a metric.
    """
    if largest < 0:
        raise InvalidArgument(f"the largest drop is {largest}; it must be 0 or more")
    if math.isnan(largest) or largest > _LARGEST_DROP:
        raise InvalidArgument(f"the largest drop is {largest}; give the accepted loss of the metric, such as 0.01")


def _plain(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, item) for item in args)
    if origin is Literal:  # the configuration checks the value, with a message that lists the valid ones
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(item, args[0]) for item in value)
    if origin is Callable:
        return callable(value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else int | float) and not isinstance(value, bool)
    return isinstance(value, hint)


def _words(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(map(_words, args))
    if origin is tuple:
        return f"a tuple, each {_words(args[0])}"
    if origin is Callable:
        return "a function"
    return "text" if origin is Literal else "None" if hint is type(None) else _WORDS.get(hint, str(hint))
