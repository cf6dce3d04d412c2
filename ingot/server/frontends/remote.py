"""Models of the main process, as a front's data plane uses them."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from ingot import tensors
from ingot.errors import Unavailable
from ingot.ipc import records
from ingot.runtime import Catalog, InputKey, Metrics, key_of
from ingot.runtime.dispatch.sequences import Step
from ingot.runtime.dispatch.statistics import BatchTimes, Statistics
from ingot.runtime.gpu.array import Direct
from ingot.runtime.repeat import Repeat
from ingot.runtime.scheduling.entry import Outcome, Reply, size_of
from ingot.server.dataplane import DataPlane, attempt
from ingot.server.frontends import kinds
from ingot.server.frontends.channel import Channel
from ingot.server.frontends.kinds import Kind
from ingot.server.frontends.state import ModelState, load_batch, load_statistics
from ingot.tensors import Array, Signature

_MAX_FITS = 1024
_MASK = (1 << 64) - 1
# Seconds between two PINGs to the main process, and after which it counts as stuck if it answers none.
PING_SECONDS = 0.25
_STUCK_SECONDS = 1.0


class RemotePending:
    """A request sent to the main process."""

    __slots__ = ("_leave", "_number", "done", "nbytes", "reply")

    def __init__(self, number: int, nbytes: int, reply: Reply, leave: Callable[[int], None]):
        self._number = number
        self._leave = leave
        self.nbytes = nbytes
        self.reply = reply
        self.done = False

    def cancel(self) -> None:
        """Drop the request, as its client left; its reply is not called."""
        if not self.done:
            self.done = True
            self.reply = _ignore
            self._leave(self._number)


def _ignore(_: Outcome) -> None:
    """Replace a reply that was called."""


class EngineEnd:
    """The main process, as a front uses it.

    Args:
        channel: the connection to it.
        most_bytes: most bytes of unanswered requests; more are refused.
    """

    def __init__(self, channel: Channel, most_bytes: int):
        self._channel = channel
        self._most_bytes = most_bytes
        self._bytes = 0
        self._numbers = itertools.count(1)
        self._pending: dict[int, RemotePending] = {}
        self._replies: dict[int, asyncio.Future[bytes]] = {}
        self._heard = time.monotonic()
        self._batch = b""

    @property
    def last_batch(self) -> BatchTimes | None:
        """The batch of the outputs that are being passed on; an earlier one if none is. None before the first."""
        return load_batch(self._batch) if self._batch else None

    @property
    def responds(self) -> bool:
        """Whether the main process answers; see :meth:`ping`."""
        return time.monotonic() - self._heard < _STUCK_SECONDS

    def ping(self) -> None:
        """Ask the main process for a sign of life; call it every ``PING_SECONDS``."""
        self._channel.send(Kind.PING)

    def submit(
        self,
        model: int,
        inputs: Mapping[str, Array],
        key: InputKey,
        reply: Reply,
        timeout: float | None,
        priority: int,
        client: Hashable = None,
        step: Step | None = None,
    ) -> RemotePending:
        """Send a request; the reply is called in a later tick.

        Raises:
            Unavailable: the unanswered requests hold too many bytes.
        """
        size = sum(size_of(array) for array in inputs.values())
        if self._bytes and self._bytes + size > self._most_bytes:
            raise Unavailable("the server's memory limit for requests is reached; retry later")
        number = next(self._numbers)
        # Both processes use one clock, so the time between them counts too.
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        head = kinds.REQUEST.pack(number, model, deadline, priority, _number_of(client))
        if step is None:
            self._channel.send_tensors(Kind.REQUEST, head, inputs, key)
        else:
            self._channel.send_tensors(Kind.STEP, head + kinds.STEP.pack(*step), inputs, key)
        self._bytes += size
        pending = self._pending[number] = RemotePending(number, size, reply, self._cancel)
        return pending

    def drop_sequence(self, model: int, step: Step) -> None:
        """Drop the sequence of a step."""
        self._channel.send(Kind.DROP, kinds.DROP.pack(model, *step))

    async def render(self) -> bytes:
        """Return the metrics of all processes."""
        number = next(self._numbers)
        return await self._ask(number, Kind.RENDER, records.NUMBER.pack(number))

    async def statistics(self, model: int) -> Statistics:
        """Return a model's statistics."""
        number = next(self._numbers)
        return load_statistics(await self._ask(number, Kind.STATISTICS, kinds.MODEL.pack(number, model)))

    async def _ask(self, number: int, kind: Kind, body: bytes) -> bytes:
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        self._channel.send(kind, body)
        return await future

    def receive(self, kind: int, body: memoryview) -> None:
        """Handle the reply to a request; one that cannot be read fails only its own request."""
        if kind == Kind.PONG:
            self._heard = time.monotonic()
            return
        if kind == Kind.BATCH:
            self._batch = bytes(body)
            return
        (number,) = records.NUMBER.unpack_from(body)
        if number in self._replies:
            self._settle(self._replies.pop(number), kind, body[records.NUMBER.size :])
            return
        failure = "outputs of the main process could not be read"
        outcome = attempt(failure, self._read, kind, body[records.NUMBER.size :])
        pending = self._pending.pop(number, None)
        if pending is not None:
            self._bytes -= pending.nbytes
            pending.done = True
            reply, pending.reply = pending.reply, _ignore  # it refers back to this object
            reply(outcome)

    def _read(self, kind: int, body: memoryview) -> Outcome:
        return self._channel.tensors(body)[0] if kind == Kind.OUTPUTS else records.load_error(body)

    def _settle(self, future: asyncio.Future[bytes], kind: int, body: memoryview) -> None:
        if future.done():  # the task that waited was cancelled
            return
        if kind == Kind.REPLY:
            future.set_result(bytes(body))
        else:
            future.set_exception(records.load_error(body))

    def _cancel(self, number: int) -> None:
        self._bytes -= self._pending.pop(number).nbytes
        self._channel.send(Kind.CANCEL, records.NUMBER.pack(number))


