"""Bounds on what clients can make the server hold."""

from __future__ import annotations

from ingot.errors import TooLarge, Unavailable

# What a body or a message that has begun must bring in each minute until it is whole. Else a few clients that never
# finish theirs could hold all of the budget for ever. It is 17 KiB/s: less than any link that tensors are sent over.
BODY_BYTES = 1 << 20
BODY_PACE = f"send at least {BODY_BYTES >> 20} MiB a minute"


def check_size(size: int, limit: int) -> None:
    """Refuse a body over the limit.

    Raises:
        TooLarge: names both sizes and the setting.
    """
    if size > limit:
        raise TooLarge(f"the request body has {size} bytes, over the limit of {limit}; see --max-body-mb")


class Budget:
    """The bytes of request bodies that all clients together may have in memory, from their arrival to their answer."""

    def __init__(self, limit: int):
        self._limit = limit
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
            raise Unavailable("the server holds as many request bodies as it may; try later, or see --max-bodies-mb")
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
