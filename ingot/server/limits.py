"""Bounds on the memory that clients can make the server hold."""

from __future__ import annotations

from typing import TypeVar

from ingot.errors import TooLarge, Unavailable

Key = TypeVar("Key")
Value = TypeVar("Value")

# Bytes that an incomplete body or message must bring per minute. Otherwise a few clients that never finish theirs could
# hold the whole budget. This is 17 KiB/s, slower than any link that tensors are sent over.
BODY_BYTES = 1 << 20
BODY_PACE = f"send at least {BODY_BYTES >> 20} MiB a minute"

# Bytes that an open call costs in addition to its messages, rounded up: a call of few messages, and a stream, which
# needs a task.
CALL_BYTES = 2 << 10
STREAM_BYTES = 16 << 10
# The share of the limit on bodies that open calls may use, and its minimum, for servers with a low limit.
_CALLS_SHARE = 4
_CALLS_LEAST = 16 << 20


# A request may hold so many times the bytes that it leaves in a budget: the last are for small requests, so that large
# ones cannot keep them out.
_SHARE = 7


class BoundedCache(dict[Key, Value]):
    """A dictionary that drops its oldest entry when a new one exceeds the limit.

    Look up with ``get``; add with :meth:`keep`.

    Args:
        limit: most entries.
    """

    def __init__(self, limit: int):
        super().__init__()
        self._limit = limit

    def keep(self, key: Key, value: Value) -> None:
        """Add a value."""
        if len(self) >= self._limit and key not in self:
            del self[next(iter(self))]
        self[key] = value


def check_size(size: int, limit: int) -> None:
    """Refuse a body over the limit.

    Raises:
        TooLarge: names both sizes and the setting.
    """
    if size > limit:
        raise TooLarge(f"the request body has {size} bytes, over the limit of {limit}; see --max-body-mb")


def calls_budget(max_bodies_bytes: int) -> Budget:
    """Return the budget of a server's open calls, not counting their messages."""
    return Budget(max(max_bodies_bytes // _CALLS_SHARE, _CALLS_LEAST), "open calls")


class Budget:
    """The bytes that all clients together may hold in memory.

    A request body counts from its arrival to its response.

    Args:
        limit: most bytes.
        what: what they hold, for the error message.
    """

    def __init__(self, limit: int, what: str = "request bodies"):
        self._limit = limit
        self._what = what
        self._held = 0

    def reserve(self) -> Reservation:
        """Return an empty reservation, for one request; release it by leaving its ``with`` block."""
        return Reservation(self)

    def change(self, size: int, own: int = 0) -> None:
        """Reserve bytes or, if negative, release them.

        Args:
            size: bytes.
            own: bytes that the request holds already.

        Raises:
            Unavailable: the budget is exhausted, or the request would leave too little of it to others. A request that
                holds all of it may always grow.
        """
        left = self._limit - self._held
        if size > 0 and self._held > own and (size > left or own + size > _SHARE * left):
            raise Unavailable(f"the server's memory limit for {self._what} is reached; retry later")
        self._held += size

    def keep(self, size: int) -> None:
        """Count bytes that a finished request still uses; :meth:`change` releases them."""
        self._held += size


class Reservation:
    """One request's part of a budget."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._size = 0

    def add(self, size: int) -> None:
        """Reserve more bytes.

        Raises:
            Unavailable: the budget is exhausted.
        """
        self._budget.change(size, self._size)
        self._size += size

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.change(-self._size)
