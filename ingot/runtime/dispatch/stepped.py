"""Raw requests of a model with steps: prepared in threads, run by the graph as others are, finished in threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ingot.errors import DeadlineExceeded, IngotError, Unavailable
from ingot.faults import attempt, public_error
from ingot.protocol.context import CONTEXT, RequestContext
from ingot.runtime.dispatch.pending import Accepts, Submitted
from ingot.runtime.dispatch.statistics import Duration
from ingot.runtime.machine.devices import cpu_count
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Outcome, Request, ignore, size_of
from ingot.runtime.scheduling.scheduler import Limits
from ingot.steps import OpenedSteps, StepTime, Values

# Steps release the interpreter's lock for most of their time; more threads than cores would only compete.
threads = ThreadPoolExecutor(min(8, max(2, cpu_count())), "ingot-steps")
# Elements of the graph's outputs that steps after it process in the event loop, for less than a millisecond.
_AT_ONCE = 1 << 12


class Stepped:
    """Accepts requests in front of a model's cache or dispatcher: raw ones take the steps, others pass.

    All of it belongs to the event loop. The requests that wait for the steps before the graph are bounded as the queue
    of the graph is.

    Args:
        name: the model's.
        version: the model's.
        steps: the model's.
        accepts: answers requests of tensors.
        limits: of the queue.
        metrics: where the time of steps is observed.
    """

    def __init__(self, name: str, version: str, steps: OpenedSteps, accepts: Accepts, limits: Limits, metrics: Metrics):
        self.steps = steps
        self.failure = f"a step of model '{name}' failed"
        self.waiting = 0
        self._accepts = accepts
        self._limits = limits
        self._open = 0
        self._bytes = 0
        self._quiet = asyncio.Event()
        self._seconds = {kind: metrics.step_seconds.labels(name, version, kind) for kind in steps.kinds}
        self._cut = metrics.cut_tokens.labels(name, version)
        self._durations = {kind: Duration() for kind in steps.kinds}

    def submit(self, request: Request) -> Submitted:
        """Accept a request; see :meth:`submit_to`."""
        return self.submit_to(request, self._accepts)

    def submit_to(self, request: Request, accepts: Accepts) -> Submitted:
        """Accept a request, and let another component than usual answer its tensors.

        Raises:
            InvalidArgument: a raw input is missing, unknown or empty, has the wrong type, or too many items.
            Unavailable: too many raw requests wait.
        """
        if not self.steps.config.takes(request.inputs):
            return accepts.submit(request)
        self.steps.check(request.inputs)
        nbytes = sum(size_of(array) for array in request.inputs.values())
        limits = self._limits
        if self.waiting >= limits.max_queue or self._bytes + nbytes > limits.max_queue_bytes:
            raise Unavailable(
                f"the queue of steps is full ({self.waiting} requests wait); send fewer at once, or try later"
            )
        self.waiting += 1
        self._open += 1
        self._bytes += nbytes
        return _Raw(self, request, accepts, nbytes)

    def prepared(self, nbytes: int) -> None:
        """Count a request that leaves the queue of the steps before the graph."""
        self.waiting -= 1
        self._bytes -= nbytes

    def over(self) -> None:
        """Count a request that is answered or dropped."""
        self._open -= 1
        if not self._open:
            self._quiet.set()

    def count(self, times: list[StepTime], context: RequestContext | None, values: Values | None = None) -> None:
        """Count the seconds of steps, note them for a trace, and count the tokens that were cut."""
        for kind, began, ended in times:
            self._seconds[kind].observe(ended - began)
            self._durations[kind].add(ended - began)
        if context is not None:
            context.steps = (*(context.steps if values is None else ()), *times)
        if values is not None and (cut := values.get("cut_tokens")) is not None and (total := int(cut.sum())):
            self._cut.value += total

    @property
    def described(self) -> dict[str, dict[str, int]]:
        """How often each kind of step ran, and its time in nanoseconds."""
        return {kind: {"count": spent.count, "ns": int(1e9 * spent.seconds)} for kind, spent in self._durations.items()}

    async def wait_quiet(self) -> None:
        """Wait until no raw request is open; call it after submissions have stopped."""
        if self._open:
            self._quiet.clear()
            await self._quiet.wait()


class _Raw:
    """A raw request, from its submission to its answer."""

    __slots__ = ("_accepts", "_began", "_context", "_inner", "_owner", "_request", "_values", "done")

    def __init__(self, owner: Stepped, request: Request, accepts: Accepts, nbytes: int):
        self.done = False
        self._owner = owner
        self._request = request
        self._accepts = accepts
        self._began = time.perf_counter()
        self._context = CONTEXT.get()
        self._inner: Submitted | None = None
        self._values: Values = {}
        times: list[StepTime] = []

        def prepared(outcome: Values | IngotError) -> None:
            owner.prepared(nbytes)
            if not isinstance(outcome, IngotError):
                owner.count(times, self._context, outcome)
            self._submit(outcome)

        # A request that is dropped while it waits is not prepared.
        _in_thread(
            lambda: {} if self.done else attempt(owner.failure, owner.steps.prepare, request.inputs, times), prepared
        )

    def cancel(self) -> None:
        """Drop the request, as its client left."""
        if not self.done:
            inner = self._inner
            self._end()
            if inner is not None:
                inner.cancel()

    def _submit(self, values: Values | IngotError) -> None:
        """Submit the tensors of a prepared request."""
        if self.done:
            return
        request, left = self._request, self._request.timeout
        if isinstance(values, IngotError):
            self._settle(values)
            return
        if left is not None and (left := left - (time.perf_counter() - self._began)) <= 0:
            self._settle(DeadlineExceeded("the request's time was over before its tensors were ready"))
            return
        self._values = values
        tensors = self._owner.steps.tensors(values)
        try:
            self._inner = self._accepts.submit(
                Request(tensors, self._answered, left, request.priority, None, request.client)
            )
        except Exception as error:  # noqa: BLE001 - the boundary of one request: its client gets the error
            self._settle(public_error(error, self._owner.failure))

    def _answered(self, outcome: Outcome) -> None:
        """Finish a request that the graph has answered."""
        if self.done:
            return
        if isinstance(outcome, IngotError):
            self._settle(outcome)
            return
        owner, values = self._owner, self._values
        times: list[StepTime] = []

        def finish() -> Outcome:
            return attempt(owner.failure, owner.steps.finish, values, outcome, times)

        def finished(answer: Outcome) -> None:
            owner.count(times, self._context)
            if not self.done:
                self._settle(answer)

        if sum(array.size for array in outcome.values()) <= _AT_ONCE:
            finished(finish())
        else:
            _in_thread(finish, finished)

    def _settle(self, outcome: Outcome) -> None:
        reply = self._request.reply
        self._end()
        reply(outcome)

    def _end(self) -> None:
        self.done = True
        self._request.reply = ignore  # replies lead back to their requests, which would be reference cycles
        self._inner, self._values = None, {}
        self._owner.over()


def _in_thread(work: Callable[[], Outcome], done: Callable[[Outcome], None]) -> None:
    """Run work in a thread, and pass its outcome on in the event loop."""
    future = asyncio.get_running_loop().run_in_executor(threads, work)

    def finished(future: asyncio.Future[Outcome]) -> None:
        if not future.cancelled():  # the loop has ended
            done(future.result())

    future.add_done_callback(finished)
