"""Streaming calls: messages in one by one, and answers out while more arrive.

They are async generators, which mypyc does not compile, and so they are apart from the calls of calls.py.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable

from ingot.errors import InvalidArgument
from ingot.protocol.context import CONTEXT
from ingot.protocol.requests import CLIENT
from ingot.server.grpc.call import Call, Method
from ingot.server.grpc.messages import PREFIX
from ingot.server.grpc.replies import Replies
from ingot.server.http2.connection import STREAM_WINDOW
from ingot.server.net.limits import Budget, ClientLimits


class Streams:
    """Runs streaming calls.

    Args:
        budget: the bytes that messages may use; see :class:`~ingot.server.grpc.calls.Calls`.
        limits: those on clients; None for no limits.
        decompress: returns the content of a compressed message of a call.
    """

    def __init__(
        self, budget: Budget, limits: ClientLimits | None, decompress: Callable[[Call, bytes], Awaitable[bytes]]
    ):
        self._budget = budget
        self._limits = limits
        self._decompress = decompress

    async def run(self, replies: Replies, call: Call, method: Method) -> None:
        """Answer a streaming call."""
        CLIENT.set(call.head.client or id(replies))
        CONTEXT.set(call.context)
        if method.streaming is not None:
            async with contextlib.aclosing(method.streaming(self._messages(replies, call))) as answers:
                async for answer in answers:
                    self._settle(call)
                    replies.send(call, answer)
                    await replies.room(call)
        replies.end(call)

    async def _messages(self, replies: Replies, call: Call) -> AsyncGenerator[bytes, None]:
        """Yield the messages of a request while those in progress stay below a limit.

        The client may send more only after all complete messages were taken.
        """
        messages = call.messages
        working = call.working = deque()
        while messages is not None:
            if messages.ready() and sum(working) < STREAM_WINDOW:
                compressed, data = messages.take()
                size = len(data) + PREFIX
                if compressed:
                    data = await self._decompress(call, data)
                    size += len(data)
                if self._limits is not None and call.share is not None:
                    self._limits.spend(call.share)
                working.append(size)
                yield data
            elif call.ended and not messages.ready():
                if messages.size:
                    raise InvalidArgument("the request ended in the middle of a message")
                return
            else:
                if not messages.ready():
                    replies.http2.refill(call)
                call.waiting = replies.loop.create_future()
                await call.waiting

    def _settle(self, call: Call) -> None:
        """Release the memory of a stream's oldest message, which is being answered."""
        if call.working and not call.closed:
            size = call.working.popleft()
            call.held -= size
            self._budget.change(-size)
            call.wake()
