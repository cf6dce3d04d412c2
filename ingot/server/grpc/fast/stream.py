"""One stream of a connection, which is one call: what has arrived of it, and what waits to be sent."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from ingot.server.dataplane import Ticket
from ingot.server.grpc.fast.head import Head
from ingot.server.grpc.fast.messages import Messages
from ingot.server.grpc.fast.method import Method
from ingot.server.limits import BODY_BYTES


class Stream:
    """A call.

    ``ended`` says that the client has sent all, ``closed`` that nothing more is to be sent to it. ``credit`` is what
    the client's window differs by from the initial one, ``received`` what of our window is not given back yet, and
    ``held`` what the call's messages hold of the server's budget, ``counted`` what the call itself holds of the budget
    for open calls. ``working`` has the bytes of each message that was taken and is not answered yet.
    """

    # Most calls need none of these; what is not set takes no time.
    ended = opened = closed = False
    credit = received = held = counted = total = 0
    looks = mark = number = 0  # of stalls()
    method: Method | None = None
    messages: Messages | None = None
    outgoing: deque[bytes | memoryview] | None = None
    working: deque[int] | None = None
    ending: bytes | None = None
    ticket: Ticket | None = None
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    waiting: asyncio.Future[None] | None = None  # for a message
    room: asyncio.Future[None] | None = None  # to send

    def __init__(self, stream_id: int, head: Head):
        self.id = stream_id
        self.head = head
        self.deadline = None if head.timeout is None else time.perf_counter() + head.timeout

    @property
    def left(self) -> float | None:
        """The seconds until the deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.perf_counter()

    def stalls(self, looks: int) -> bool:
        """Tell whether a message was begun, and too little of it came in so many calls of this.

        A call of one message has begun it with its headers. One that takes many may wait between them for ever.
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
        """Tell a call that waits for a message that there is one, or will be none, or that it may take one."""
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_result(None)

    def stop(self) -> None:
        """End the work, as nobody waits for its result."""
        self.closed = True
        if self.ticket is not None:
            self.ticket.cancel()
            self.ticket = None  # which leads back here
        if self.task is not None:
            self.task.cancel()
        if self.timer is not None:
            self.timer.cancel()
