"""The state of one gRPC call: its stream, its messages, and its work."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from ingot.protocol.context import RequestContext
from ingot.protocol.requests import Cancellable
from ingot.server.grpc.head import Head
from ingot.server.grpc.messages import Messages
from ingot.server.http2.stream import Stream
from ingot.server.net.limits import BODY_BYTES, Share

CANCELLED = 1

Unary = Callable[[bytes], Awaitable[bytes]]
Streaming = Callable[[AsyncIterator[bytes]], AsyncGenerator[bytes, None]]


@dataclass(frozen=True)
class Method:
    """A method of a service, unary or streaming.

    ``many``: it accepts more than one message. ``large``: a message may
    exceed 1 MiB, as only those of inference may.
    """

    unary: Unary | None = None
    streaming: Streaming | None = None
    many: bool = False
    large: bool = False


class Call(Stream):
    """A call.

    ``held``: bytes of the message budget that the call's messages use. ``counted``: bytes of the budget for open calls
    that the call uses. ``working``: the size of each message that was read and not yet answered.
    """

    held = 0
    counted = 0
    looks = 0  # of stalls(), as the next two
    mark = 0
    number = 0
    deadline: float | None = None
    method: Method | None = None
    messages: Messages | None = None
    working: deque[int] | None = None
    share: Share | None = None  # of its client, while limits count the call
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    waiting: asyncio.Future[None] | None = None  # for a message
    room: asyncio.Future[None] | None = None  # to send
    _context: RequestContext | None = None

    def __init__(self, stream_id: int, head: Head):
        super().__init__(stream_id, head.length)
        self.head = head
        self.ticket: Cancellable | None = None  # compiled, a default that may be a protocol's is left unset
        if head.timeout is not None:
            self.deadline = time.perf_counter() + head.timeout

    @property
    def context(self) -> RequestContext:
        """The call's identity."""
        if self._context is None:
            request_id, traceparent = self.head.identity
            self._context = RequestContext(request_id, traceparent)
        return self._context

    @property
    def left(self) -> float | None:
        """The seconds until the deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.perf_counter()

    def stalls(self, looks: int) -> bool:
        """Return whether a message is incomplete and too little of it arrived in this many calls of the method.

        A unary call's message counts as begun with its headers. A streaming call may pause between messages.
        """
        if self.method is None or self.ended:
            return False
        messages = self.messages
        number = 0 if messages is None else messages.taken
        begun = self.method.streaming is None or (messages is not None and messages.begun)
        if not begun or number != self.number or self.total - self.mark >= BODY_BYTES:
            self.looks, self.mark, self.number = 0, self.total, number
            return False
        self.looks += 1
        return self.looks > looks

    def wake(self) -> None:
        """Wake a call that waits for a message: one has arrived, none will follow, or one may be read now."""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    def stop(self) -> None:
        """Cancel the work: its result is not needed."""
        self.closed = True
        if self._context is not None:
            self._context.finish(CANCELLED)
        if self.ticket is not None:
            self.ticket.cancel()
            self.ticket = None  # cancelling must not call stop() again
        if self.task is not None:
            self.task.cancel()
        if self.timer is not None:
            self.timer.cancel()
