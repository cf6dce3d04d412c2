"""Bounds on what clients can make the server hold."""

from __future__ import annotations

from ingot.errors import TooLarge, Unavailable

# What a body or a message that has begun must bring in each minute until it is whole. Else a few clients that never
# finish theirs could hold all of the budget for ever. It is 17 KiB/s: less than any link that tensors are sent over.
BODY_BYTES = 1 << 20
BODY_PACE = f"send at least {BODY_BYTES >> 20} MiB a minute"


# What the server keeps for an open call beside its messages, rounded up: for one of few messages, and for one of many
# whose first has come, which takes a task.
CALL_BYTES = 2 << 10
STREAM_BYTES = 16 << 10
# The part of the limit on bodies that open calls may take, and the least that they may, for servers of small bodies.
_CALLS_SHARE = 4
_CALLS_LEAST = 16 << 20


def check_size(size: int, limit: int) -> None:
    """Refuse a body over the limit.

    Raises:
        TooLarge: names both sizes and the setting.
    """
    if size > limit:
        raise TooLarge(f"the request body has {size} bytes, over the limit of {limit}; see --max-body-mb")


def calls_budget(max_bodies_bytes: int) -> Budget:
    """Return the budget of a server's open calls, whatever their messages hold."""
    return Budget(max(max_bodies_bytes // _CALLS_SHARE, _CALLS_LEAST), "open calls")


class Budget:
    """The bytes that all clients together may have in memory; ``what`` says of what, for the error's text.

    Those of request bodies count from their arrival to their answer.
    """

    def __init__(self, limit: int, what: str = "request bodies"):
        self._limit = limit
        self._what = what
        self._held = 0

    def reserve(self) -> Reservation:
        """Return an empty reservation, for one request; release it by leaving its ``with`` block."""
        return Reservation(self)

    def change(self, size: int, own: int = 0) -> None:
        """Take or, if negative, give back.

        Args:
            size: bytes.
            own: what the request holds already.

        Raises:
            Unavailable: there is not so much left. One request alone always fits.
        """
        if size > 0 and self._held > own and self._held + size > self._limit:
            raise Unavailable(f"the server's memory limit for {self._what} is reached; retry later")
        self._held += size

    def keep(self, size: int) -> None:
        """Count bytes that a request which is over still uses; :meth:`change` gives them back."""
        self._held += size


class Reservation:
    """One request's part of a budget."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._size = 0

    def add(self, size: int) -> None:
        """Take more.

        Raises:
            Unavailable: there is not so much left.
        """
        self._budget.change(size, self._size)
        self._size += size

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.change(-self._size)
