"""The sending half of a connection: what one tick of the event loop has to say goes out in one write."""

from __future__ import annotations

import asyncio
from collections import deque

from ingot.errors import TooLarge
from ingot.server.grpc.fast import replies
from ingot.server.grpc.fast.frames import (
    DATA,
    DEFAULT_FRAME,
    DEFAULT_WINDOW,
    END_HEADERS,
    END_STREAM,
    HEAD,
    HEADERS,
    ErrorCode,
    frame,
    reset,
)
from ingot.server.grpc.fast.stream import Stream

# What is handed to the socket at once, so that one connection's large answers do not hold up the others.
_TURN = 256 << 10
# A handler that sends many messages waits while so much of them is not sent yet.
_STREAM_QUEUE = 256 << 10
# What a connection may hold of answers that the client's windows hold up; a single answer may be larger.
_MOST_QUEUED = 256 << 20
# Of this many streams that we ended first, frames may still be on their way.
_RECENT = 256


class FrameWriter:
    """Sends frames within the client's windows, in turn where several streams have more than one frame to send.

    ``queued`` is how many bytes of DATA wait, ``progress`` how many calls were answered and frames that waited sent,
    ``moved`` how many of those frames, and ``paused`` says that the socket takes no more. All of it belongs to one
    event loop.
    """

    __slots__ = (
        "_due",
        "_ended_first",
        "_out",
        "_ready",
        "initial",
        "loop",
        "max_frame",
        "moved",
        "over",
        "paused",
        "progress",
        "queued",
        "streams",
        "transport",
        "window",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.transport: asyncio.Transport | None = None
        self.streams: dict[int, Stream] = {}
        self.window = self.initial = DEFAULT_WINDOW
        self.max_frame = DEFAULT_FRAME
        self.queued = 0
        self.progress = self.moved = 0
        self.paused = self.over = False
        self._ended_first: dict[int, None] = {}
        self._out: list[bytes | memoryview] = []
        self._ready: dict[int, Stream] = {}
        self._due = False

    def released(self, stream: Stream) -> None:
        """Note that a stream is over."""

    def write(self, data: bytes) -> None:
        """Send bytes with the rest of this tick."""
        self._out.append(data)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send what is due."""
        self._due = False
        if self.transport is None or self.over:
            return
        if self._ready and not self.paused:
            self._take_turns()
        if self._out:
            data = b"".join(self._out)
            self._out.clear()
            self.transport.write(data)
        if self._ready and self.window > 0 and not self.paused and not self._due:
            self._due = True
            self.loop.call_soon(self.flush)

    def answer(self, stream: Stream, message: tuple[bytes, ...], size: int) -> None:
        """Answer a call with one message, given in parts, and end it.

        Raises:
            TooLarge: the client does not read its answers, and too much of them waits already.
        """
        if size + 5 <= min(self.window, self.initial + stream.credit, self.max_frame) and not self._ready:
            self.window -= size + 5
            self._out += replies.whole(stream.id, message, size)
            self.progress += 1
            self._over(stream)
            self._flush_soon()
            return
        self.send(stream, b"\0" + size.to_bytes(4), *message)
        self.end(stream, replies.ending(0, opened=True))

    def send(self, stream: Stream, *parts: bytes) -> None:
        """Send a message, given with its prefix in parts, as the client's windows allow.

        Raises:
            TooLarge: the client does not read its answers, and too much of them waits already.
        """
        if stream.closed:
            return
        size = sum(map(len, parts))
        if self.queued and self.queued + size > _MOST_QUEUED:
            raise TooLarge(
                f"{self.queued} bytes of answers wait for this connection's client to read them; "
                f"{size} more are not held: read what was asked for, or ask for less at once"
            )
        if not stream.opened:
            stream.opened = True
            self.write(replies.opening(stream.id))
        if stream.outgoing is None:
            stream.outgoing = deque()
        stream.outgoing.extend(part for part in parts if part)
        self.queued += size
        self.ready(stream)

    def end(self, stream: Stream, block: bytes) -> None:
        """End an answer with a block of headers, behind what waits to be sent."""
        if stream.closed:
            return
        if stream.outgoing:
            stream.ending = block
        else:
            self._end(stream, block)

    def fail(self, stream: Stream, status: int, text: str, *, accepts: bool = False) -> None:
        """End an answer with an error; what waits to be sent is dropped."""
        if not stream.closed:
            self._drop(stream)
            self._end(stream, replies.ending(status, text, opened=stream.opened, accepts=accepts))

    def refuse(self, stream: Stream, status: int) -> None:
        """Answer what is no gRPC."""
        self._end(stream, replies.refusal(status))

    def reset(self, stream: Stream, code: ErrorCode) -> None:
        """End a stream at once."""
        self.write(reset(stream.id, code))
        self.remember(stream.id)
        self.forget(stream)

    def forget(self, stream: Stream) -> None:
        """End a stream of which the client wants to hear no more."""
        self._drop(stream)
        stream.stop()
        self._over(stream)

    def ready(self, stream: Stream) -> None:
        """Send what a stream has, if it may; call this when its window grows, or its queue."""
        if stream.outgoing and self.initial + stream.credit > 0:
            self._ready[stream.id] = stream
            self.write(b"")

    def remember(self, stream_id: int) -> None:
        """Note that a stream was ended by us while the client may still send to it."""
        self._ended_first[stream_id] = None
        if len(self._ended_first) > _RECENT:
            del self._ended_first[next(iter(self._ended_first))]

    def was_ended_first(self, stream_id: int) -> bool:
        """Whether frames of a closed stream are to be ignored, since the client could not know that it is closed."""
        return stream_id in self._ended_first

    async def room(self, stream: Stream) -> None:
        """Wait until a stream has not too much to send."""
        while stream.outgoing and sum(map(len, stream.outgoing)) > _STREAM_QUEUE:
            stream.room = self.loop.create_future()
            await stream.room

    def _take_turns(self) -> None:
        """Put frames of DATA into what is sent now, one of each stream in turn."""
        left = _TURN
        while left > 0 and self.window > 0 and self._ready:
            stream = next(iter(self._ready.values()))
            del self._ready[stream.id]
            left -= self._turn(stream)
            if stream.outgoing and self.initial + stream.credit > 0:
                self._ready[stream.id] = stream

    def _turn(self, stream: Stream) -> int:
        """Put one frame of a stream into what is sent now; return its size."""
        queue = stream.outgoing
        if not queue:
            return 0
        room = min(self.window, self.initial + stream.credit, self.max_frame)
        if room <= 0:  # the client made its windows smaller meanwhile
            return 0
        parts: list[bytes | memoryview] = []
        size = 0
        while queue and size < room:
            part = queue.popleft()
            if len(part) > room - size:
                view = memoryview(part)
                part, rest = view[: room - size], view[room - size :]
                queue.appendleft(rest)
            parts.append(part)
            size += len(part)
        self.window -= size
        stream.credit -= size
        self.queued -= size
        self.progress += 1
        self.moved += 1
        self._out.append(HEAD.pack(size << 8 | DATA, 0, stream.id))
        self._out += parts
        if not queue and stream.ending is not None:
            self._end(stream, stream.ending)
        if stream.room is not None and not stream.room.done():
            stream.room.set_result(None)
        return size

    def _end(self, stream: Stream, block: bytes) -> None:
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, block))
        self.progress += 1
        self._over(stream)

    def _over(self, stream: Stream) -> None:
        if not stream.closed and not stream.ended:
            self.write(reset(stream.id, ErrorCode.NO_ERROR))  # the rest of the request would be of no use
            self.remember(stream.id)
        stream.closed = True
        if self.streams.pop(stream.id, None) is not None:
            self.released(stream)

    def _drop(self, stream: Stream) -> None:
        self._ready.pop(stream.id, None)
        if stream.outgoing:
            self.queued -= sum(map(len, stream.outgoing))
            stream.outgoing = None
        stream.ending = None
