"""Distinguishes a client that left from one that only ended its sending side: until a write, both look the same."""

from __future__ import annotations

import asyncio
import os
import socket

from ingot.server.http.responses import CONTINUE

# If the model responds within the first of these, nothing but the response is written.
_FIRST_SECONDS = 0.05
_LONGEST_SECONDS = 1.0
_CLOSED = 7  # TCP_CLOSE in Linux's tcp_states.h


class DisconnectProbe:
    """Watches a connection whose client has ended its side while a request is unanswered.

    The client may have left, or have only shut down its sending side. It is sent an interim response, which every
    client of HTTP/1.1 ignores; the system of a client that left rejects it, and then the connection is aborted.

    Args:
        transport: the connection.
    """

    def __init__(self, transport: asyncio.Transport):
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._delay = _FIRST_SECONDS
        self._timer = self._loop.call_later(self._delay, self._probe)

    def cancel(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _probe(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(CONTINUE)
            self._timer = self._loop.call_later(self._delay, self._check)

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if _state(self._transport) == _CLOSED:
            self._transport.abort()
            return
        self._delay = min(2 * self._delay, _LONGEST_SECONDS)
        self._timer = self._loop.call_later(self._delay, self._check)


def _state(transport: asyncio.Transport) -> int:
    """Return the state of a connection, as Linux reports it."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as copy:
        return copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
