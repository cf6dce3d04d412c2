"""Raw requests of a model with steps: prepared in threads, run by the graph as others are, finished in threads."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from prometheus_client import Counter

from ingot.errors import DeadlineExceeded, IngotError, InternalError
from ingot.faults import attempt, public_error
from ingot.protocol.context import CONTEXT, RequestContext
from ingot.runtime.dispatch.fair_threads import FairThreads
from ingot.runtime.dispatch.pending import Accepts, Expiry, Submitted
from ingot.runtime.dispatch.statistics import Duration
from ingot.runtime.machine.devices import cpu_count
from ingot.runtime.metrics import Counts, Metrics
from ingot.runtime.scheduling.entry import OVER, Outcome, Request, ignore, size_of
from ingot.runtime.scheduling.limits import Limits
from ingot.runtime.scheduling.queue import check_room
from ingot.steps import OpenedSteps, StepTime, Values
from ingot.tensors import Array

# Steps release the interpreter's lock for most of their time; more threads than cores would only compete.
preparing = FairThreads(min(8, max(2, cpu_count())), "ingot-steps")
# Steps after the graph do not wait behind those before it: their requests are almost answered.
finishing = ThreadPoolExecutor(2, "ingot-last-steps")

T = TypeVar("T")
Aside = Callable[[OpenedSteps, list[StepTime]], tuple[T, Values]]
_Prepared = tuple[Values, dict[str, Array]]
"""All values so far, and the graph's inputs among them."""


