"""Where the tables and keys of a TOML file begin, which ``tomllib`` does not report."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from typing import Any

KeyPath = tuple[str | int, ...]


def lines(text: str) -> Mapping[KeyPath, int]:
    """Return the line of each table and key of a valid file, counted from 1, by its path: ``("model", 0, "device")``.

    A statement ends at the first line with which it is valid by itself.
    """
    found: dict[KeyPath, int] = {}
    tables: Counter[KeyPath] = Counter()  # the tables of each array so far
    table: KeyPath = ()
    statement, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        statement += f"{line}\n"
        try:
            content = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:  # a value of several lines
            continue
        if statement.lstrip().startswith("["):
            table = _header(content, tables)
            found.setdefault(table, first)
        elif content:
            for path in _paths(content):
                found.setdefault((*table, *path), first)
        statement, first = "", number + 1
    return found


def _header(content: Mapping[str, Any], tables: Counter[KeyPath]) -> KeyPath:
    """Return the path of the table that a header opens, and count it if it belongs to an array."""
    path: KeyPath = ()
    value: Any = content
    while value:
        name, value = next(iter(value.items()))
        path = (*path, name)
        if isinstance(value, list):  # the header has two brackets
            tables[path] += 1
            value = value[0]
        if path in tables:
            path = (*path, tables[path] - 1)
    return path


def _paths(content: Mapping[str, Any]) -> list[KeyPath]:
    """Return the paths of the keys of a statement: one, with those of the tables that dots or braces make."""
    found: list[KeyPath] = []
    for name, value in content.items():
        found.append((name,))
        if isinstance(value, dict):
            found += [(name, *path) for path in _paths(value)]
    return found
