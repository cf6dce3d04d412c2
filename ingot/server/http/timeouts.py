"""Time limits of a connection: for a head, for a body, for reading a response, and between two requests."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ingot.server.net.limits import BODY_BYTES

HEAD_SECONDS = 60.0
BODY_SECONDS = 60.0
UNREAD_SECONDS = 60.0
IDLE_SECONDS = 75.0
LINGER_SECONDS = 1.0


class Watched(Protocol):
    """The part of a connection that its timeouts use."""

    transport: asyncio.Transport

    @property
    def busy(self) -> bool:
        """Whether a request is unanswered."""

    @property
    def between(self) -> bool:
        """Whether the next byte begins a new request."""

    @property
    def in_body(self) -> bool:
        """Whether a body is incomplete."""

    @property
    def held(self) -> bool:
        """Whether the server delays the body: reading is paused, or an earlier request is unanswered."""

    def end_slow_body(self) -> None:
        """End the connection, as the body arrives too slowly."""


class Timeouts:
    """The timers of one connection.

    Each is set once, not with every request: when it fires, it checks what has happened since.

    - A head must be complete within :data:`HEAD_SECONDS`.
    - An incomplete body must bring :data:`BODY_BYTES` in every :data:`BODY_SECONDS`, not counting the time in which
      the server does not read.
    - A client must read some of a response every :data:`UNREAD_SECONDS`.
    - A connection without a request is closed after :data:`IDLE_SECONDS`.

    Attributes:
        in_head: whether a head is incomplete.
    """

    def __init__(self, connection: Watched):
        self._connection = connection
        self._transport = connection.transport
        self._loop = loop = asyncio.get_running_loop()
        self.in_head = True
        self._head: asyncio.TimerHandle | None = loop.call_later(HEAD_SECONDS, self._transport.abort)
        self._body: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._waited = False  # for a part of the current body
        self._received = 0
        self._minute = self._paused_before = 0.0
        self._paused = 0.0  # seconds for which reading was paused, without the current pause
        self._paused_since = 0.0

    def cancel(self) -> None:
        """Stop all timers."""
        for timer in (self._head, self._body, self._unread, self._idle, self._linger):
            if timer is not None:
                timer.cancel()
        self._head = self._body = self._unread = self._idle = self._linger = None

    def wait_for_head(self) -> None:
        """Note that a head is incomplete."""
        if self._head is None:
            self.in_head = True
            self._head = self._loop.call_later(HEAD_SECONDS, self._transport.abort)

    def end_head(self) -> None:
        """Note that no head is incomplete."""
        if self._head is not None:
            self._head.cancel()
            self._head = None
            self.in_head = False

    def begin_body(self) -> None:
        """Note that another body begins."""
        self._waited = False

    def wait_for_body(self, size: int) -> None:
        """Note that ``size`` bytes arrived, and that the body is still incomplete."""
        if not self._waited:
            self._waited = True
            self._begin_minute()
        self._received += size
        if self._body is None:
            self._body = self._loop.call_later(BODY_SECONDS, self._check_body)

    def _begin_minute(self) -> None:
        self._received = 0
        self._minute = self._loop.time()
        self._paused_before = self._paused

    def _check_body(self) -> None:
        self._body = None
        if not self._connection.in_body or self._transport.is_closing():
            return  # the next incomplete body sets the timer again
        left = BODY_SECONDS - (self._loop.time() - self._minute - (self._paused - self._paused_before))
        if self._connection.held:
            left = BODY_SECONDS
        elif left <= 0:
            if self._received < BODY_BYTES:
                self._connection.end_slow_body()
                return
            self._begin_minute()
            left = BODY_SECONDS
        self._body = self._loop.call_later(left, self._check_body)

    def reading(self, *, paused: bool) -> None:
        """Note that reading is paused or resumed."""
        if paused:
            self._paused_since = self._loop.time()
        else:
            self._paused += self._loop.time() - self._paused_since

    def wait_for_reader(self) -> None:
        """Close the connection unless its client reads some of what was sent, in every interval."""
        size = self._transport.get_write_buffer_size()
        if size and self._unread is None:
            self._unread = self._loop.call_later(UNREAD_SECONDS, self._check_unread, size)

    def end_wait_for_reader(self) -> None:
        """Note that the client reads."""
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _check_unread(self, before: int) -> None:
        self._unread = None
        if self._transport.get_write_buffer_size() == before:
            self._transport.abort()
        else:
            self.wait_for_reader()

    def begin_idle(self) -> None:
        """Note that a response is complete."""
        self._idle_since = self._loop.time()
        if self._idle is None:
            self._idle = self._loop.call_later(IDLE_SECONDS, self._check_idle)

    def _check_idle(self) -> None:
        self._idle = None
        if self._connection.busy or not self._connection.between:
            return  # the end of the response sets the timer again
        left = self._idle_since + IDLE_SECONDS - self._loop.time()
        if left > 0:
            self._idle = self._loop.call_later(left, self._check_idle)
        else:
            self.close()

    def linger(self, most: float) -> None:
        """Close the connection in :data:`LINGER_SECONDS`, at most ``most``, if it is idle then."""
        self._linger = self._loop.call_later(min(LINGER_SECONDS, most), self._end_linger)

    def _end_linger(self) -> None:
        if not self._connection.busy:
            self._transport.close()

    def close(self) -> None:
        """Close the connection when the client has read all that was sent, or left."""
        self._transport.close()
        self.wait_for_reader()
