"""Runs the calls of all connections: from a stream's bytes to a method, and from its result back to the stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Final

from ingot.errors import Code, DeadlineExceeded, IngotError, InvalidArgument, Unavailable, public_text
from ingot.faults import attempt_async, public_error
from ingot.protocol import proto_codec
from ingot.protocol.context import CONTEXT, GRPC
from ingot.protocol.proto_codec import STATUS
from ingot.protocol.requests import CLIENT, InferResponse, memory_of
from ingot.server.access.gate import Gate
from ingot.server.access.grants import Refusal
from ingot.server.grpc.call import Call, Method
from ingot.server.grpc.head import Head
from ingot.server.grpc.health import scope_of
from ingot.server.grpc.messages import PREFIX, Messages, pieces
from ingot.server.grpc.protobuf_memo import Codec, Decoded
from ingot.server.grpc.replies import Replies, StreamCleanup
from ingot.server.grpc.streams import Streams
from ingot.server.http2.abuse_budget import COST_OF_REFUSAL
from ingot.server.http2.frames import ErrorCode
from ingot.server.net import compression
from ingot.server.net.compression import decompress
from ingot.server.net.limits import BODY_PACE, CALL_BYTES, SMALL_BYTES, STREAM_BYTES, Budget, ClientLimits
from ingot.server.plane.dataplane import DataPlane

Work = Callable[[], Coroutine[None, None, None]]

_clock: Final = time.perf_counter
_UNIMPLEMENTED, _RESOURCE_EXHAUSTED, _INTERNAL = 12, 8, 13
_TOO_MANY: Final = Code.TOO_MANY_REQUESTS


class Calls:
    """Runs calls.

    Args:
        plane: the server's behaviour.
        methods: the methods by path.
        infer: the path of ModelInfer, which calls the data plane without a coroutine.
        limit: the most bytes of a message of inference.
        budget: the bytes that messages of more than one frame may use until their calls end.
        open_calls: the bytes that open calls may use, not counting their messages.
        count_fault: called with the reason when a client breaks HTTP/2.
        gate: the rules of access; None if all calls are served.
        limits: those on clients; None for no limits.

    Attributes:
        stopping: whether connections are to leave.
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
        gate: Gate | None = None,
        limits: ClientLimits | None = None,
    ):
        self._plane = plane
        self._methods = methods
        self._infer = methods[infer]
        self._limit = limit
        self._budget = budget
        self._open_calls = open_calls
        self._gate = gate
        self.limits = limits
        self.stopping = False
        self.checks_access = gate is not None
        sticky = plane.sticky_header.encode()
        self.parse: Callable[[list[tuple[bytes, bytes]]], Head] = (
            partial(Head, sticky_header=sticky) if sticky else Head
        )
        self._codec = Codec(plane.repository.get, plane.reader)
        self.count_fault = count_fault
        self.cleanup = StreamCleanup()
        self._streams = Streams(budget, limits, self._decompressed)

    def begin(self, replies: Replies, call: Call) -> None:
        """Accept a call after its headers.

        Raises:
            Fault: the client sends too many calls that are refused.
        """
        head = call.head
        if self._plane.observer is not None:
            self._plane.observer.begin(call.context, GRPC, head.path)
        if head.refusal:
            replies.refuse(call, head.refusal)
            replies.http2.abuse_budget.spend(COST_OF_REFUSAL, "too many refused calls")
            return
        method = call.method = self._methods.get(head.path)
        if method is None:
            path = head.path.decode(errors="replace")
            self._turn_away(replies, call, _UNIMPLEMENTED, f"there is no method {path[:200]}")
        elif head.oversized:
            self._turn_away(replies, call, _RESOURCE_EXHAUSTED, "the call's metadata is too large")
        elif head.untimely:  # grpcio's status, and Go's
            self._turn_away(replies, call, _INTERNAL, "grpc-timeout is not up to 8 digits and a unit")
        elif self._gate is not None and (refusal := self._admit(self._gate, replies, call.head)) is not None:
            self._plane.count_error("grpc", refusal.error)
            self._turn_away(replies, call, STATUS[refusal.error.code], public_text(refusal.error))
        elif self.limits is None or self._enter(self.limits, replies, call, method):
            replies.fresh.append(call)
            if method.streaming is not None:
                call.messages = Messages(self._limit_of(call))
            if call.ended:
                self.ended(replies, call)

    def _admit(self, gate: Gate, replies: Replies, head: Head) -> Refusal | None:
        """Return why a call is refused, or None; the decision is kept in the head, which later calls share."""
        scope = "" if head.epoch == gate.epoch else scope_of(head.path)
        if not scope:
            return None
        outcome = gate.check(head.authorization, scope, replies.peer)
        if isinstance(outcome, Refusal):
            gate.count(outcome, "grpc", head.path.decode(errors="replace"), replies.peer)
            return outcome
        head.client, head.epoch = outcome.client, gate.epoch
        return None

    def _enter(self, limits: ClientLimits, replies: Replies, call: Call, method: Method) -> bool:
        """Count a call for its client's limits, or refuse it; each message of a stream counts for the rate instead."""
        if not scope_of(call.head.path):
            return True
        try:
            if method.many:
                share = limits.share(call.head.client, replies.share)
                limits.enter(share)
            else:
                share = limits.admit(call.head.client, replies.share)
        except IngotError as error:
            self._refuse(replies, call, error)
            return False
        call.share = share
        return True

    def recheck(self, replies: Replies, call: Call) -> None:
        """End an open stream whose client has lost its access."""
        if self._gate is None or call.closed or call.method is None or call.method.streaming is None:
            return
        refusal = self._admit(self._gate, replies, call.head)
        if refusal is not None:
            self._refuse(replies, call, refusal.error)
            call.stop()

    def _turn_away(self, replies: Replies, call: Call, status: int, text: str) -> None:
        """Refuse a call because of its headers."""
        replies.fail(call, status, text)
        replies.http2.abuse_budget.spend(COST_OF_REFUSAL, "too many refused calls")

    def expect(self, replies: Replies, call: Call) -> None:
        """Count a call whose request is not complete after the read that brought its headers, and set its timer."""
        try:
            self._open_calls.change(CALL_BYTES, call.counted)
        except Unavailable as error:
            self._refuse(replies, call, error)
            call.stop()
            return
        call.counted += CALL_BYTES
        self.arm(replies, call)

    def arm(self, replies: Replies, call: Call) -> None:
        """End a call when its deadline passes, whatever it does then."""
        if call.left is not None and call.timer is None and not call.closed:
            call.timer = replies.loop.call_later(max(0.0, call.left), self._late, replies, call)

    def data(self, replies: Replies, call: Call, data: bytes) -> None:
        """Handle a part of a request; the last part if ``call.ended``."""
        if call.ended and call.messages is None and call.method is self._infer:  # all of it in one frame
            size = len(data) - PREFIX
            if 0 <= size <= self._limit and data[0] == 0 and int.from_bytes(data[1:PREFIX]) == size:
                self._submit(replies, call, data[PREFIX:])
                return
        if call.messages is None:
            call.messages = Messages(self._limit_of(call))
        messages = call.messages
        try:
            self._hold(call, len(data))
            complete = messages.feed(data)
            if messages.more and call.method is not None and not call.method.many:
                raise InvalidArgument("the method takes one message, and the request has more")
            if complete and call.task is None and call.method is not None and call.method.streaming is not None:
                # Only now: a task for each call that waits for its first message would be expensive.
                self._open_calls.change(STREAM_BYTES, call.counted)
                call.counted += STREAM_BYTES
                self._run(replies, call, partial(self._streams.run, replies, call, call.method))
        except IngotError as error:
            self._refuse(replies, call, error)
            call.stop()  # otherwise its task would wait for more messages forever
            return
        if call.ended:
            self.ended(replies, call)
            return
        if complete:
            call.wake()
        else:
            replies.http2.refill(call)

    def ended(self, replies: Replies, call: Call) -> None:
        """Handle the end of a request."""
        method = call.method
        if method is None or method.streaming is not None:
            if method is not None and call.task is None:  # it ends at once, without a message
                self._run(replies, call, partial(self._streams.run, replies, call, method))
            call.wake()
            return
        if call.messages is None or not call.messages.ready():
            self._refuse(
                replies, call, InvalidArgument("the method takes one message, and the request ended without it")
            )
            return
        compressed, data = call.messages.take()
        if method is self._infer and not compressed:
            self._submit(replies, call, data)
        else:
            self._run(replies, call, partial(self._unary, replies, call, method, compressed, data))

    def _limit_of(self, call: Call) -> int:
        """Return the most bytes of a message of a call, before and after decompression."""
        large = call.method is not None and call.method.large
        return self._limit if large else min(SMALL_BYTES, self._limit)

    def stalled(self, replies: Replies, call: Call) -> None:
        """End a call whose message stopped arriving."""
        self._end(replies, call, f"the rest of the message did not arrive in time; {BODY_PACE}")

    def _hold(self, call: Call, size: int) -> None:
        """Count memory for a call until it is over.

        Raises:
            Unavailable: the budget is exhausted, or the call is over and its work must stop.
        """
        if call.closed:
            raise Unavailable("the call is over")
        self._budget.change(size, call.held)
        call.held += size

    def release(self, call: Call) -> None:
        """Release the memory of a call from the budget."""
        if call.held:
            self._budget.change(-call.held)
            call.held = 0
        if call.counted:
            self._open_calls.change(-call.counted)
            call.counted = 0
        if self.limits is not None and call.share is not None:
            self.limits.leave(call.share)
            call.share = None

    def _submit(self, replies: Replies, call: Call, data: bytes) -> None:
        try:
            left = None if call.deadline is None else call.left
            if left is not None and left <= 0:
                raise DeadlineExceeded("the call's deadline passed before its request arrived")
            decoded = self._codec.decode(data, left, call.head.client)
            if callable(decoded):
                self._run(replies, call, partial(self._submit_slow, replies, call, decoded))
            else:
                self._start(replies, call, decoded)
        except Exception as error:  # noqa: BLE001 - the boundary of one request, which must not end its connection
            CONTEXT.set(call.context)  # for what is logged
            self._refuse(replies, call, public_error(error, "ModelInfer failed"))

    async def _submit_slow(self, replies: Replies, call: Call, decode: Callable[[], Decoded]) -> None:
        """Submit a request that is decoded in a thread."""
        decoded = await replies.loop.run_in_executor(compression.threads, decode)
        self._hold(call, sum(map(memory_of, decoded[0].inputs.values())))
        self._start(replies, call, decoded)

    def _start(self, replies: Replies, call: Call, decoded: Decoded) -> None:
        request, typed = decoded
        head = call.head
        request.client, request.sticky, request.context = head.client or id(replies), head.sticky, call.context
        call.ticket = self._plane.submit(request, "grpc", partial(self._answer, replies, call, typed))

    def _answer(self, replies: Replies, call: Call, typed: bool, outcome: InferResponse | IngotError) -> None:
        call.ticket = None  # an answer that waits for the client must not keep its request in memory
        if isinstance(outcome, IngotError):
            self._refuse(replies, call, outcome)
            return
        if outcome.is_slow(one_by_one=typed):
            self._run(replies, call, partial(self._answer_slow, replies, call, typed, outcome))
            return
        try:
            began = _clock()
            encoded = self._codec.encode(outcome, typed=typed)
            self._plane.encoding_grpc.observe(_clock() - began)
            replies.answer(call, *encoded)
        except Exception as error:  # noqa: BLE001 - the boundary of one request, which must not end its connection
            CONTEXT.set(call.context)
            failure = f"an answer of model {outcome.route.name} could not be encoded"
            self._refuse(replies, call, public_error(error, failure))

    async def _answer_slow(self, replies: Replies, call: Call, typed: bool, response: InferResponse) -> None:
        """Send a response that is encoded in a thread."""
        message, seconds = await replies.loop.run_in_executor(compression.threads, proto_codec.timed, response, typed)
        self._plane.encoding_grpc.observe(seconds)
        data = message.SerializeToString()
        replies.answer(call, (data,), len(data))

    def _refuse(self, replies: Replies, call: Call, error: IngotError) -> None:
        if call.closed:
            return
        self._plane.count_error("grpc", error)
        status = STATUS[error.code]
        later = error.code is _TOO_MANY
        replies.fail(call, status, public_text(error), accepts=status == _UNIMPLEMENTED, later=later)

    def _late(self, replies: Replies, call: Call) -> None:
        call.timer = None  # stop() would cancel the timer that runs now
        self._end(replies, call, "the call's deadline passed")

    def _end(self, replies: Replies, call: Call, why: str) -> None:
        self._refuse(replies, call, DeadlineExceeded(why))
        call.stop()

    def _run(self, replies: Replies, call: Call, work: Work) -> None:
        self.arm(replies, call)
        call.task = replies.loop.create_task(self._guarded(replies, call, work))

    async def _guarded(self, replies: Replies, call: Call, work: Work) -> None:
        """Run the work of a call, and answer its failure."""
        CONTEXT.set(call.context)
        failure = f"{call.head.path.decode(errors='replace')} failed"
        # Created here: a task that is cancelled before its start would leave a coroutine that was never awaited.
        outcome = await attempt_async(failure, work())
        if outcome is not None:
            self._refuse(replies, call, outcome)

    async def _unary(self, replies: Replies, call: Call, method: Method, compressed: bool, data: bytes) -> None:
        if compressed:
            data = await self._decompressed(call, data)
        if method is self._infer:
            self._submit(replies, call, data)
        elif method.unary is not None:
            CLIENT.set(call.head.client or id(replies))
            answer = await method.unary(data)
            replies.answer(call, (answer,), len(answer))

    async def _decompressed(self, call: Call, data: bytes) -> bytes:
        """Decompress a message; the budget counts its content in addition to the message."""
        content = pieces(data, call.head.encoding, self._limit_of(call))
        return await decompress(content, len(data), partial(self._hold, call))