class RemoteModel:
    """One version of a model of the main process; see :class:`ingot.runtime.Model`."""

    def __init__(self, state: ModelState, engine: EngineEnd):
        self._number = state.number
        self._engine = engine
        self._fits: set[InputKey] = set()
        self.state = state

    @property
    def name(self) -> str:
        return self.state.name

    @property
    def version(self) -> str:
        return self.state.version

    @property
    def ready(self) -> bool:
        return self.state.ready

    @property
    def loaded(self) -> bool:
        return self.state.loaded

    @property
    def failed(self) -> bool:
        return not self.state.loaded

    @property
    def sequential(self) -> bool:
        return self.state.sequential

    @property
    def repeat(self) -> Repeat | None:
        return self.state.repeat

    @property
    def direct(self) -> Direct:
        return Direct()  # a device's memory is known in the main process only

    @property
    def platform(self) -> str:
        return self.state.platform

    @property
    def properties(self) -> Mapping[str, str]:
        return self.state.properties

    @property
    def signature(self) -> Signature:
        if self.state.signature is None:
            raise self._unavailable()
        return self.state.signature

    def submit(
        self,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None = None,
        priority: int = 0,
        key: InputKey | None = None,
        client: Hashable = None,
        step: Step | None = None,
    ) -> RemotePending:
        """Submit a request, and return at once, as :meth:`ingot.runtime.Model.submit` does."""
        if not self.state.ready:
            raise self._unavailable()
        key = key or key_of(inputs)
        if key not in self._fits:
            tensors.check_inputs(self.signature, inputs)
            if len(self._fits) >= _MAX_FITS:
                self._fits.clear()
            self._fits.add(key)
        return self._engine.submit(self._number, inputs, key, reply, timeout, priority, client, step)

    def submit_step(
        self,
        step: Step,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None = None,
        priority: int = 0,
        client: Hashable = None,
    ) -> RemotePending:
        """Submit a request of a sequence, as :meth:`ingot.runtime.Model.submit_step` does."""
        return self.submit(inputs, reply, timeout, priority, None, client, step)

    def drop_sequence(self, step: Step) -> None:
        self._engine.drop_sequence(self._number, step)

    @property
    def labels(self) -> Sequence[str]:
        return self.state.labels

    @property
    def last_batch(self) -> BatchTimes | None:
        """The batch of the answer that is being passed on."""
        return self._engine.last_batch

    async def ask_statistics(self) -> Statistics:
        return await self._engine.statistics(self._number)

    def _unavailable(self) -> Unavailable:
        return Unavailable(self.state.unavailable)


class RemoteCatalog(Catalog[RemoteModel]):
    """The models of the main process."""

    def __init__(self, engine: EngineEnd, metrics: Metrics):
        super().__init__(metrics)
        self._engine = engine
        self._known: dict[int, RemoteModel] = {}

    def update(self, states: Sequence[Mapping[str, Any]], aliases: Sequence[Sequence[str]]) -> list[RemoteModel]:
        """Update the models from the states that the main process sent; return those that answer no longer."""
        self._aliases = {(name, alias): version for name, alias, version in aliases}
        before, self._known = self._known, {}
        self._models, self._highest = {}, {}
        for content in states:
            state = ModelState.loads(content)
            model = before.pop(state.number, None) or RemoteModel(state, self._engine)
            model.state = state
            self._known[state.number] = model
            self._list(model)
        return [*before.values()]


class FrontPlane(DataPlane):
    """The data plane of a front process: models and the sums of metrics are in the main process."""

    def __init__(self, repository: RemoteCatalog, engine: EngineEnd):
        super().__init__(repository)
        self._engine = engine

    @property
    def live(self) -> bool:
        return self._engine.responds

    @property
    def ready(self) -> bool:
        return self.live and super().ready

    def model_ready(self, name: str, version: str = "") -> bool:
        return super().model_ready(name, version) and self.live

    async def render_metrics(self) -> bytes:
        return await self._engine.render()


@functools.lru_cache(4096)
def _number_of(client: Hashable) -> int:
    """Return a number for a client that is the same in all front processes for equal names."""
    if isinstance(client, int):
        return client & _MASK
    return int.from_bytes(hashlib.blake2b(str(client).encode(), digest_size=8).digest(), "little")
