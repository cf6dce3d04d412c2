"""Bounds on what clients can use: the memory of all clients together, their connections, and the requests of each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from ingot.errors import TooLarge, TooManyRequests, Unavailable
from ingot.report import units

# Bytes that an incomplete body or message must bring per minute. Otherwise a few clients that never finish theirs could
# hold the whole budget. This is 17 KiB/s, slower than any link that tensors are sent over.
BODY_BYTES = 1 << 20
BODY_PACE = f"send at least {BODY_BYTES >> 20} MiB a minute"


SMALL_BYTES = 1 << 20
"""Most bytes of a body or message other than those of inference, which is converted in the event loop."""

# Bytes that an open call costs in addition to its messages, rounded up: of a call of few messages, and of a stream,
# which needs a task.
CALL_BYTES = 2 << 10
STREAM_BYTES = 16 << 10
# The share of the limit on bodies that open calls may use, and its minimum, for servers with a low limit.
_CALLS_PART = 4
_CALLS_LEAST = 16 << 20
# Named clients that are remembered before those that use nothing are dropped.
_REMEMBERED_CLIENTS = 1024


# A request may hold this multiple of the bytes left in a budget. The rest is for small requests, so that large
# ones cannot keep them out.
_TIMES_FREE = 7


def check_size(size: int, limit: int) -> None:
    """Refuse a body over the limit: that of ``--max-body-mb``, or :data:`SMALL_BYTES`, which may be equal.

    Raises:
        TooLarge: names both sizes.
    """
    if size > limit:
        which = ", which --max-body-mb raises for inference only" if limit == SMALL_BYTES else " (--max-body-mb)"
        raise TooLarge(f"the request body has {size} bytes, over the limit of {units.size(limit)}{which}")


def bodies_budget(max_bodies_bytes: int) -> Budget:
    """Return the budget of request bodies, of which large ones leave a part to small ones."""
    return Budget(max_bodies_bytes, share=_TIMES_FREE)


def calls_budget(max_bodies_bytes: int) -> Budget:
    """Return the budget of a server's open calls, not counting their messages."""
    return Budget(max(max_bodies_bytes // _CALLS_PART, _CALLS_LEAST), "open calls")


class Budget:
    """The bytes that all clients together may hold in memory.

    A request body counts from its arrival to its response.

    Args:
        limit: most bytes.
        what: what they hold, for the error message.
        share: how many times the bytes that it leaves a request may hold; any number by default.
    """

    def __init__(self, limit: int, what: str = "request bodies", share: float = math.inf):
        self._limit = limit
        self._share = share
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
        if size > 0 and self._held > own and (size > left or own + size > self._share * left):
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


class Share:
    """One client's use of its limits.

    Attributes:
        in_flight: its unanswered requests.
        spent: requests that still count for its rate, as of ``at``, in the clock's seconds.
    """

    __slots__ = ("at", "in_flight", "spent")

    def __init__(self) -> None:
        self.in_flight = 0
        self.spent = 0.0
        self.at = 0.0


class ClientLimits:
    """Limits of connections, and of each client's requests. A client is an API key or certificate, or a connection.

    The rate is that of a token bucket which holds the requests of one second, and at least one.

    Args:
        count: called with the name of the limit at each refusal.
        connections: most connections; None for no limit.
        in_flight: most unanswered requests of a client; None for no limit.
        rate: most requests per second of a client; None for no limit.
        clock: returns seconds.
    """

    def __init__(
        self,
        count: Callable[[str], None],
        connections: int | None = None,
        in_flight: int | None = None,
        rate: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._count = count
        self._most_connections = connections
        self._most_in_flight = in_flight
        self._rate = rate
        self._clock = clock
        self._connections = 0
        self._shares: dict[str, Share] = {}
        self._sweep_at = _REMEMBERED_CLIENTS

    def connect(self) -> Unavailable | None:
        """Count a new connection, or return why it is refused; pair the former with :meth:`disconnect`."""
        if self._most_connections is not None and self._connections >= self._most_connections:
            self._count("connections")
            return Unavailable(f"the server has {self._connections} connections, its limit; retry later")
        self._connections += 1
        return None

    def disconnect(self) -> None:
        """Count a connection as closed."""
        self._connections -= 1

    def share(self, client: str, own: Share) -> Share:
        """Return the share of a named client; ``own``, that of its connection, if the name is empty."""
        if not client:
            return own
        share = self._shares.get(client)
        if share is None:
            if len(self._shares) >= self._sweep_at:
                self._sweep()
            share = self._shares[client] = Share()
        return share

    def admit(self, client: str, own: Share) -> Share:
        """Count a request for both limits of a client, and return its share for :meth:`leave`; arguments as above.

        Raises:
            TooManyRequests: a limit is reached; the request does not count.
        """
        share = self.share(client, own)
        self.enter(share)
        try:
            self.spend(share)
        except TooManyRequests:
            self.leave(share)
            raise
        return share

    def enter(self, share: Share) -> None:
        """Count a request as in flight until :meth:`leave`.

        Raises:
            TooManyRequests: too many of the client's requests are in flight.
        """
        most = self._most_in_flight
        if most is not None and share.in_flight >= most:
            self._count("in_flight")
            raise TooManyRequests(f"{share.in_flight} requests of this client are in flight, its limit; retry later")
        share.in_flight += 1

    def leave(self, share: Share) -> None:
        """Count a request as answered."""
        share.in_flight -= 1

    def spend(self, share: Share) -> None:
        """Count a request for the client's rate. A refused one does not count.

        Raises:
            TooManyRequests: the client sends more than its rate.
        """
        rate = self._rate
        if rate is None:
            return
        self._refill(share, rate)
        if share.spent + 1 > max(1.0, rate):
            self._count("rate")
            raise TooManyRequests(f"this client sends more than {rate:g} requests per second, its limit; retry later")
        share.spent += 1

    def _refill(self, share: Share, rate: float) -> None:
        now = self._clock()
        share.spent = max(0.0, share.spent - (now - share.at) * rate)
        share.at = now

    def _sweep(self) -> None:
        """Drop the shares of clients that use nothing of their limits, as tokens can name any number of clients."""
        for client, share in list(self._shares.items()):
            if self._rate is not None:
                self._refill(share, self._rate)
            if not share.in_flight and not share.spent:
                del self._shares[client]
        self._sweep_at = max(_REMEMBERED_CLIENTS, 2 * len(self._shares))
