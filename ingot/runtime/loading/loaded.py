"""The parts that serve a loaded model, as one: a request enters the first of them, and each knows some of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.errors import IngotError
from ingot.protocol.context import BatchTimes
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.dispatch.pending import Accepts, Submitted
from ingot.runtime.dispatch.response_cache import ResponseCache
from ingot.runtime.dispatch.statistics import Statistics
from ingot.runtime.dispatch.stepped import Stepped
from ingot.runtime.dispatch.streams import Streams
from ingot.runtime.engines.isolation.engine import ProcessEngine
from ingot.runtime.engines.isolation.step_processes import StepProcesses
from ingot.runtime.generation.generator import Generator
from ingot.runtime.loading.engine_swap import EngineSwap, Replaceable
from ingot.runtime.scheduling.entry import Request


@dataclass(frozen=True)
class Loaded:
    """The parts that serve a loaded model.

    ``isolated`` are the engines that run in processes, ``decoding`` the processes of steps that decode items, and
    ``swap`` replaces engines that were only fast to load. ``generator`` answers the requests of a decoder, whose steps
    are the requests of its dispatcher.
    """

    dispatcher: Dispatcher
    cache: ResponseCache | None
    streams: Streams | None
    stepped: Stepped | None
    decoding: Sequence[StepProcesses]
    isolated: Sequence[ProcessEngine | Replaceable]
    swap: EngineSwap | None
    generator: Generator | None = None

    @property
    def accepts(self) -> Accepts:
        """The component in front."""
        return self.generator or self.stepped or self.cache or self.dispatcher

    def submit_alone(self, request: Request) -> Submitted:
        """Accept a request that the cache must not answer; see :meth:`Dispatcher.submit`."""
        if self.generator is None and self.stepped is not None:
            return self.stepped.submit_to(request, self.dispatcher)
        return self._queue.submit(request)

    def fail_unqueued(self, error: IngotError) -> None:
        """Answer the requests that have not reached the dispatcher; those that it has, it fails."""
        for accepts in (self.stepped, self.generator):
            if accepts is not None:
                accepts.fail(error)

    @property
    def in_flight(self) -> int:
        """Number of requests that are accepted and not answered."""
        if self.streams is not None:
            return len(self.streams)
        return self._queue.in_flight + (0 if self.stepped is None else self.stepped.waiting)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an engine."""
        return self._queue.waiting

    @property
    def queued_bytes(self) -> int:
        """Memory of the inputs of requests that wait for an engine."""
        return self._queue.queued_bytes

    @property
    def cached_bytes(self) -> int:
        """Memory of the cached responses."""
        return 0 if self.cache is None else self.cache.nbytes

    @property
    def slots_in_use(self) -> int:
        """Number of requests for tokens that a decoder answers now."""
        return 0 if self.generator is None else self.generator.slots

    @property
    def slots_bytes(self) -> int:
        """Memory of a decoder's cache, of all slots."""
        return 0 if self.generator is None else self.generator.nbytes

    @property
    def last_batch(self) -> BatchTimes | None:
        """The last batch that ran; None before the first, and of a decoder, whose answers take many steps."""
        return None if self.generator is not None else self.dispatcher.last_batch

    @property
    def last_use(self) -> float:
        """When the last batch or the last response from the cache was ready: seconds of a monotonic clock, or 0."""
        batch, cache = self.dispatcher.last_batch, self.cache
        return max(0.0 if batch is None else batch.ended, 0.0 if cache is None else cache.last_hit)

    def statistics(self, described: Mapping[str, Any]) -> Statistics:
        """Return the counts so far and the state of the scheduler, with a description of the model."""
        steps = {} if self.stepped is None else {"steps": self.stepped.described}
        counted = self.dispatcher.statistics({**described, **steps})
        return counted if self.generator is None else self.generator.counted(counted)

    async def wait_quiet(self) -> None:
        """Wait until nothing is in flight; call it after submissions have stopped."""
        for part in (self.generator, self.stepped, self.streams, self.dispatcher):
            if part is not None:
                await part.wait_quiet()

    def close(self, error: IngotError, timeout: float | None = None) -> None:
        """Stop the workers and free the engines.

        Args:
            error: the answer to the open requests of a decoder.
            timeout: seconds to wait for an engine call.
        """
        if self.generator is not None:
            self.generator.close(error)
        if self.swap is not None:
            self.swap.close(timeout)
        if self.streams is not None:
            self.streams.close()
        self.dispatcher.close(timeout)
        for processes in self.decoding:
            processes.close()

    @property
    def _queue(self) -> Generator | Dispatcher:
        """What queues requests of clients: those of a decoder's dispatcher are its steps."""
        return self.generator or self.dispatcher
