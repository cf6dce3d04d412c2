"""The sending half of an HTTP/2 connection: frames within the client's windows, collected for one write."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic

from ingot.errors import TooLarge
from ingot.server.http2.frames import (
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
from ingot.server.http2.stream import Handler, S

# Bytes of queued DATA per write, so that one connection's large answers do not delay the others.
_TURN = 256 << 10
# Bytes of answers that a connection may queue while the client's windows are closed; a single answer may be larger.
_MOST_QUEUED = 256 << 20
# Streams that we ended first and whose frames may still be on their way.
_RECENT = 256


class Sender(Generic[S]):
    """Sends frames within the client's windows, round-robin over the streams that have queued DATA.

    ``queued``: bytes of DATA that wait. ``progress``: answered calls and messages, plus sent frames that had waited.
    ``moved``: sent frames that had waited. ``paused``: the transport accepts no more, so queued DATA stays queued.
    """

    __slots__ = (
        "_due",
        "_ended_first",
        "_handler",
        "_out",
        "_ready",
        "initial",
        "max_frame",
        "moved",
        "paused",
        "progress",
        "queued",
        "streams",
        "window",
    )

    def __init__(self, handler: Handler[S]):
        self._handler = handler
        self.streams: dict[int, S] = {}
        self.window = self.initial = DEFAULT_WINDOW
        self.max_frame = DEFAULT_FRAME
        self.queued = 0
        self.progress = self.moved = 0
        self.paused = False
        self._ended_first: dict[int, None] = {}
        self._out: list[bytes | memoryview] = []
        self._ready: dict[int, S] = {}
        self._due = False

    def write(self, data: bytes) -> None:
        """Append bytes to the output."""
        self._out.append(data)
        self._wake()

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._handler.wake()

    def take(self) -> bytes:
        """Return the output and clear it; ask for another write if queued DATA may be sent after it."""
        self._due = False
        if self._ready and not self.paused:
            self._take_turns()
            if self._ready and self.window > 0:
                self._wake()
        data = b"".join(self._out)
        self._out.clear()
        return data

    def answer(self, stream: S, frames: Iterable[bytes], size: int) -> bool:
        """Send a whole answer if the client's windows allow it at once; return whether they do.

        Args:
            stream: ends with the answer.
            frames: of the answer, one of them DATA.
            size: bytes of DATA.
        """
        if self._ready or size > self.window or size > self.initial + stream.credit or size > self.max_frame:
            return False
        self.window -= size
        self._out += frames
        self.progress += 1
        self._over(stream)
        if not self._due:
            self._due = True
            self._handler.wake()
        return True

    def send(self, stream: S, opening: bytes, *parts: bytes) -> None:
        """Send DATA as the client's windows allow, after the header block ``opening`` if the answer has not begun.

        Raises:
            TooLarge: the client does not read its answers, and too many bytes wait already.
        """
        if stream.closed:
            return
        size = sum(map(len, parts))
        if self.queued and self.queued + size > _MOST_QUEUED:
            raise TooLarge(
                f"{self.queued} bytes of answers wait for this connection's client to read them, "
                f"and {size} more exceed the limit: read the answers, or ask for less at once"
            )
        if not stream.opened:
            stream.opened = True
            self.write(frame(HEADERS, END_HEADERS, stream.id, opening))
        if stream.outgoing is None:
            stream.outgoing = deque()
        stream.outgoing.extend(part for part in parts if part)
        self.queued += size
        # Several messages may share a frame, and gRPC's core opens its windows after each message that it reads.
        self.progress += 1
        self.ready(stream)

    def end(self, stream: S, block: bytes) -> None:
        """End an answer with a header block, after the queued DATA."""
        if stream.closed:
            return
        if stream.outgoing:
            stream.ending = block
        else:
            self._end(stream, block)

    def replace(self, stream: S, block: bytes) -> None:
        """End an answer with a header block at once; queued DATA is dropped."""
        self._drop(stream)
        self._end(stream, block)

    def reset(self, stream: S, code: ErrorCode) -> None:
        """Reset a stream."""
        self.write(reset(stream.id, code))
        self.remember(stream.id)
        self.forget(stream)

    def forget(self, stream: S) -> None:
        """Drop a stream that was reset."""
        self._drop(stream)
        self._handler.stopped(stream)
        self._over(stream)

    def ready(self, stream: S) -> None:
        """Queue a stream for sending if its window is open. Call this when its window or its queue grows."""
        if stream.outgoing and self.initial + stream.credit > 0:
            self._ready[stream.id] = stream
            self.write(b"")

    def remember(self, stream_id: int) -> None:
        """Remember a stream that we ended while the client may still send to it."""
        self._ended_first[stream_id] = None
        if len(self._ended_first) > _RECENT:
            del self._ended_first[next(iter(self._ended_first))]

    def was_ended_first(self, stream_id: int) -> bool:
        """Return whether to ignore frames of a closed stream: the client may not know yet that it is closed."""
        return stream_id in self._ended_first

    def _take_turns(self) -> None:
        """Move DATA frames to the output, one per stream in turn."""
        left = _TURN
        while left > 0 and self.window > 0 and self._ready:
            stream = next(iter(self._ready.values()))
            del self._ready[stream.id]
            left -= self._turn(stream)
            if stream.outgoing and self.initial + stream.credit > 0:
                self._ready[stream.id] = stream

    def _turn(self, stream: S) -> int:
        """Move one DATA frame of a stream to the output; return its size."""
        queue = stream.outgoing
        if not queue:
            return 0
        room = min(self.window, self.initial + stream.credit, self.max_frame)
        if room <= 0:  # the client has reduced its window since
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
        self._handler.sent(stream)
        return size

    def _end(self, stream: S, block: bytes) -> None:
        self.write(frame(HEADERS, END_HEADERS | END_STREAM, stream.id, block))
        self.progress += 1
        self._over(stream)

    def _over(self, stream: S) -> None:
        if not stream.closed and not stream.ended:
            self.write(reset(stream.id, ErrorCode.NO_ERROR))  # the rest of the request is not needed
            self.remember(stream.id)
        stream.closed = True
        if self.streams.pop(stream.id, None) is not None:
            self._handler.released(stream)

    def _drop(self, stream: S) -> None:
        self._ready.pop(stream.id, None)
        if stream.outgoing:
            self.queued -= sum(map(len, stream.outgoing))
            stream.outgoing = None
        stream.ending = None