class Stepped:
    """Accepts requests in front of a model's cache or dispatcher: raw ones take the steps, others pass.

    All of it belongs to the event loop; models share the threads of the steps before the graph fairly. The requests
    that wait for these steps are bounded as the queue of the graph is, those of each client too.

    Args:
        name: the model's name.
        version: the model's version.
        steps: the model's steps.
        accepts: answers requests of tensors.
        limits: of the queue.
        metrics: where the time of steps is observed.
    """

    def __init__(self, name: str, version: str, steps: OpenedSteps, accepts: Accepts, limits: Limits, metrics: Metrics):
        self.steps = steps
        # Raw inputs and outputs up to these sizes are processed in the event loop: a thread would cost more.
        self.bytes_at_once = min(step.bytes_at_once for step in steps.config.before)
        self.elements_at_once = min((step.elements_at_once for step in steps.config.after), default=sys.maxsize)
        self.name = name
        self.failure = f"a step of model '{name}' failed"
        self.expiry = Expiry(name)
        self._waiting: set[_Raw] = set()
        self._accepts = accepts
        self._limits = limits
        self._open = 0
        self._aside = 0
        self._bytes = 0
        self._clients: dict[Hashable, tuple[int, int]] = {}  # waiting requests and their bytes
        self._quiet = asyncio.Event()
        self._seconds = {kind: metrics.step_seconds.labels(name, version, kind) for kind in steps.kinds}
        self._tensors = frozenset(spec.name for spec in steps.signature.inputs)
        metric: dict[str, Counts | Counter] = {"tokens": metrics.cut_tokens, "seconds": metrics.cut_seconds}
        self._cuts = {
            value: metric[unit].labels(name, version)
            for step in steps.config.before
            for unit, value in step.cuts.items()
        }
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
            if request.inputs and self._tensors.isdisjoint(request.inputs):
                self.steps.check(request.inputs)  # whose error lists the raw inputs
            return accepts.submit(request)
        self.steps.check(request.inputs)
        nbytes = sum(size_of(array) for array in request.inputs.values())
        check_room(self._limits, self.waiting, self._bytes, nbytes, request.client, self._held)
        raw = _Raw(self, request, accepts, nbytes)
        self._waiting.add(raw)
        self._open += 1
        self._count(request.client, 1, nbytes)
        raw.start()
        return raw

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the steps before the graph, and of other work in their threads."""
        return len(self._waiting) + self._aside

    async def aside(self, work: Aside[T], nbytes: int, client: Hashable) -> T:
        """Return the result of other work than requests with the steps, in the threads of those before the graph.

        Args:
            work: the function, which notes the times of steps, and also returns the values that steps made.
            nbytes: what it reads, for the limits of the queue.
            client: whose work it is.

        Raises:
            Unavailable: too many requests wait.
            IngotError: the work fails.
        """
        check_room(self._limits, self.waiting, self._bytes, nbytes, client, self._held)
        self._aside += 1
        self._open += 1
        self._count(client, 1, nbytes)
        try:
            times: list[StepTime] = []
            done = preparing.submit(self.name, lambda: attempt(self.failure, work, self.steps, times))
            found = await asyncio.wrap_future(done)
        finally:
            self._aside -= 1
            self._count(client, -1, -nbytes)
            self.over()
        if isinstance(found, IngotError):
            raise found
        result, values = found
        self.count(times, CONTEXT.get(), values)
        return result

    def fail(self, error: IngotError) -> None:
        """Answer the requests that wait for the steps before the graph with an error: the graph cannot run."""
        for raw in [*self._waiting]:
            raw.fail(error)

    def prepared(self, raw: _Raw, client: Hashable, nbytes: int) -> None:
        """Count a request that leaves the queue of the steps before the graph."""
        self._waiting.discard(raw)
        self._count(client, -1, -nbytes)

    def _held(self, client: Hashable) -> tuple[int, int]:
        return self._clients.get(client, (0, 0))

    def _count(self, client: Hashable, requests: int, nbytes: int) -> None:
        self._bytes += nbytes
        if client is not None:
            before, held = self._held(client)
            if before + requests:
                self._clients[client] = before + requests, held + nbytes
            else:
                del self._clients[client]

    def over(self) -> None:
        """Count a request that is answered or dropped."""
        self._open -= 1
        if not self._open:
            self._quiet.set()

    def count(self, times: list[StepTime], context: RequestContext | None, values: Values | None = None) -> None:
        """Count the seconds of steps, note them for a trace, and count the tokens or seconds that were cut."""
        for kind, began, ended in times:
            self._seconds[kind].observe(ended - began)
            self._durations[kind].add(ended - began)
        if context is not None:
            context.steps = (*(context.steps if values is None else ()), *times)
        for name, count in self._cuts.items():
            if values is not None and name in values:
                count.inc(values[name].sum().item())

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

    __slots__ = ("_accepts", "_began", "_context", "_inner", "_nbytes", "_owner", "_request", "_values", "done")

    def __init__(self, owner: Stepped, request: Request, accepts: Accepts, nbytes: int):
        self.done = False
        self._owner = owner
        self._request = request
        self._accepts = accepts
        self._nbytes = nbytes
        self._began = time.perf_counter()
        self._context = CONTEXT.get()
        self._inner: Submitted | None = None
        self._values: Values = {}

    def start(self) -> None:
        """Prepare the request in a thread, and limit its time."""
        owner, request = self._owner, self._request
        times: list[StepTime] = []

        def prepare() -> _Prepared:
            values = owner.steps.prepare(request.inputs, times)
            return values, owner.steps.tensors(values)

        def prepared(outcome: _Prepared | IngotError | None) -> None:
            owner.prepared(self, request.client, self._nbytes)
            if outcome is None:
                return
            if not isinstance(outcome, IngotError):
                owner.count(times, self._context, outcome[0])
            self._submit(outcome)

        # A request that is over while it waits is not prepared.
        def work() -> _Prepared | IngotError | None:
            return None if self.done else attempt(owner.failure, prepare)

        loop = asyncio.get_running_loop()
        if self._nbytes <= owner.bytes_at_once:
            loop.call_soon(_done_here, work, owner.failure, prepared)
        else:
            when_done(preparing.submit(owner.name, work), owner.failure, prepared)
        if request.timeout is not None:
            owner.expiry.add(loop, self, request.timeout, firm=False)

    @property
    def waiting(self) -> bool:
        """Whether its steps wait or run; its tensors have their own deadline."""
        return self._inner is None or self._inner.done

    def fail(self, error: IngotError) -> None:
        """Answer the request with an error, while its steps wait or run."""
        if not self.done:
            self._settle(error)

    def cancel(self) -> None:
        """Drop the request, as its client left."""
        if not self.done:
            inner = self._inner
            self._end()
            if inner is not None:
                inner.cancel()

    def _submit(self, prepared: _Prepared | IngotError) -> None:
        """Submit the tensors of a prepared request."""
        if self.done:
            return
        request, left = self._request, self._request.timeout
        if isinstance(prepared, IngotError):
            self._settle(prepared)
            return
        if left is not None and (left := left - (time.perf_counter() - self._began)) <= 0:
            self._settle(DeadlineExceeded("the request's time was over before its tensors were ready"))
            return
        self._values, tensors = prepared
        lengths = self._owner.steps.lengths(self._values)
        try:
            self._inner = self._accepts.submit(
                Request(tensors, self._answered, left, request.priority, None, request.client, lengths)
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

        if sum(array.size for array in outcome.values()) <= owner.elements_at_once:
            _done_here(finish, owner.failure, finished)
        else:
            when_done(finishing.submit(finish), owner.failure, finished)

    def _settle(self, outcome: Outcome) -> None:
        reply = self._request.reply
        self._end()
        attempt("a reply failed", reply, outcome)  # the same callback may answer other requests

    def _end(self) -> None:
        self.done = True
        # Replies lead back to their requests, which would be reference cycles, and the timer may hold this for long.
        self._request.reply = ignore
        self._request = OVER
        self._inner, self._values = None, {}
        self._owner.over()


def _done_here(work: Callable[[], T | IngotError], failure: str, done: Callable[[T | IngotError], None]) -> None:
    """Run work in the event loop, and pass its outcome on as :func:`when_done` does."""
    try:
        outcome = work()
    except BaseException as error:  # noqa: BLE001 - a package's panic, which attempt() does not catch
        outcome = _ended(error, failure)
    done(outcome)


def _ended(error: BaseException, failure: str) -> IngotError:
    return InternalError(f"{failure}: {type(error).__name__}: {error}")


def when_done(work: Future[T], failure: str, done: Callable[[T | IngotError], None]) -> None:
    """Pass the outcome of work in a thread, or its failure, on in the event loop."""

    def finished(future: asyncio.Future[T]) -> None:
        if future.cancelled():  # the loop has ended
            return
        error = future.exception()  # one that attempt() does not catch, such as SystemExit
        done(future.result() if error is None else _ended(error, failure))

    asyncio.wrap_future(work).add_done_callback(finished)
