"""The main process's session with one front: its requests go to the models, and the outputs back."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Awaitable, Callable, Mapping

from ingot.errors import IngotError
from ingot.ipc import records
from ingot.runtime import Cancellable, Model
from ingot.runtime.dispatch.sequences import Step
from ingot.runtime.dispatch.statistics import BatchTimes
from ingot.runtime.scheduling.entry import Outcome
from ingot.server.dataplane import DataPlane, attempt, attempt_async
from ingot.server.frontends import kinds
from ingot.server.frontends.channel import Channel
from ingot.server.frontends.kinds import Kind
from ingot.server.frontends.state import dump_batch, dump_statistics
from ingot.server.frontends.sums import Counts
from ingot.tensors import Array

# Kinds that begin with a number, to which the front waits for a reply.
_ANSWERED = frozenset((Kind.REQUEST, Kind.STEP, Kind.RENDER, Kind.STATISTICS))


class EngineSession:
    """Serves the requests of one front process.

    Args:
        plane: records some of the requests.
        numbered: returns the model that a front names by its number.
        handles: the file descriptors of the arenas that this process and the front write.
        render: returns the metrics of all processes.
        lost: called when the front has ended and its requests are cancelled.
    """

    def __init__(
        self,
        plane: DataPlane,
        numbered: Callable[[int], Model],
        handles: tuple[int, int],
        render: Callable[[], Awaitable[bytes]],
        lost: Callable[[], None],
    ):
        self.channel = Channel(*handles, self._receive, self._gone)
        self.counts: Counts = ()
        self.started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._plane = plane
        self._model = numbered
        self._render = render
        self._lost = lost
        self._pending: dict[int, Cancellable] = {}
        self._waiting: dict[Kind, list[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._batch: BatchTimes | None = None
        self.alive = True

    def ask(self, kind: Kind, answer: Kind, body: bytes = b"") -> asyncio.Future[None]:
        """Send a record; the future is done when the front replies, or when it has ended."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.alive:
            self._waiting.setdefault(answer, []).append(future)
            self.channel.send(kind, body)
        else:
            future.set_result(None)
        return future

    def _receive(self, kind: int, body: memoryview) -> None:
        error = attempt("a record of a front process could not be handled", self._handle, kind, body)
        if error is not None and kind in _ANSWERED:
            (number,) = records.NUMBER.unpack_from(body)
            self._refuse(number, error)

    def _handle(self, kind: int, body: memoryview) -> None:
        if kind == Kind.REQUEST:
            self._submit(body)
        elif kind == Kind.STEP:
            step = Step(*kinds.STEP.unpack_from(body, kinds.REQUEST.size))
            self._submit(body, step)
        elif kind == Kind.DROP:
            named, *step_fields = kinds.DROP.unpack(body)
            self._model(named).drop_sequence(Step(*step_fields))
        elif kind == Kind.CANCEL:
            (number,) = records.NUMBER.unpack(body)
            pending = self._pending.pop(number, None)
            if pending is not None:
                pending.cancel()
        elif kind == Kind.RENDER:
            task = asyncio.create_task(self._send_metrics(bytes(body)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif kind == Kind.STATISTICS:
            number, named = kinds.MODEL.unpack(body)
            statistics = dump_statistics(self._model(named).statistics())
            self.channel.send(Kind.REPLY, records.NUMBER.pack(number), statistics)
        elif kind == Kind.PING:
            self.channel.send(Kind.PONG)
        elif kind == Kind.FAILED:
            if not self.started.done():
                self.started.set_exception(records.load_error(body))
        elif kind == Kind.STARTED:
            if not self.started.done():
                self.started.set_result(None)
        else:
            future = self._waiting[Kind(kind)].pop(0)
            if not future.done():
                future.set_result(None)
            if kind == Kind.COUNTS:
                self.counts = records.loads(body)

    def _submit(self, body: memoryview, step: Step | None = None) -> None:
        number, named, deadline, priority, client = kinds.REQUEST.unpack_from(body)
        model = self._model(named)
        head = kinds.REQUEST.size + (0 if step is None else kinds.STEP.size)
        inputs, key = self.channel.tensors(body[head:])
        timeout = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        reply = functools.partial(self._answer, number, model, inputs)
        if step is None:
            self._pending[number] = model.submit(inputs, reply, timeout, priority, key, client)
        else:
            self._pending[number] = model.submit_step(step, inputs, reply, timeout, priority, client)

    def _answer(self, number: int, model: Model, inputs: Mapping[str, Array], outcome: Outcome) -> None:
        del self._pending[number]
        if isinstance(outcome, IngotError):
            self._refuse(number, outcome)
            return
        self._plane.record(model.name, model.version, inputs, outcome)
        batch = model.last_batch
        if batch is not self._batch and batch is not None:
            self._batch = batch
            self.channel.send(Kind.BATCH, dump_batch(batch))
        failure = f"outputs of model {model.name} could not be sent to their front process"
        error = attempt(failure, self.channel.send_tensors, Kind.OUTPUTS, records.NUMBER.pack(number), outcome)
        if error is not None:
            self._refuse(number, error)

    def _refuse(self, number: int, error: IngotError) -> None:
        self.channel.send(Kind.ERROR, records.NUMBER.pack(number), records.dump_error(error))

    async def _send_metrics(self, number: bytes) -> None:
        rendered = await attempt_async("the metrics could not be rendered", self._render())
        if isinstance(rendered, IngotError):
            self._refuse(records.NUMBER.unpack(number)[0], rendered)
        else:
            self.channel.send(Kind.REPLY, number, rendered)

    def _gone(self) -> None:
        self.alive = False
        for pending in self._pending.values():
            pending.cancel()
        self._pending = {}
        for future in (*(future for some in self._waiting.values() for future in some), self.started):
            if not future.done():
                future.cancel() if future is self.started else future.set_result(None)
        self._lost()
