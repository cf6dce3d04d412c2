"""Telling a client that is gone from one that only sends no more: both look the same until they are written to."""

from __future__ import annotations

import asyncio
import os
import socket

# A model that answers within the first of these never writes anything but its answer.
_PATIENCE_SECONDS = 0.05
_LONGEST_SECONDS = 1.0
_CLOSED = 7  # TCP_CLOSE in Linux's tcp_states.h
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Departure:
    """Watches a connection whose client has ended its side while a request of it is in work.

    The client may have left, or only have shut down its sending side. It is sent an interim answer, which every client
    of HTTP/1.1 passes over; the system of one that has left refuses it, and then the connection is ended.

    Args:
        loop: the connection's.
        transport: the connection.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport):
        self._loop = loop
        self._transport = transport
        self._delay = _PATIENCE_SECONDS
        self._timer = loop.call_later(self._delay, self._probe)

    def end(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _probe(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(_PROBE)
            self._timer = self._loop.call_later(self._delay, self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if _state(self._transport) == _CLOSED:
            self._transport.abort()
            return
        self._delay = min(2 * self._delay, _LONGEST_SECONDS)
        self._timer = self._loop.call_later(self._delay, self._look)


def _state(transport: asyncio.Transport) -> int:
    """Return the connection's state as Linux tells it."""
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as copy:
        return copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
