"""A dictionary of what was worked out lately, of bounded size: what clients send can make it no larger."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """Forgets its oldest entry when a new one would be too many. Look up with ``get``; enter with :meth:`keep`.

    Args:
        limit: most entries.
    """

    def __init__(self, limit: int):
        super().__init__()
        self._limit = limit

    def keep(self, key: Key, value: Value) -> None:
        """Enter a value."""
        if len(self) >= self._limit and key not in self:
            del self[next(iter(self))]
        self[key] = value
