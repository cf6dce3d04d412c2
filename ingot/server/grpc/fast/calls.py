"""The calls of all connections: from a stream's bytes to a method, and from its answer or error to the stream."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from functools import partial

from ingot.errors import DeadlineExceeded, IngotError, InvalidArgument, Unavailable, public_text
from ingot.faultlog import rate_limited_logger
from ingot.server.compression import decompress
from ingot.server.dataplane import DataPlane, wrapped
from ingot.server.grpc.codec import STATUS
from ingot.server.grpc.fast import replies
from ingot.server.grpc.fast.control import STREAM_WINDOW, Control
from ingot.server.grpc.fast.endings import StreamCleanup
from ingot.server.grpc.fast.frames import ErrorCode
from ingot.server.grpc.fast.messages import PREFIX, Messages, pieces
from ingot.server.grpc.fast.method import Method
from ingot.server.grpc.fast.stream import Stream
from ingot.server.grpc.wire import Codec
from ingot.server.limits import BODY_PACE, CALL_BYTES, STREAM_BYTES, Budget
from ingot.server.requests import InferResponse

log = rate_limited_logger(__name__)

Work = Callable[[], Coroutine[None, None, None]]

_UNIMPLEMENTED, _RESOURCE_EXHAUSTED, _INTERNAL = 12, 8, 13


class Calls:
    """Answers calls.

    Args:
        plane: the server's behaviour.
        methods: what can be called, by path.
        infer: the path of inference, which goes to the data plane without a coroutine.
        limit: the most bytes of a message.
        budget: what messages that come in more than one frame may hold until their calls are over.
        open_calls: what calls may hold while they are open, without their messages.
        count_fault: called with the reason when a client breaks HTTP/2.
    """

    def __init__(
        self,
        plane: DataPlane,
        methods: Mapping[bytes, Method],
        infer: bytes,
        limit: int,
        budget: Budget,
        open_calls: Budget,
        count_fault: Callable[[ErrorCode], None],
    ):
        self._plane = plane
        self._methods = methods
        self._infer = methods[infer]
        self._limit = limit
        self._budget = budget
        self._open_calls = open_calls
        self._codec = Codec()
        self.count_fault = count_fault
        self.connections: set[Control] = set()
        self.endings = StreamCleanup()

    def begin(self, outlet: Control, stream: Stream) -> None:
        """Take a call whose headers came.

        Raises:
            Fault: the client sends too many that cannot be answered.
        """
        method = stream.method = self._methods.get(stream.head.path)
        if method is None:
            path = stream.head.path.decode(errors="replace")
            outlet.turn_away(stream, _UNIMPLEMENTED, f"there is no method {path[:200]}")
        elif stream.head.oversized:
            outlet.turn_away(stream, _RESOURCE_EXHAUSTED, "the call's metadata is too large")
        elif stream.head.untimely:  # grpcio's status, and Go's
            outlet.turn_away(stream, _INTERNAL, "grpc-timeout is not up to 8 digits and a unit")
        else:
            try:
                self._count(stream, CALL_BYTES)
            except Unavailable as error:
                self._refuse(outlet, stream, error)
                return
            if method.streaming is not None:
                stream.messages = Messages(self._limit)
            if stream.ended:
                self.ended(outlet, stream)

    def arm(self, outlet: Control, stream: Stream) -> None:
        """End a call when its deadline passes, whatever it does then."""
        if stream.left is not None and stream.timer is None and not stream.closed:
            stream.timer = outlet.loop.call_later(max(0.0, stream.left), self._late, outlet, stream)

    def whole(self, outlet: Control, stream: Stream, data: bytes) -> None:
        """Take a call whose request came in one frame, and is all there."""
        size = len(data) - PREFIX
        plain = size >= 0 and data[0] == 0 and int.from_bytes(data[1:PREFIX]) == size
        if plain and stream.method is self._infer and size <= self._limit:
            self._submit(outlet, stream, data[PREFIX:])
            return
        self.feed(outlet, stream, data)

    def feed(self, outlet: Control, stream: Stream, data: bytes) -> None:
        """Take some of a request; the last of it if the stream has ended."""
        if stream.messages is None:
            stream.messages = Messages(self._limit)
        messages = stream.messages
        try:
            self._hold(stream, len(data))
            complete = messages.feed(data)
            if messages.more and stream.method is not None and not stream.method.many:
                raise InvalidArgument("the call takes one message, and more were sent")
            if complete and stream.task is None and stream.method is not None and stream.method.streaming is not None:
                self._count(stream, STREAM_BYTES)  # not before: a task for each call that only waits would be dear
                self._run(outlet, stream, partial(self._stream, outlet, stream, stream.method))
        except IngotError as error:
            self._refuse(outlet, stream, error)
            stream.stop()  # its task would wait for more messages, and nobody would know of it
            return
        if stream.ended:
            self.ended(outlet, stream)
            return
        if complete:
            stream.wake()
        else:
            outlet.refill(stream)

    def ended(self, outlet: Control, stream: Stream) -> None:
        """Take the end of a request."""
        method = stream.method
        if method is None or method.streaming is not None:
            if method is not None and stream.task is None:  # which ends at once, as no message came
                self._run(outlet, stream, partial(self._stream, outlet, stream, method))
            stream.wake()
            return
        if stream.messages is None or not stream.messages.ready():
            self._refuse(outlet, stream, InvalidArgument("the call takes one message, and the request ended before it"))
            return
        compressed, data = stream.messages.take()
        if method is self._infer and not compressed:
            self._submit(outlet, stream, data)
        else:
            self._run(outlet, stream, partial(self._unary, outlet, stream, method, compressed, data))

    def stalled(self, outlet: Control, stream: Stream) -> None:
        """End a call of which a message was begun, and does not come."""
        self._end(outlet, stream, f"the rest of the message did not come in time; {BODY_PACE}")

    def _hold(self, stream: Stream, size: int) -> None:
        """Count memory for a call until it is over.

        Raises:
            Unavailable: it is too much, or the call is over: what still works for it is to stop.
        """
        if stream.closed:
            raise Unavailable("the call is over")
        self._budget.change(size, stream.held)
        stream.held += size

    def _count(self, stream: Stream, size: int) -> None:
        """Count what the server keeps for a call itself until it is over.

        Raises:
            Unavailable: too many calls are open.
        """
        self._open_calls.change(size, stream.counted)
        stream.counted += size

    def release(self, stream: Stream) -> None:
        """Give back what a call held."""
        if stream.held:
            self._budget.change(-stream.held)
            stream.held = 0
        if stream.counted:
            self._open_calls.change(-stream.counted)
            stream.counted = 0

    def _submit(self, outlet: Control, stream: Stream, data: bytes) -> None:
        try:
            left = stream.left
            if left is not None and left <= 0:
                raise DeadlineExceeded("the call's deadline passed before its request was there")
            request, typed = self._codec.decode(data, left)
            stream.ticket = self._plane.submit(request, "grpc", partial(self._answer, outlet, stream, typed))
        except IngotError as error:
            self._refuse(outlet, stream, error)
        except Exception as error:
            log.exception("ModelInfer failed")
            self._refuse(outlet, stream, wrapped(error))

    def _answer(self, outlet: Control, stream: Stream, typed: bool, outcome: InferResponse | IngotError) -> None:
        stream.ticket = None  # an answer that cannot be sent yet must not hold its request, too
        if isinstance(outcome, IngotError):
            self._refuse(outlet, stream, outcome)
            return
        try:
            outlet.answer(stream, *self._codec.encode(outcome, typed=typed))
        except IngotError as error:
            self._refuse(outlet, stream, error)
        except Exception as error:
            log.exception("an answer of model %s could not be encoded", outcome.route.name)
            self._refuse(outlet, stream, wrapped(error))

    def _refuse(self, outlet: Control, stream: Stream, error: IngotError) -> None:
        if stream.closed:
            return
        self._plane.count_error("grpc", error)
        status = STATUS[error.code]
        outlet.fail(stream, status, public_text(error), accepts=status == _UNIMPLEMENTED)

    def _late(self, outlet: Control, stream: Stream) -> None:
        stream.timer = None  # which leads back here
        self._end(outlet, stream, "the call's deadline passed")

    def _end(self, outlet: Control, stream: Stream, why: str) -> None:
        self._refuse(outlet, stream, DeadlineExceeded(why))
        stream.stop()

    def _run(self, outlet: Control, stream: Stream, work: Work) -> None:
        self.arm(outlet, stream)
        stream.task = outlet.loop.create_task(self._guarded(outlet, stream, work))

    async def _guarded(self, outlet: Control, stream: Stream, work: Work) -> None:
        """Answer with whatever goes wrong in a call."""
        try:
            await work()  # made here, as the task may be cancelled before it begins
        except IngotError as error:
            self._refuse(outlet, stream, error)
        except Exception as error:
            log.exception("%s failed", stream.head.path.decode(errors="replace"))
            self._refuse(outlet, stream, wrapped(error))

    async def _unary(self, outlet: Control, stream: Stream, method: Method, compressed: bool, data: bytes) -> None:
        if compressed:
            data = await self._decompressed(stream, data)
        if method is self._infer:
            self._submit(outlet, stream, data)
        elif method.unary is not None:
            answer = await method.unary(data)
            outlet.answer(stream, (answer,), len(answer))

    async def _stream(self, outlet: Control, stream: Stream, method: Method) -> None:
        if method.streaming is not None:
            async with contextlib.aclosing(method.streaming(self._messages(outlet, stream))) as answers:
                async for answer in answers:
                    self._settle(stream)
                    outlet.send(stream, b"\0" + len(answer).to_bytes(4), answer)
                    await outlet.room(stream)
        outlet.end(stream, replies.ending(0, opened=stream.opened))

    async def _messages(self, outlet: Control, stream: Stream) -> AsyncGenerator[bytes, None]:
        """Yield the messages of a request, as long as those in work are not too large together.

        Only when all that are complete were taken may the client send more of them.
        """
        messages = stream.messages
        working = stream.working = deque()
        while messages is not None:
            if messages.ready() and sum(working) < STREAM_WINDOW:
                compressed, data = messages.take()
                size = len(data) + PREFIX
                if compressed:
                    data = await self._decompressed(stream, data)
                    size += len(data)
                working.append(size)
                yield data
            elif stream.ended and not messages.ready():
                if messages.size:
                    raise InvalidArgument("the request ended amid a message")
                return
            else:
                if not messages.ready():
                    outlet.refill(stream)
                stream.waiting = outlet.loop.create_future()
                await stream.waiting

    def _settle(self, stream: Stream) -> None:
        """Give back what the oldest message of a stream held, as it is answered."""
        if stream.working and not stream.closed:
            size = stream.working.popleft()
            stream.held -= size
            self._budget.change(-size)
            stream.wake()

    async def _decompressed(self, stream: Stream, data: bytes) -> bytes:
        """Return what a message holds; that is held beside the message."""
        content = pieces(data, stream.head.encoding, self._limit)
        return await decompress(content, len(data), partial(self._hold, stream))
