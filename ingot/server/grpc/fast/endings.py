"""Cleans up the calls of closed connections, a limited number per event-loop tick."""

from __future__ import annotations

import asyncio
from collections import deque

from ingot.server.grpc.fast.outlet import FrameWriter

# Each may cancel a task, with what that works on: some 0.1 ms.
_A_TICK = 64


class StreamCleanup:
    """The connections of one event loop that are over, and still have calls."""

    def __init__(self) -> None:
        self._outlets: deque[FrameWriter] = deque()
        self._due = False

    def add(self, outlet: FrameWriter) -> None:
        """End the calls of a connection: the first of them now, unless this tick has ended enough already."""
        self._outlets.append(outlet)
        if not self._due:
            self._end_some(outlet.loop)

    def _end_some(self, loop: asyncio.AbstractEventLoop) -> None:
        left = _A_TICK
        while self._outlets and left:
            outlet = self._outlets[0]
            while outlet.streams and left:
                outlet.forget(next(iter(outlet.streams.values())))
                left -= 1
            if not outlet.streams:
                self._outlets.popleft()
        self._due = left < _A_TICK
        if self._due:
            loop.call_soon(self._end_some, loop)
