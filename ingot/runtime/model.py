"""One version of a model, from loading to unloading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from ingot import tensors
from ingot.errors import IngotError, InternalError, Unavailable
from ingot.model_store import Archive, Variant
from ingot.padding import Padding
from ingot.runtime import mixing, rehearsal, warmup
from ingot.runtime.admission import Admission
from ingot.runtime.batching import Batcher, rows_of
from ingot.runtime.choice import Choose, Chooser, Reason, only, warn_of
from ingot.runtime.engine import Engine
from ingot.runtime.fits import Fit, Fits, Key
from ingot.runtime.form import Form
from ingot.runtime.instance import Instance
from ingot.runtime.metrics import Metrics
from ingot.runtime.mixing import Mixer
from ingot.runtime.pending import Expiry, Gather, Pending, Reply
from ingot.runtime.scheduler import Entry, Outcome, Scheduler
from ingot.runtime.settings import Settings
from ingot.runtime.statistics import Duration, Statistics
from ingot.runtime.takeover import Takeover
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)


# Engine calls below this many seconds run in the event loop; longer ones in the instance's thread.
_TICK = 250e-6


class State(Enum):
    """Where a model is in its life: each follows the one above it, and any may end in FAILED."""

    LOADING = "loading"
    TESTING = "testing"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    UNLOADED = "unloaded"
    FAILED = "failed"


class Model:
    """A served model: a scheduler in front of one or more engine instances.

    ``load`` and ``close`` block and may run in any thread; ``infer`` and ``drain`` belong to one event loop.

    ``variant`` is what the archive calls the form that is served, and ``properties`` tell people which it is and why;
    both are empty until it is chosen, and for a bare file. ``engine_settings`` tell how its engines run, and why so.

    Args:
        name: what clients call it.
        version: which version of that name.
        choose: opens the form of the model that is served; called once, by ``load``.
        signature: what requests are checked against; None takes the engine's own reading of the file.
        settings: device, instances and limits.
        metrics: where to count.
        admission: what is checked before anything is opened, and what clients are told of it.
    """

    def __init__(
        self,
        name: str,
        version: str,
        choose: Choose,
        *,
        signature: Signature | None = None,
        settings: Settings | None = None,
        metrics: Metrics | None = None,
        admission: Admission | None = None,
    ):
        self.name = name
        self.version = version
        self.state = State.LOADING
        self.reason = ""
        self.platform = ""
        self.device = ""
        self.variant = ""
        self.properties: Mapping[str, str] = {}
        self.engine_settings: Mapping[str, str] = {}
        self._choose = choose
        self._signature = signature
        self._settings = settings or Settings()
        self._admission = admission or Admission(self._settings)
        metrics = metrics or Metrics()
        self._variant_info = metrics.variant_info
        labels = (name, version)
        self._queue_seconds = metrics.queue_seconds.labels(*labels)
        self._engine_seconds = metrics.engine_seconds.labels(*labels)
        self._batch_size = metrics.batch_size.labels(*labels)
        self._batch_requests = metrics.batch_requests.labels(*labels)
        self._elements = metrics.padding_elements.labels(*labels, "real")
        self._fill = metrics.padding_elements.labels(*labels, "padding")
        metrics.in_flight.labels(*labels).set_function(lambda: self._in_flight)
        metrics.queued.labels(*labels).set_function(lambda: len(self._scheduler))
        metrics.ready.labels(*labels).set_function(lambda: self.ready)
        self._count_derived = lambda result: metrics.derived_cache.labels(name, version, result).inc()
        self._takeover: Takeover | None = None
        self._joins = True
        self._paddings: Mapping[str, Padding] = {}
        self._mixer: Mixer | None = None
        self._examples: list[Mapping[str, Array]] = []
        self._recorded: Mapping[int, float] = {}
        self._fits: Fits
        self._statistics = Statistics()
        self._expiry = Expiry(name)
        self._scheduler = Scheduler(self._settings.limits, batching=False)
        self._instances: list[Instance] = []
        self._idle: list[Instance] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump_due = False
        self._inline = False
        self._linger: asyncio.TimerHandle | None = None
        self._in_flight = 0
        self._quiet = asyncio.Event()

    @classmethod
    def of_file(cls, name: str, version: str, path: Path, admission: Admission, metrics: Metrics) -> Model:
        """Return a model that serves a bare ``.onnx`` file."""
        settings = admission.settings
        choose = only(Form.of_file(path), settings)
        return cls(name, version, choose, settings=settings, metrics=metrics, admission=admission)

    @classmethod
    def of_variant(
        cls,
        name: str,
        version: str,
        variant: Variant,
        admission: Admission,
        metrics: Metrics,
        reason: Reason = "requested",
    ) -> Model:
        """Return a model that serves one variant of an archive, whose blobs are files."""
        settings, signature = admission.settings, variant.signature
        warn_of(variant, name, settings)
        choose = only(Form.of_variant(variant, settings), settings, reason, name)
        return cls(name, version, choose, signature=signature, settings=settings, metrics=metrics, admission=admission)

    @classmethod
    def of_archive(cls, name: str, version: str, archive: Archive, admission: Admission, metrics: Metrics) -> Model:
        """Return a model that serves that variant of an archive, whose blobs are files, which does best here."""
        if len(archive.variants) == 1:
            return cls.of_variant(name, version, archive.variant(), admission, metrics, "only")
        settings, signature = admission.settings, archive.signature
        choose = Chooser(name, archive.variants, settings)
        return cls(name, version, choose, signature=signature, settings=settings, metrics=metrics, admission=admission)

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def signature(self) -> Signature:
        """What the model takes and gives.

        Raises:
            Unavailable: the model is not loaded yet.
        """
        if self._signature is None:
            raise self._unavailable()
        return self._signature

    def load(self) -> None:
        """Load the engines, replay the goldens and warm up.

        Raises:
            IngotError: the model cannot be loaded, or answers other than its goldens; the state is then FAILED.
        """
        engines: list[Engine] = []
        try:
            signature = self._open(engines)
        except Exception as error:
            for engine in engines:
                engine.close()
            self.state, self.reason = State.FAILED, str(error)
            if isinstance(error, IngotError):
                raise
            raise InternalError(f"model '{self.name}' cannot be loaded: {error}") from error
        limits = self._settings.limits
        limits = replace(limits, max_batch=signature.max_rows(limits.max_batch))
        batching = signature.batch is not None and self._joins
        warm_time, most = self._settings.warm_time, limits.max_batch
        known = self._recorded if self.device == "cpu" else {}
        latency = warmup.measure(engines[0], signature, self._examples, most, warm_time, known)
        rehearsal_time = rehearsal.SHARE * warm_time
        if left := rehearsal.rehearse(engines, signature, self._examples, latency, most, rehearsal_time):
            log.info("model %s: %d batch sizes were not run within %.1f s", self.name, left, rehearsal_time)
        self._scheduler = Scheduler(
            limits,
            batching=batching,
            latency=latency,
            engines=len(engines),
            row_bytes=warmup.row_bytes(signature, self._examples),
        )
        if self._paddings and self._examples:
            self._mixer = mixing.of(engines[0], signature, self._paddings, self._examples[0], self._settings.warm_time)
        self._fits = Fits(signature, self._mixer)
        self._instances = [
            Instance(
                engine, Batcher(engine, signature, self._mixer), self._done, f"ingot-{self.name}-{self.version}-{index}"
            )
            for index, engine in enumerate(engines)
        ]
        self._idle = list(self._instances)
        self.state = State.READY
        told = ", ".join(f"{name} {value}" for name, value in self.engine_settings.items())
        log.info("model %s version %s is ready on %s: %s", self.name, self.version, self.device, told)
        if self._takeover is not None:
            self._takeover.start()

    def _open(self, engines: list[Engine]) -> Signature:
        """Fill ``engines`` with tested ones; whatever is in it when this fails is the caller's to close."""
        self._admission.check()
        choice = self._choose()
        engines.append(choice.engine)
        self.variant, self.properties = choice.form.variant, {**choice.properties, **self._admission.properties}
        self._joins, self._paddings = choice.form.joins, choice.form.padding
        self._recorded = choice.form.latency
        signature = self._signature = self._signature or choice.engine.signature
        tensors.check_same(signature, choice.engine.signature)
        tuned = choice.form.tune(choice.engine, self._settings, signature)
        first = engines[0] = tuned.engine
        self.platform, self.device = first.platform, first.device
        while len(engines) < self._settings.instances:
            engines.append(choice.form.start(self._settings.device, tuned.threads, self.name)[0])
        self.engine_settings = {"instances": str(len(engines)), **first.settings, "threads_why": tuned.why}
        self.state = State.TESTING
        if first is not choice.engine or not choice.tested:
            choice.form.test(first, self.name)
        self.state = State.WARMING
        for engine in engines[1:]:
            choice.form.test(engine, self.name)
        self._takeover = choice.form.takeover(engines, self._settings.threads, self.name, self._count_derived)
        if self._takeover is not None:
            engines[:] = self._takeover.engines
        self._examples = [golden.inputs for golden in choice.form.goldens[:1]]
        if self.variant:
            self._variant_info.labels(self.name, self.version, self.variant, choice.reason).set(1)
        return signature

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the engines are those that are to serve for good; return whether they are."""
        return self._takeover is None or self._takeover.wait(timeout)

    async def infer(self, inputs: Mapping[str, Array], timeout: float | None = None) -> Mapping[str, Array]:
        """Answer one request, joined with others where the model allows it.

        Args:
            inputs: an array for each input of the signature.
            timeout: seconds until the answer is of no more use.

        Raises:
            InvalidArgument: the inputs do not fit the signature, or the model rejects their values.
            Unavailable: the model is not ready, or too many requests wait.
            DeadlineExceeded: no answer within ``timeout``.
        """
        future: asyncio.Future[Mapping[str, Array]] = asyncio.get_running_loop().create_future()
        pending = self.submit(inputs, functools.partial(_resolve, future), timeout)
        try:
            return await future
        finally:
            pending.cancel()  # which does nothing unless its client left

    def submit(
        self,
        inputs: Mapping[str, Array],
        reply: Reply,
        timeout: float | None = None,
        priority: int = 0,
        key: Key | None = None,
    ) -> Pending:
        """Take a request in, and return at once.

        Args:
            inputs: an array for each input of the signature.
            reply: called once, in a later tick of the event loop, with the outputs by name or the error.
            timeout: seconds until the answer is of no more use; by default the model's ``slo``, if there is one, which
                a request that runs already may overstep.
            priority: requests of a higher one go first.
            key: what :func:`~ingot.runtime.fits.key_of` gives for the inputs, if the caller knows it.

        Returns:
            The request, which can be cancelled.

        Raises:
            InvalidArgument: the inputs do not fit the signature.
            Unavailable: the model is not ready, or too many requests wait for an answer in time.
        """
        if self.state is not State.READY:
            raise self._unavailable()
        loop = self._loop = asyncio.get_running_loop()
        fit = self._fits.find(inputs, key)
        now = time.perf_counter()
        limit = self._settings.slo if timeout is None else timeout
        pending = Pending(reply, self._left, self._scheduler.discard, now)
        if not self._in_flight:
            self._quiet.clear()
        self._in_flight += 1
        try:
            self._enqueue(pending, inputs, fit, now, math.inf if limit is None else now + limit, priority)
        except IngotError as error:
            pending.cancel()
            self._statistics.end(error, 0.0)
            raise
        if timeout is not None:
            self._expiry.add(loop, pending, timeout)
        if not self._pump_due:
            # Once a loop tick, so that all requests that arrived in the same tick can share the batch.
            self._pump_due = True
            loop.call_soon(self._pump)
        return pending

    def _enqueue(
        self, pending: Pending, inputs: Mapping[str, Array], fit: Fit, now: float, deadline: float, priority: int
    ) -> None:
        most = self._scheduler.limits.max_batch
        if fit.rows <= most or not self._scheduler.batching:
            entry = Entry(inputs, fit.rows, pending.settle, now, fit.group, deadline, priority, fit.nbytes)
            pending.entries = (entry,)
            self._scheduler.offer(entry, now)
            return
        signature = self.signature
        starts = range(0, fit.rows, most)
        gather = Gather(pending, signature, len(starts))
        pending.entries = entries = [
            Entry(
                rows_of(signature, inputs, start, start + most),
                min(most, fit.rows - start),
                gather.part(index),
                now,
                fit.group,
                deadline,
                priority,
            )
            for index, start in enumerate(starts)
        ]
        for entry in entries:
            self._scheduler.offer(entry, now)

    def _left(self, pending: Pending, outcome: Outcome | None) -> None:
        if outcome is not None:
            self._statistics.end(outcome, time.perf_counter() - pending.began)
        self._in_flight -= 1
        if not self._in_flight:
            self._quiet.set()

    async def ask_statistics(self) -> Statistics:
        """Return :meth:`statistics`, as a model in another process is asked for them."""
        return self.statistics()

    async def drain(self) -> None:
        """Refuse new requests and wait until those in flight are answered."""
        if self.ready:
            self.state = State.DRAINING
        if self._in_flight:
            await self._quiet.wait()

    def close(self, timeout: float | None = None) -> None:
        """Stop the instances and free the engines; call after ``drain``.

        Args:
            timeout: seconds to wait for an engine call that ``drain`` could not wait for.
        """
        if self._takeover is not None:
            self._takeover.close(timeout)
        for instance in self._instances:
            instance.close(timeout)
        self._instances, self._idle = [], []
        if self.state is not State.FAILED:
            self.state = State.UNLOADED

    def _pump(self) -> None:
        self._pump_due = False
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        scheduler = self._scheduler
        while self._idle:
            now = time.perf_counter()
            batch = scheduler.take(now)
            if not batch:
                if scheduler.wake is not None and self._loop is not None:
                    self._linger = self._loop.call_later(scheduler.wake - now, self._pump)
                return
            for entry in batch:
                self._queue_seconds.observe(now - entry.arrived)
            instance = self._idle.pop()
            if self._runs_inline(scheduler.expected(batch)):
                self._answer(instance, batch, *instance.run(batch))
                return  # which pumps again, after what arrived meanwhile
            instance.start(batch)

    def _runs_inline(self, seconds: float) -> bool:
        """Tell whether a call of so many seconds runs in the event loop, where a thread's wakeups would cost more.

        In a thread calls seem longer, as they wait for the interpreter lock: once inline, they stay so for longer.
        """
        # A GPU's time is not its caller's.
        self._inline = self.device == "cpu" and 0 < seconds < (2 * _TICK if self._inline else _TICK)
        return self._inline

    def _done(self, instance: Instance, entries: list[Entry], outcomes: list[Outcome], seconds: float) -> None:
        # In the instance's thread: one wakeup of the loop answers the whole batch.
        with contextlib.suppress(RuntimeError):  # the loop closed: whoever waited in it is gone
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._answer, instance, entries, outcomes, seconds)

    def _answer(self, instance: Instance, entries: list[Entry], outcomes: list[Outcome], seconds: float) -> None:
        self._idle.append(instance)
        failed = any(isinstance(outcome, IngotError) for outcome in outcomes)
        self._scheduler.finish(entries, time.perf_counter(), None if failed else seconds)
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.reply(outcome)
        self._engine_seconds.observe(seconds)
        rows = sum(entry.rows for entry in entries)
        self._batch_size.observe(rows)
        self._batch_requests.observe(len(entries))
        spent = instance.batcher.spent
        right = rows
        if failed:
            answered = zip(entries, outcomes, strict=True)
            right = sum(entry.rows for entry, outcome in answered if not isinstance(outcome, IngotError))
        self._statistics.batch(len(entries), rows, right, spent)
        if spent.padded:
            self._elements.inc(spent.elements)
            self._fill.inc(spent.padded - spent.elements)
        if self._scheduler and not self._pump_due and self._loop is not None:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def statistics(self) -> Statistics:
        """Return what was counted up to now, and what the scheduler goes by."""
        counted, scheduler = self._statistics, self._scheduler
        queued = Duration(sum(self._queue_seconds.counts), self._queue_seconds.total)
        described: dict[str, Any] = {
            "state": self.state.value,
            "device": self.device,
            "variant": self.variant,
            "engine": dict(self.engine_settings),
            "instances": len(self._instances),
            "batching": scheduler.batching,
            "max_batch": scheduler.limits.max_batch,
            "rows_at_best": scheduler.cap,
            "latency": [{"rows": rows, "seconds": seconds} for rows, seconds in scheduler.latency.known.items()],
            "waiting": len(scheduler),
            "in_flight": self._in_flight,
        }
        if self._mixer is not None:
            filled = counted.padded - counted.elements
            worth = self._mixer.worth
            described["padding"] = {
                "dimensions": list(self._mixer.padder.dims),
                "elements": counted.elements,
                "padding": filled,
                "waste": filled / max(counted.elements, 1),
                "call_in_elements": worth if worth is not None and math.isfinite(worth) else None,
            }
        return counted.copy(queued, described)

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"model '{self.name}' version {self.version} is {self.state.value}")


def _resolve(future: asyncio.Future[Mapping[str, Array]], outcome: Outcome) -> None:
    if future.done():  # the client left
        return
    if isinstance(outcome, IngotError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
