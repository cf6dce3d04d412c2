"""One version of a model, from loading to unloading."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from threading import Lock
from typing import Any

from ingot import tensors
from ingot.errors import IngotError, InternalError, Unavailable
from ingot.model_store import Archive, Variant
from ingot.padding import Padding
from ingot.runtime.devices import cpu_count
from ingot.runtime.dispatch import padding
from ingot.runtime.dispatch.batching import AnswerLimit
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.dispatch.pending import Pending, Submit
from ingot.runtime.dispatch.signature_check import CallLimit
from ingot.runtime.dispatch.statistics import Statistics
from ingot.runtime.dispatch.worker import Worker
from ingot.runtime.engine import Engine
from ingot.runtime.isolation.process_engine import ProcessEngine
from ingot.runtime.isolation.supervisor import Supervision
from ingot.runtime.loading import self_test, warmup
from ingot.runtime.loading.admission import Admission
from ingot.runtime.loading.choice import Choose, Chooser, Reason, only, warn_of
from ingot.runtime.loading.engine_swap import EngineSwap, Replaceable
from ingot.runtime.loading.runnable import Runnable
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Outcome
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.settings import Settings
from ingot.tensors import Array, Range, Signature

log = logging.getLogger(__name__)


class State(Enum):
    """The lifecycle of a model: states follow each other in this order, and any may end in FAILED.

    A model is STUCK while one of its engine calls does not end, RESTARTING while its engine processes are started
    again, and FAILED if they end too often; it may become READY again.
    """

    LOADING = "loading"
    TESTING = "testing"
    WARMING = "warming"
    READY = "ready"
    STUCK = "stuck"
    RESTARTING = "restarting"
    DRAINING = "draining"
    UNLOADED = "unloaded"
    FAILED = "failed"


class Model:
    """A served model. It chooses, loads and tests its engines; a :class:`Dispatcher` serves it while it is ready.

    ``load`` and ``close`` block and may run in any thread; everything else belongs to one event loop.

    ``submit`` is :meth:`Dispatcher.submit` while the model is ready, and raises Unavailable otherwise.

    ``variant`` is the served variant's name, and ``properties`` describe it and the reason for the choice; both are
    empty until it is chosen, and for a bare file. ``engine_settings`` describe how the engines run.

    Args:
        name: the served name.
        version: the served version.
        choose: opens the variant or file to serve; called once, by ``load``.
        signature: the contract for requests; None uses the engine's own reading of the file.
        settings: device, instances and limits.
        metrics: where to count.
        admission: checks to pass before anything is opened, and properties to report to clients.
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
        self._metrics = metrics = metrics or Metrics()
        self._engine_swap: EngineSwap | None = None
        self._batchable = True
        self._threads = 1
        self._call_limit: CallLimit | None = None
        self._paddings: Mapping[str, Padding] = {}
        self._examples: list[Mapping[str, Array]] = []
        self._runnable: Runnable
        self._isolated: Sequence[ProcessEngine | Replaceable] = ()
        self._changing = Lock()
        self._recorded: Mapping[int, float] = {}
        self._dispatcher: Dispatcher | None = None
        self.submit: Submit = self._refuse
        labels = (name, version)
        metrics.in_flight.labels(*labels).set_function(lambda: self._dispatcher.in_flight if self._dispatcher else 0)
        metrics.queued.labels(*labels).set_function(lambda: self._dispatcher.waiting if self._dispatcher else 0)
        metrics.ready.labels(*labels).set_function(lambda: self.ready)

    @classmethod
    def of_file(cls, name: str, version: str, path: Path, admission: Admission, metrics: Metrics) -> Model:
        """Return a model that serves a bare ``.onnx`` file."""
        settings = admission.settings
        choose = only(Runnable.of_file(path, settings), settings)
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
        """Return a model that serves one variant of an unpacked archive."""
        settings, signature = admission.settings, variant.signature
        warn_of(variant, name, settings)
        choose = only(Runnable.of_variant(variant, settings), settings, reason, name)
        return cls(name, version, choose, signature=signature, settings=settings, metrics=metrics, admission=admission)

    @classmethod
    def of_archive(cls, name: str, version: str, archive: Archive, admission: Admission, metrics: Metrics) -> Model:
        """Return a model that serves the best variant of an unpacked archive for this machine."""
        if len(archive.variants) == 1:
            return cls.of_variant(name, version, archive.variant(), admission, metrics, "only")
        settings, signature = admission.settings, archive.signature
        choose = Chooser(name, archive.variants, settings)
        return cls(name, version, choose, signature=signature, settings=settings, metrics=metrics, admission=admission)

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def loaded(self) -> bool:
        """Whether it is ready, or will be again when an engine process runs: that must not make the server unready."""
        lost = self.state is State.FAILED and self._dispatcher is not None
        return lost or self.state in (State.READY, State.RESTARTING)

    @property
    def unavailable(self) -> str:
        """Why it is not ready, for clients."""
        why = f": {self.reason}" if self.reason and (self.loaded or self.state is State.STUCK) else ""
        return f"model '{self.name}' version {self.version} is {self.state.value}{why}"

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs.

        Raises:
            Unavailable: the model is not loaded yet.
        """
        if self._signature is None:
            raise self._unavailable()
        return self._signature

    def load(self) -> None:
        """Load the engines, replay the goldens and warm up.

        Raises:
            IngotError: the model cannot be loaded, or its answers differ from its goldens; the state is then FAILED.
        """
        engines: list[Engine] = []
        try:
            signature = self._open(engines)
            dispatcher = self._warm(engines, signature)
            self._isolated = self._supervise(engines)
        except Exception as error:  # whatever fails, the state must become FAILED and the engines be closed
            if self._engine_swap is not None:
                self._engine_swap.close()
            for engine in engines:
                engine.close()
            self.state, self.reason = State.FAILED, str(error)
            if isinstance(error, IngotError):
                raise
            raise InternalError(f"model '{self.name}' cannot be loaded: {error}") from error
        self._dispatcher, self.submit = dispatcher, dispatcher.submit
        self.state = State.READY
        self._engine_changed()
        summary = ", ".join(f"{name} {value}" for name, value in self.engine_settings.items())
        log.info("model %s version %s is ready on %s: %s", self.name, self.version, self.device, summary)

    def _open(self, engines: list[Engine]) -> Signature:
        """Fill ``engines`` with tested engines; if this fails, the caller closes them."""
        self._admission.check()
        choice = self._choose()
        engines.append(choice.engine)
        self.variant, self.properties = choice.runnable.variant, {**choice.properties, **self._admission.properties}
        self._runnable = choice.runnable
        self._batchable, self._paddings = choice.runnable.batchable, choice.runnable.padding
        self._recorded = choice.runnable.latency
        if (bounds := choice.runnable.bounds) is not None and bounds.bounded:
            self._call_limit = CallLimit(bounds.peak, self._settings.max_call_bytes, self.name)
        signature = self._signature = self._signature or _of_any_size(choice.engine.signature)
        tensors.check_same(signature, choice.engine.signature)
        tuned = choice.runnable.tune(choice.engine, self._settings, signature)
        self._threads = tuned.threads
        first = engines[0] = tuned.engine
        self.platform, self.device = first.platform, first.device
        while len(engines) < self._settings.instances:
            engines.append(choice.runnable.start(self._settings.device, tuned.threads, self.name)[0])
        self.engine_settings = {"instances": str(len(engines)), **first.settings, "threads_why": tuned.why}
        self.state = State.TESTING
        if first is not choice.engine or not choice.tested:
            choice.runnable.test(first, self.name)
        self.state = State.WARMING
        for engine in engines[1:]:
            choice.runnable.test(engine, self.name)
        self._engine_swap = choice.runnable.engine_swap(engines, self._settings.threads, self.name, self._count_derived)
        if self._engine_swap is not None:
            engines[:] = self._engine_swap.engines
        self._examples = [golden.inputs for golden in choice.runnable.goldens[:1]]
        if self.variant:
            self._metrics.variant_info.labels(self.name, self.version, self.variant, choice.reason).set(1)
        return signature

    def _warm(self, engines: Sequence[Engine], signature: Signature) -> Dispatcher:
        """Time the engines, run sizes that are slow the first time, and return the dispatcher."""
        limits, warm_time = self._settings.limits, self._settings.warm_time
        limits = replace(limits, max_batch=signature.max_samples(limits.max_batch))
        most, examples = limits.max_batch, self._examples
        known = self._recorded if self.device == "cpu" else {}
        latency = warmup.measure(engines[0], signature, examples, most, warm_time, known)
        if left := self_test.run_sizes(engines, signature, examples, latency, most, self_test.SHARE * warm_time):
            log.info(
                "model %s: %d batch sizes were not tested within %.1f s", self.name, left, self_test.SHARE * warm_time
            )
        scheduler = Scheduler(
            limits,
            batching=signature.batch is not None and self._batchable,
            latency=latency,
            engines=len(engines),
            sample_bytes=warmup.sample_bytes(signature, examples),
        )
        policy = None
        if self._paddings and examples:
            policy = padding.of(engines[0], signature, self._paddings, examples[0], warm_time)
        if self._engine_swap is not None:
            self._engine_swap.start()
        served = (self.name, self.version, engines, signature, scheduler)
        crowded = self.device == "cpu" and cpu_count() <= len(engines) * self._threads
        settings = self._settings
        return Dispatcher(
            *served,
            padding=policy,
            slo=settings.slo,
            answer_limit=AnswerLimit(settings.max_answer_bytes, self.name),
            call_limit=self._call_limit,
            metrics=self._metrics,
            crowded=crowded,
            inline=not self._runnable.doubt,
        )

    def _supervise(self, engines: Sequence[Engine]) -> Sequence[ProcessEngine | Replaceable]:
        """Keep the processes of engines running; return the engines that have one."""
        runnable = self._runnable
        isolated = [engine for engine in engines if isinstance(engine, ProcessEngine | Replaceable) and engine.isolated]
        if runnable.isolation is None or not isolated:
            if runnable.doubt:
                log.warning(
                    "model %s runs in the server's process, which it might end or freeze: %s", self.name, runnable.doubt
                )
            return ()
        measures = ", ".join(isolated[0].measures) or "nothing"
        log.info(
            "model %s runs in an engine process, since %s; confined by: %s", self.name, runnable.isolation.why, measures
        )
        self.properties = {
            **self.properties,
            "isolation": "process",
            "isolation_reason": runnable.isolation.why,
            "isolation_measures": measures,
        }
        supervision = Supervision(
            self.name, lambda run: runnable.replay(run, self.name), self._engine_lost, self._engine_changed
        )
        for engine in isolated:
            engine.supervise(supervision)
        return isolated

    def _engine_lost(self, ending: str) -> None:
        signal = re.search(r"SIG\w+", ending)
        reason = signal[0] if signal else "exit" if "exit" in ending else "killed"
        self._metrics.engine_restarts.labels(self.name, self.version, reason).inc()

    def _engine_changed(self) -> None:
        """Refuse requests while no engine process runs; called in their supervisors' threads."""
        with self._changing:
            if self._dispatcher is None or not self._isolated:
                return
            if self.state is State.READY and all(engine.down for engine in self._isolated):
                self.submit = self._refuse
                self.state = State.RESTARTING
            if self.state in (State.RESTARTING, State.FAILED):
                if not all(engine.down for engine in self._isolated):
                    self.state, self.reason, self.submit = State.READY, "", self._dispatcher.submit
                    return
                failed = all(engine.failed for engine in self._isolated)
                self.reason = f"its engine process {self._isolated[-1].down}"
                self.state = State.FAILED if failed else State.RESTARTING

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the final engines serve; return whether they do."""
        return self._engine_swap is None or self._engine_swap.wait(timeout)

    async def infer(self, inputs: Mapping[str, Array], timeout: float | None = None) -> Mapping[str, Array]:
        """Answer one request, batched with others if the model allows it.

        Args:
            inputs: an array for each input of the signature.
            timeout: seconds until the answer is useless.

        Raises:
            InvalidArgument: the inputs do not match the signature, or the model rejects their values.
            Unavailable: the model is not ready, or too many requests are queued.
            DeadlineExceeded: no answer within ``timeout``.
        """
        future: asyncio.Future[Mapping[str, Array]] = asyncio.get_running_loop().create_future()
        pending = self.submit(inputs, functools.partial(_resolve, future), timeout)
        try:
            return await future
        finally:
            pending.cancel()  # no effect unless the client left

    def _refuse(self, *args: object, **named: Any) -> Pending:
        """Replace ``submit`` while the model is not ready."""
        raise self._unavailable()

    def _count_derived(self, result: str) -> None:
        self._metrics.derived_cache.labels(self.name, self.version, result).inc()

    async def ask_statistics(self) -> Statistics:
        """Return :meth:`statistics`; asynchronous, as for a model in another process."""
        return self.statistics()

    def statistics(self) -> Statistics:
        """Return the counts so far and the state of the scheduler."""
        described: dict[str, Any] = {
            "state": self.state.value,
            "device": self.device,
            "variant": self.variant,
            "engine": dict(self.engine_settings),
        }
        if self._dispatcher is None:
            return Statistics(described=described)
        return self._dispatcher.statistics(described)

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that serve it; none before it is ready and after it is closed. May be read from any thread."""
        return self._dispatcher.workers if self._dispatcher is not None else ()

    def suspend(self, reason: str, worker: Worker, error: IngotError) -> None:
        """Refuse requests until :meth:`resume`, as an engine call does not end.

        Args:
            reason: shown to clients.
            worker: makes the call; its requests fail with ``error``.
            error: queued requests of the model fail with ``reason``.
        """
        if self.state is State.READY:
            self.state, self.reason, self.submit = State.STUCK, reason, self._refuse
        if self._dispatcher is not None:
            self._dispatcher.fail(worker, error, self._unavailable())

    def resume(self) -> None:
        """Serve again after :meth:`suspend`."""
        if self.state is State.STUCK and self._dispatcher is not None:
            self.state, self.reason, self.submit = State.READY, "", self._dispatcher.submit

    async def drain(self) -> None:
        """Refuse new requests and wait until those in flight are answered."""
        with self._changing:
            # Also a model that is stuck, or failed while it was served: it must not become ready again.
            if self._dispatcher is not None and self.state is not State.UNLOADED:
                self.state = State.DRAINING
        self.submit = self._refuse
        if self._dispatcher is not None:
            await self._dispatcher.wait_quiet()

    def close(self, timeout: float | None = None) -> None:
        """Stop the workers and free the engines; call it after ``drain``.

        Args:
            timeout: seconds to wait for an engine call that ``drain`` did not wait for.
        """
        if self._engine_swap is not None:
            self._engine_swap.close(timeout)
        self.submit = self._refuse
        if self._dispatcher is not None:
            self._dispatcher.close(timeout)
        if self.state is not State.FAILED:
            self.state = State.UNLOADED

    def _unavailable(self) -> Unavailable:
        return Unavailable(self.unavailable)


def _of_any_size(signature: Signature) -> Signature:
    """Return a bare file's signature with unbounded dimensions: only the engine knows their limits."""
    return replace(signature, ranges={name: Range(0) for name in signature.symbols})


def _resolve(future: asyncio.Future[Mapping[str, Array]], outcome: Outcome) -> None:
    if future.done():  # the client left
        return
    if isinstance(outcome, IngotError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
