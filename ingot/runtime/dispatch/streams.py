"""Requests that a model's code answers in parts: each answer is a call, which advances the generator of its stream.

The calls of different streams share batches. Nothing runs ahead of a client: the next call is submitted when the client
has room for another answer, so a slow client holds back its own stream only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ingot import tensors
from ingot.errors import DeadlineExceeded, InvalidArgument, Unavailable
from ingot.protocol.requests import outcome_of
from ingot.runtime.dispatch.pending import Accepts, Submitted
from ingot.runtime.engines.engine import MORE, STREAM
from ingot.runtime.scheduling.entry import OVER, Reply, Request, size_of
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.scheduling.queue import check_room
from ingot.tensors import Array, DType, Signature, TensorSpec

_NUMBERS = itertools.count(1)
# Streams that an engine is asked to forget at once.
_AT_ONCE = 256


def of_calls(signature: Signature) -> Signature:
    """Return the signature of the calls that advance streams, from the one that clients see."""
    handle = TensorSpec(STREAM, DType.INT64, (signature.batch or "batch", 2))
    more = TensorSpec(MORE, DType.BOOL, (signature.batch or "batch",))
    return replace(signature, inputs=(*signature.inputs, handle), outputs=(*signature.outputs, more))


class Streams:
    """The open streams of a model. All of it belongs to one event loop.

    Args:
        name: the model's.
        signature: that clients see.
        accepts: runs the calls; see :func:`of_calls`.
        end: lets the engine forget streams; returns False if that has to be repeated.
        limits: how many streams may be open, and the bytes of their inputs: those of the queue.

    Attributes:
        closed: whether the model is unloaded.
    """

    def __init__(
        self, name: str, signature: Signature, accepts: Accepts, end: Callable[[Sequence[int]], bool], limits: Limits
    ):
        self.name = name
        self.accepts = accepts
        self._signature = signature
        self._end = end
        self._limits = limits
        self._open: dict[int, AnswerStream] = {}
        self._nbytes = 0
        self._over: list[int] = []
        self.closed = False
        self._quiet = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: Request) -> AnswerStream:
        """Begin a stream; its first answer is computed when it is asked for. The request's reply is not called.

        Raises:
            InvalidArgument: the inputs do not match the signature, or have several samples.
            Unavailable: too many streams are open.
        """
        tensors.check_inputs(self._signature, request.inputs)
        if any(len(array) != 1 for array in request.inputs.values()):
            raise InvalidArgument(f"model '{self.name}' answers in parts: send one sample per request")
        nbytes = sum(map(size_of, request.inputs.values()))
        check_room(self._limits, len(self._open), self._nbytes, nbytes, request.client, self._held)
        self._forget()
        stream = AnswerStream(self, next(_NUMBERS), request, nbytes)
        self._open[stream.number] = stream
        self._nbytes += nbytes
        return stream

    def over(self, stream: AnswerStream) -> None:
        """Remove a stream; its generator is closed."""
        del self._open[stream.number]
        self._nbytes -= stream.nbytes
        self._over.append(stream.number)
        self._forget()
        if not self._open:
            self._quiet.set()

    async def wait_quiet(self) -> None:
        """Wait until no stream is open; call it after requests are refused."""
        if self._open:
            self._quiet.clear()
            await self._quiet.wait()

    def close(self) -> None:
        """Refuse further answers; it may be called in any thread."""
        self.closed = True

    def _held(self, client: Hashable) -> tuple[int, int]:
        found = [each.nbytes for each in self._open.values() if each.client == client]
        return len(found), sum(found)

    def _forget(self) -> None:
        while self._over and self._end(self._over[:_AT_ONCE]):
            del self._over[:_AT_ONCE]


class AnswerStream:
    """One request, and its answers in order; ``number`` is its stream's."""

    def __init__(self, owner: Streams, number: int, request: Request, nbytes: int):
        self.number = number
        self.nbytes = nbytes
        self.client = request.client
        self._owner: Streams | None = owner
        self._request = request
        self._end = None if request.timeout is None else time.monotonic() + request.timeout
        self._index = 0

    async def next(self) -> Mapping[str, Array] | None:
        """Return the next answer; None behind the last.

        Raises:
            IngotError: that of the model, or of the call; there are no more answers.
        """
        try:
            outcome = await outcome_of(self._submit)
        except DeadlineExceeded as error:  # of a call, whose part of the time is not that of the request
            raise DeadlineExceeded(f"the request's time was over after {self._index} answers") from error
        self._index += 1
        return outcome if outcome[MORE].all() else None

    def close(self) -> None:
        """End the stream, as its client has all answers, or has left."""
        if (owner := self._owner) is not None:
            self._owner, self._request = None, OVER
            owner.over(self)

    def _submit(self, reply: Reply) -> Submitted:
        request, left = self._request, None
        if self._owner is None or self._owner.closed:
            raise Unavailable("the model was unloaded before the stream ended")
        if self._end is not None and (left := self._end - time.monotonic()) <= 0:
            raise DeadlineExceeded("it is over")
        inputs = {**request.inputs, STREAM: np.array([[self.number, self._index]], np.int64)}
        return self._owner.accepts.submit(Request(inputs, reply, left, request.priority, None, request.client))
