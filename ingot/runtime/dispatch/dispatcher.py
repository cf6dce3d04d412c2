"""Serving one loaded model: requests in, batches to its workers, responses out, with statistics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from threading import Semaphore
from types import MappingProxyType
from typing import Any, Final

from ingot.errors import DeadlineExceeded, IngotError, Unavailable
from ingot.protocol.context import BatchTimes
from ingot.report.units import duration, size, written
from ingot.runtime.dispatch.batch_check import BatchCheck, Recheck
from ingot.runtime.dispatch.batch_run import AnswerLimit, BatchRunner, BatchTimings
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.dispatch.parts import Part, PartEntry, by_length, in_order, inputs_of
from ingot.runtime.dispatch.pending import Expiry, Owner, Parts, Pending, Single
from ingot.runtime.dispatch.signature_check import CallLimit, CheckedInputs, SignatureCheck
from ingot.runtime.dispatch.statistics import Duration, Statistics, learned
from ingot.runtime.dispatch.suspects import Suspects
from ingot.runtime.dispatch.worker import Worker
from ingot.runtime.engines.engine import Engine, direct_of
from ingot.runtime.gpu.array import Direct
from ingot.runtime.machine import memory
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Entry, Outcome, Reply, Request, size_of
from ingot.runtime.scheduling.scheduler import REASONS, Scheduler
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

_NOTHING: Final[Mapping[str, Array]] = MappingProxyType({})
_clock: Final = time.perf_counter
# Engine calls below this many seconds run in the event loop; longer ones run in a worker thread.
INLINE: Final = 250e-6
# Bytes of an engine call from which on it is compared with the memory that is left, which takes up to 0.1 ms.
_LARGE_CALL: Final = 64 << 20
# Batches per engine for which parts of a large request are queued or running.
_AT_ONCE: Final = 2
# Share of the SLO that is planned with; the rest covers the transfer to the client, which is not measured here.
_HEADROOM: Final = 0.95
# Longest pause of the event loop after a tick while engine calls occupy all cores: in seconds, and as a share of the
# expected duration of the last call.
_PAUSE: Final = 2e-3
_PAUSE_SHARE: Final = 0.1


class Dispatcher(Owner):
    """A scheduler in front of one or more engines. Everything except ``close`` belongs to one event loop.

    Args:
        name: the model's name.
        version: the model's version.
        engines: the loaded model, once per instance; ``close`` closes them.
        signature: the contract that requests are checked against.
        scheduler: decides which requests run when.
        padding: for a model whose requests may be padded to one size.
        slo: seconds within which requests without a timeout are to be answered; None is unlimited.
        answer_limit: the limit of each request's outputs.
        call_limit: the limit of the memory of each engine call, if it can be predicted.
        metrics: where requests and batches are counted.
        statistics: earlier counts of the model, which are continued.
        crowded: whether engine calls occupy all available cores.
        inline: whether short calls may run in the event loop, which a call without bounds could block.
        lost: called with the reason when the devices of all engines have failed.
        batch_check: runs requests of some batches again, while nothing else waits.

    Attributes:
        in_flight: number of requests that are accepted and not answered.
        direct: the tensors of requests that need not leave a device.
    """

    def __init__(
        self,
        name: str,
        version: str,
        engines: Sequence[Engine],
        signature: Signature,
        scheduler: Scheduler,
        *,
        padding: PaddingPolicy | None = None,
        slo: float | None = None,
        answer_limit: AnswerLimit = AnswerLimit(),  # noqa: B008 - it is frozen
        call_limit: CallLimit | None = None,
        metrics: Metrics | None = None,
        statistics: Statistics | None = None,
        crowded: bool = False,
        inline: bool = True,
        lost: Callable[[str], None] | None = None,
        batch_check: BatchCheck | None = None,
    ):
        self.in_flight = 0
        self._batch_check = batch_check
        self._name = name
        self._signature = signature
        self._scheduler = scheduler
        self._padding = padding
        self._slo = slo
        self._answer_limit = answer_limit
        metrics = metrics or Metrics()
        self._metrics = metrics
        self._lost = lost
        self._queue_seconds = metrics.queue_seconds.labels(name, version)
        self._engine_seconds = metrics.engine_seconds.labels(name, version)
        stages = [metrics.stage_seconds.labels(name, version, stage) for stage in ("join", "compute", "split")]
        self._join_seconds, self._compute_seconds, self._split_seconds = stages
        self._batch_size = metrics.batch_size.labels(name, version)
        self._batch_requests = metrics.batch_requests.labels(name, version)
        self._departures = {reason: metrics.batches.labels(name, version, reason) for reason in REASONS}
        self._memory_failures = metrics.memory_failures.labels(name, version)
        self._real_elements = metrics.padding_elements.labels(name, version, "real")
        self._padding_elements = metrics.padding_elements.labels(name, version, "padding")
        most = scheduler.limits.max_batch if scheduler.batching else None
        self._check = SignatureCheck(signature, padding, most, call_limit)
        self._statistics = statistics or Statistics()
        self._answered = 0  # requests that the statistics do not count yet, and the sum of their seconds
        self._answered_seconds = 0.0
        # When its answers began, its timings, its numbers of entries and samples, and why it left the queue.
        self._last_batch: tuple[float, BatchTimings, int, int, str] | BatchTimes | None = None
        self._expiry = Expiry(name)
        self._isolated = any(engine.capabilities.isolated for engine in engines)
        suspects = Suspects() if self._isolated else None
        self._instances = [
            Worker(
                engine,
                BatchRunner(engine, signature, padding, answer_limit, suspects),
                self._done,
                f"ingot-{name}-{version}-{index}",
            )
            for index, engine in enumerate(engines)
        ]
        self._idle = list(self._instances)
        self.direct = Direct() if padding is not None else direct_of(engines, signature)
        self._several_devices = len({engine.device for engine in engines}) > 1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dispatch_due = False
        self._refused: list[tuple[Pending, IngotError]] = []  # in this tick; they are answered in the next
        # Time on a GPU does not block the caller; a call in an engine process may never end.
        self._short = inline and engines[0].device == "cpu" and not self._isolated
        self._in_loop = False
        self._crowded = crowded
        self._ended = Semaphore(0)  # calls that have ended and are not answered yet
        self._pause = 0.0
        self._wake_timer: asyncio.TimerHandle | None = None
        self._quiet = asyncio.Event()
        sample = 1 if padding is None else padding.work(padding.example)
        if slo is not None and (taken := scheduler.latency(sample)) > _HEADROOM * slo:
            log.warning(
                "model %s: one sample takes %s, too long for the slo of %s: requests without a timeout will be refused",
                name,
                duration(taken),
                written(slo),
            )

    @property
    def waiting(self) -> int:
        """Number of requests, or parts of large requests, that wait for an engine."""
        return len(self._scheduler)

    @property
    def wait(self) -> float:
        """Seconds until an engine is expected to be free for a request that arrives now."""
        return self._scheduler.wait(time.perf_counter())

    @property
    def queued_bytes(self) -> int:
        """Memory of the inputs of requests that wait for an engine."""
        return self._scheduler.nbytes

    def submit(self, request: Request) -> Pending:
        """Accept a request and return at once.

        Returns:
            The submitted request, which can be cancelled. Its answer may be Unavailable, as too many requests are
            queued to answer in time, or DeadlineExceeded, as the model alone takes longer than the request allows.

        Raises:
            InvalidArgument: the inputs do not match the signature.
            TooLarge: an engine call with them would take too much memory.
            Unavailable: too little memory is left.
        """
        loop = self._loop = asyncio.get_running_loop()
        checked = self._check.find(request.inputs, request.key)
        now, timeout = _clock(), request.timeout
        limit, share = (self._slo, _HEADROOM) if timeout is None else (timeout, 1.0)
        deadline = math.inf if limit is None else now + share * limit
        if checked.peak > _LARGE_CALL and checked.peak > memory.available():
            self._statistics.failed.count += 1
            raise self._no_memory(checked.peak)
        parts = None if request.lengths is None else by_length(request, checked, self._padding, self._scheduler)
        if not parts and checked.samples <= checked.most:
            single = Single(
                request.inputs,
                checked.samples,
                request.reply,
                now,
                checked.group,
                deadline,
                request.priority,
                checked.nbytes,
                checked.most,
                request.client,
                checked.sizes,
                checked.work,
            )
            single.owner = self
            refusal = self._scheduler.offer(single, now)
            pending: Pending = single
        else:
            pending, refusal = self._offer_parts(request, checked, now, deadline, parts or in_order(checked))
        self.in_flight += 1
        if refusal is not None:
            if limit is not None and timeout is None and isinstance(refusal, DeadlineExceeded):
                why = f"the model has an slo of {written(limit)}"
                refusal = DeadlineExceeded(f"{refusal} (as its parameter timeout; {why})")
            self._refused.append((pending, refusal))
        elif limit is not None:
            self._expiry.add(loop, pending, limit, firm=timeout is not None)
        if not self._dispatch_due:
            # Once per loop tick, so that all requests that arrived in the same tick can share the batch.
            self._dispatch_due = True
            loop.call_soon(self._dispatch)
        return pending

    def _offer_parts(
        self, request: Request, checked: CheckedInputs, now: float, deadline: float, found: Sequence[Part]
    ) -> tuple[Parts, IngotError | None]:
        """Queue the first parts of a request that is divided into ``found``; the others follow later.

        Returns:
            The request, and why it is refused, if it is.
        """
        signature, most, inputs, client = self._signature, checked.most, request.inputs, request.client
        priority, group, padding = request.priority, checked.group, self._padding

        def made(index: int, take: Reply) -> Entry:
            part = found[index]
            samples, count = inputs_of(part, inputs, signature, padding), len(part.places)
            entry = PartEntry(
                samples,
                count,
                take,
                now,
                group,
                deadline,
                priority,
                most=most,
                client=client,
                sizes=part.sizes,
                work=part.work,
            )
            entry.filled = part.filled
            return entry

        nbytes = checked.nbytes if checked.nbytes >= 0 else sum(size_of(array) for array in inputs.values())
        limit, places = self._answer_limit, [part.places for part in found]
        parts = Parts(
            self, request.reply, now, signature=signature, make=made, limit=limit, client=client, positions=places
        )
        if (first := parts.next_part()) is not None:
            refusal = self._scheduler.offer_large(first, [part.work for part in found[1:]], nbytes, now)
            if refusal is not None:
                return parts, refusal
            parts.rest = nbytes - first.nbytes
        self.queue_parts(parts)
        return parts, None

    def _no_memory(self, peak: int) -> Unavailable:
        return Unavailable(
            f"an engine call of model '{self._name}' of these sizes may take {size(peak)}, more than the memory that "
            "is left; send smaller inputs, or try later"
        )

    def queue_parts(self, parts: Parts) -> None:
        """Queue parts of a large request until each engine has a batch of them to run and one to follow.

        Requests that arrived meanwhile run before them. If the queue is full, one part is enough.
        """
        scheduler = self._scheduler
        now = time.perf_counter()
        while not self._enough(parts):
            full = len(scheduler) >= scheduler.limits.max_queue
            entry = None if full and parts.entries else parts.next_part()
            if entry is None:
                return
            # Parts without padding have fewer bytes than the request.
            counted = parts.rest if parts.last else min(parts.rest, entry.nbytes)
            parts.rest -= counted
            scheduler.offer_next(entry, now, counted)

    def _enough(self, parts: Parts) -> bool:
        """Return whether each engine has parts of a request for a batch, and for the batch that follows."""
        most = _AT_ONCE * len(self._instances)
        if len(parts.entries) < most or self._padding is None:
            return len(parts.entries) >= most
        samples = sum(entry.samples for entry in parts.entries.values())
        return samples >= most * self._scheduler.limits.max_batch

    def release(self, nbytes: int, client: Hashable) -> None:
        """Release bytes of a client's parts that are not queued yet."""
        self._scheduler.release(nbytes, client)

    def over(self, pending: Pending, outcome: Outcome | None) -> None:
        """Record that a request is over."""
        if outcome is not None:
            seconds = _clock() - pending.arrived
            if isinstance(outcome, IngotError):
                self._statistics.failed.add(seconds)
            else:
                self._answered += 1
                self._answered_seconds += seconds
        elif self._isolated and isinstance(pending, Single):
            for worker in self._instances:
                worker.drop_calls(pending)
        self.in_flight -= 1
        if not self.in_flight:
            self._quiet.set()

    def _count_answered(self) -> None:
        """Add the requests that were answered since the last call to the statistics; called once per batch."""
        if self._answered:
            self._statistics.answered.add(self._answered_seconds, self._answered)
            self._answered, self._answered_seconds = 0, 0.0

    def discard(self, entry: Entry) -> None:
        """Remove an entry from the queue."""
        self._scheduler.discard(entry)

    @property
    def workers(self) -> Sequence[Worker]:
        """One worker per engine; may be read from any thread."""
        return self._instances

    def fail(self, worker: Worker, error: IngotError, queued: IngotError) -> None:
        """Fail the requests of a worker whose engine call does not end, and all queued requests.

        Args:
            worker: the worker.
            error: the answer to the worker's requests.
            queued: the answer to queued requests.
        """
        for entry in worker.running or ():
            entry.settle(error)
        for entry in self._scheduler.waiting():
            entry.settle(queued)
            self._scheduler.discard(entry)

    async def wait_quiet(self) -> None:
        """Wait until nothing is in flight; call it after submissions have stopped."""
        if self.in_flight:
            self._quiet.clear()
            await self._quiet.wait()

    def close(self, timeout: float | None = None) -> None:
        """Stop the workers and free the engines.

        Args:
            timeout: seconds to wait for each engine call that is still running.
        """
        self._count_answered()
        for instance in self._instances:
            instance.close(timeout)
        self._instances, self._idle = [], []
        self._lost = None  # the timer of deadlines refers to requests that are over, and so to this object, for a while

    def _dispatch(self) -> None:
        """Start batches on idle engines until no engine is idle or no batch is to run yet."""
        self._dispatch_due = False
        if self._refused:
            self._answer_refused()
        if self._wake_timer is not None:
            self._wake_timer.cancel()
            self._wake_timer = None
        scheduler = self._scheduler
        while self._idle:
            now = time.perf_counter()
            batch = scheduler.take(now)
            if scheduler.late:
                self._answer_late()
            if not batch:
                if scheduler.wake is not None and self._loop is not None:
                    self._wake_timer = self._loop.call_later(scheduler.wake - now, self._dispatch)
                elif self._batch_check is not None and not scheduler:
                    self._check_batches(self._batch_check)
                return
            self._queue_seconds.observe_all([now - entry.arrived for entry in batch])
            instance = self._pop_idle()
            expected = instance.expected = scheduler.expected(batch)
            instance.reason = scheduler.reason
            self._departures[scheduler.reason].inc()
            if self._runs_inline(expected):
                self._answer(instance, batch, *instance.run(batch))
                return  # the answers cause the next call of this method
            self._pause = min(_PAUSE_SHARE * expected, _PAUSE)
            instance.start(batch)
        # All new requests now wait for a call to end. Accepting each one as it arrives would interrupt that call
        # repeatedly and evict its caches, so the event loop pauses, and requests wait in their sockets.
        if self._crowded and self._scheduler and self._ended.acquire(timeout=self._pause):
            self._ended.release()

    def _check_batches(self, check: BatchCheck) -> None:
        """Run a request again while no other waits; a request that arrives meanwhile waits for this call at most."""
        if not self.in_flight and (again := check.take()) is not None:
            instance = self._pop_idle()
            instance.expected, instance.reason = 0.0, "idle"
            instance.start([again])

    def _pop_idle(self) -> Worker:
        """Remove an idle worker and return it: of several devices, a worker on the least busy one.

        Of workers with engine processes, one whose process runs is preferred; another waits until its process runs.
        """
        if self._isolated:
            running = (index for index, worker in enumerate(self._idle) if not worker.down)
            return self._idle.pop(next(running, -1))
        if not self._several_devices:
            return self._idle.pop()
        idle = Counter(worker.device for worker in self._idle)
        chosen = max(self._idle, key=lambda worker: idle[worker.device])
        self._idle.remove(chosen)
        return chosen

    def _answer_refused(self) -> None:
        refused, self._refused = self._refused, []
        for pending, error in refused:
            pending.fail(error)

    def _answer_late(self) -> None:
        late, self._scheduler.late = self._scheduler.late, []
        for entry in late:
            entry.inputs = _NOTHING  # the expiry timer may hold the entry for long
            entry.settle(DeadlineExceeded("the request's deadline passed while it was queued"))

    def _runs_inline(self, seconds: float) -> bool:
        """Return whether a call of ``seconds`` runs in the event loop, where a thread's wakeups would cost more.

        Calls in a thread seem longer, as they wait for the interpreter lock, so the threshold is higher once calls are
        inline.
        """
        self._in_loop = self._short and 0 < seconds < (2 * INLINE if self._in_loop else INLINE)
        return self._in_loop

    def _done(
        self, instance: Worker, entries: list[Entry], outcomes: list[Outcome], seconds: float, spent: BatchTimings
    ) -> None:
        # Runs in the worker thread: one wakeup of the loop answers the whole batch.
        self._ended.release()
        with contextlib.suppress(RuntimeError):  # the loop is closed and nothing awaits the answers
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._answer_ended, instance, entries, outcomes, seconds, spent)

    def _answer_ended(self, *ended: Any) -> None:
        self._ended.acquire(blocking=False)
        self._answer(*ended)

    def _answer(
        self, instance: Worker, entries: list[Entry], outcomes: list[Outcome], seconds: float, spent: BatchTimings
    ) -> None:
        if instance.lost:
            self._retire(instance)
        else:
            self._idle.append(instance)
        if isinstance(entries[0], Recheck):
            if self._batch_check is not None:
                self._batch_check.compare(entries[0], outcomes[0])
            self._dispatch_soon()
            return
        if self._batch_check is not None:
            self._batch_check.offer(entries, outcomes)
        now = time.perf_counter()
        samples = sum([entry.samples for entry in entries])
        self._last_batch = now, spent, len(entries), samples, instance.reason
        failed = any(isinstance(outcome, IngotError) for outcome in outcomes)
        try:
            self._scheduler.finish(entries, now, None if failed or spent.unfit else seconds)
        except Exception:  # a failure to learn from a batch must not keep it from its clients
            log.exception("model %s: the latency model could not learn from a batch", self._name)
        if spent.unfit:
            self._shrink_batches(spent.unfit, now)
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.inputs = _NOTHING  # the expiry timer may hold the entry for long
            entry.settle(outcome)
        self._count_answered()
        if self._scheduler or (self._batch_check is not None and self._batch_check.waiting):
            self._dispatch_soon()
        self._engine_seconds.observe(seconds)
        self._join_seconds.observe(spent.joining)
        self._compute_seconds.observe(spent.running)
        self._split_seconds.observe(spent.splitting)
        self._batch_size.observe(samples)
        self._batch_requests.observe(len(entries))
        succeeded = samples
        if failed:
            answered = zip(entries, outcomes, strict=True)
            succeeded = sum(entry.samples for entry, outcome in answered if not isinstance(outcome, IngotError))
        self._statistics.batch(len(entries), samples, succeeded, spent)
        if spent.padded:
            self._real_elements.inc(spent.elements)
            self._padding_elements.inc(spent.padded - spent.elements)

    def _dispatch_soon(self) -> None:
        if not self._dispatch_due and self._loop is not None:
            self._dispatch_due = True
            self._loop.call_soon(self._dispatch)

    def _retire(self, worker: Worker) -> None:
        """Stop using workers whose device has failed; without others, fail what is queued."""
        self._metrics.lost_devices.labels(worker.device).set(1)
        left = [each for each in self._instances if not each.lost]
        self._idle = [each for each in self._idle if each in left]
        self._scheduler.keep_engines(len(left))
        reason = f"its device {worker.device} failed: {worker.lost}"
        log.error("model %s has %d of %d workers left: %s", self._name, len(left), len(self._instances), reason)
        if not left:
            if self._lost is not None:
                self._lost(reason)
            error = Unavailable(f"model '{self._name}' is not available: {reason}")
            self.fail(worker, error, error)

    def _shrink_batches(self, samples: int, now: float) -> None:
        """Form smaller batches for a while, since there was too little memory for one."""
        self._memory_failures.inc()
        seconds = self._scheduler.memory.lower(samples, now)
        log.warning(
            "model %s: too little memory for a batch of %d samples; batches have at most %d for %s",
            self._name,
            samples,
            self._scheduler.memory.samples,
            written(seconds),
        )

    @property
    def last_batch(self) -> BatchTimes | None:
        """The last batch, the same object until the next one; None before the first."""
        if isinstance(self._last_batch, tuple):  # made only when it is read, which is rare
            ended, spent, requests, samples, reason = self._last_batch
            ran = ended - spent.splitting
            began = ran - spent.running
            self._last_batch = BatchTimes(began - spent.joining, began, ran, ended, requests, samples, reason)
            self._last_batch.models = spent.models
        return self._last_batch

    def statistics(self, described: Mapping[str, Any]) -> Statistics:
        """Return the counts so far and the state of the scheduler, merged with ``described``."""
        self._count_answered()
        counted, scheduler = self._statistics, self._scheduler
        queued = Duration(sum(self._queue_seconds.counts), self._queue_seconds.total)
        summary: dict[str, Any] = {
            **described,
            "instances": len(self._instances),
            "batching": scheduler.batching,
            "max_batch": scheduler.limits.max_batch,
            **learned(scheduler, self._padding),
            "waiting": len(scheduler),
            "in_flight": self.in_flight,
        }
        if self._padding is not None:
            summary["padding"] = {"dimensions": list(self._padding.padder.dims), **counted.padding}
        return counted.copy(queued, summary)
