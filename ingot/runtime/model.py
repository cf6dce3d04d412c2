"""One version of a model, from loading to unloading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path

from ingot import tensors
from ingot.errors import DeadlineExceeded, IngotError, InternalError, Unavailable
from ingot.model_store import Archive, Variant
from ingot.runtime.admission import Admission
from ingot.runtime.choice import Choose, Chooser, Reason, only, warn_of
from ingot.runtime.engine import Engine
from ingot.runtime.form import Form
from ingot.runtime.instance import Instance
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduler import Entry, Outcome, Scheduler, group_of
from ingot.runtime.settings import Settings
from ingot.runtime.takeover import Takeover
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)


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
    both are empty until it is chosen, and for a bare file.

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
        metrics.in_flight.labels(*labels).set_function(lambda: self._in_flight)
        metrics.queued.labels(*labels).set_function(lambda: len(self._scheduler))
        metrics.ready.labels(*labels).set_function(lambda: self.ready)
        self._count_derived = lambda result: metrics.derived_cache.labels(name, version, result).inc()
        self._takeover: Takeover | None = None
        self._joins = True
        self._scheduler = Scheduler(self._settings.limits, batching=False)
        self._instances: list[Instance] = []
        self._idle: list[Instance] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump_due = False
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
        self._scheduler = Scheduler(limits, batching=signature.batch is not None and self._joins)
        self._instances = [
            Instance(engine, signature, self._done, f"ingot-{self.name}-{self.version}-{index}")
            for index, engine in enumerate(engines)
        ]
        self._idle = list(self._instances)
        self.state = State.READY
        log.info("model %s version %s is ready on %s", self.name, self.version, self.device)
        if self._takeover is not None:
            self._takeover.start()

    def _open(self, engines: list[Engine]) -> Signature:
        """Fill ``engines`` with tested ones; whatever is in it when this fails is the caller's to close."""
        self._admission.check()
        choice = self._choose()
        engines.append(choice.engine)
        self.variant, self.properties = choice.form.variant, {**choice.properties, **self._admission.properties}
        self._joins = choice.form.joins
        while len(engines) < self._settings.instances:
            engines.append(choice.form.start(self._settings.device, self._settings.threads, self.name)[0])
        first = engines[0]
        self.platform, self.device = first.platform, first.device
        signature = self._signature = self._signature or first.signature
        tensors.check_same(signature, first.signature)
        self.state = State.TESTING
        if not choice.tested:
            choice.form.test(first, self.name)
        self.state = State.WARMING
        for engine in engines[1:]:
            choice.form.test(engine, self.name)
        self._takeover = choice.form.takeover(engines, self._settings.threads, self.name, self._count_derived)
        if self._takeover is not None:
            engines[:] = self._takeover.engines
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
        if not self.ready:
            raise self._unavailable()
        signature = self.signature
        sizes = tensors.check_inputs(signature, inputs)
        loop = self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Mapping[str, Array]] = loop.create_future()
        entry = Entry(
            inputs,
            sizes.get(signature.batch, 1) if signature.batch else 1,
            functools.partial(_resolve, future),
            time.perf_counter(),
            group_of(signature, inputs) if signature.batch else (),
        )
        self._scheduler.offer(entry)
        self._in_flight += 1
        self._quiet.clear()
        self._pump_soon()
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"model '{self.name}' had no answer within {timeout} s") from error
        finally:
            if not future.done() or future.cancelled():  # its client left, or its time is up
                self._scheduler.discard(entry)
            self._in_flight -= 1
            if not self._in_flight:
                self._quiet.set()

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

    def _pump_soon(self) -> None:
        # Once a loop tick, so that all requests that arrived in the same tick can share the batch.
        if not self._pump_due and self._loop is not None:
            self._pump_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_due = False
        while self._idle and (batch := self._scheduler.take()):
            now = time.perf_counter()
            for entry in batch:
                self._queue_seconds.observe(now - entry.arrived)
            self._idle.pop().start(batch)

    def _done(self, instance: Instance, entries: Sequence[Entry], outcomes: list[Outcome], seconds: float) -> None:
        # In the instance's thread: one wakeup of the loop answers the whole batch.
        with contextlib.suppress(RuntimeError):  # the loop closed: whoever waited in it is gone
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._answer, instance, entries, outcomes, seconds)

    def _answer(self, instance: Instance, entries: Sequence[Entry], outcomes: list[Outcome], seconds: float) -> None:
        self._idle.append(instance)
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.reply(outcome)
        self._engine_seconds.observe(seconds)
        self._batch_size.observe(sum(entry.rows for entry in entries))
        self._batch_requests.observe(len(entries))
        self._pump()

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"model '{self.name}' version {self.version} is {self.state.value}")


def _resolve(future: asyncio.Future[Mapping[str, Array]], outcome: Outcome) -> None:
    if future.done():  # the client left
        return
    if isinstance(outcome, IngotError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
