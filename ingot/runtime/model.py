"""One version of a model, from loading to unloading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from ingot import arrays, tensors
from ingot.errors import DeadlineExceeded, IngotError, InternalError, Unavailable
from ingot.model_store import Golden, Variant
from ingot.runtime import devices
from ingot.runtime.engine import Engine
from ingot.runtime.instance import Instance
from ingot.runtime.loader import load_engine
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduler import Entry, Limits, Outcome, Scheduler, group_of
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


@dataclass(frozen=True)
class Settings:
    """How models are run.

    ``device`` is ``auto``, ``cpu`` or ``cuda``; ``instances`` engines run side by side and share out the CPU cores.
    ``allow_code`` loads archives' variants of formats that can run code of whoever made them.
    ``ort_library`` is native code of custom operators for ONNX Runtime.
    """

    device: str = "auto"
    instances: int = 1
    limits: Limits = field(default_factory=Limits)
    allow_code: bool = False
    ort_library: Path | None = None


class Model:
    """A served model: a scheduler in front of one or more engine instances.

    ``load`` and ``close`` block and may run in any thread; ``infer`` and ``drain`` belong to one event loop.

    Args:
        name: what clients call it.
        version: which version of that name.
        open_engine: makes one engine, given the device and its number of CPU threads.
        signature: what requests are checked against; None takes the engine's own reading of the file.
        goldens: cases that must come out as stored before the model is ready.
        tolerance: how far their outputs may depart; see :func:`ingot.arrays.departure`.
        variant: which form of the archive's model this is, for people to see.
        settings: device, instances and limits.
        metrics: where to count.
    """

    def __init__(
        self,
        name: str,
        version: str,
        open_engine: Callable[[str, int], Engine],
        *,
        signature: Signature | None = None,
        goldens: Sequence[Golden] = (),
        tolerance: float = 1e-3,
        variant: str = "",
        settings: Settings | None = None,
        metrics: Metrics | None = None,
    ):
        self.name = name
        self.version = version
        self.variant = variant
        self.state = State.LOADING
        self.reason = ""
        self.platform = ""
        self.device = ""
        self._open_engine = open_engine
        self._signature = signature
        self._goldens = goldens
        self._tolerance = tolerance
        self._settings = settings or Settings()
        metrics = metrics or Metrics()
        labels = (name, version)
        self._queue_seconds = metrics.queue_seconds.labels(*labels)
        self._engine_seconds = metrics.engine_seconds.labels(*labels)
        self._batch_size = metrics.batch_size.labels(*labels)
        self._batch_requests = metrics.batch_requests.labels(*labels)
        metrics.in_flight.labels(*labels).set_function(lambda: self._in_flight)
        metrics.queued.labels(*labels).set_function(lambda: len(self._scheduler))
        metrics.ready.labels(*labels).set_function(lambda: self.ready)
        self._scheduler = Scheduler(self._settings.limits, batching=False)
        self._instances: list[Instance] = []
        self._idle: list[Instance] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pump_due = False
        self._in_flight = 0
        self._quiet = asyncio.Event()

    @classmethod
    def of_file(cls, name: str, version: str, path: Path, settings: Settings, metrics: Metrics) -> Model:
        """Return a model that serves a bare ``.onnx`` file."""
        return cls(
            name,
            version,
            lambda device, threads: load_engine(path, device=device, threads=threads),
            settings=settings,
            metrics=metrics,
        )

    @classmethod
    def of_variant(cls, name: str, version: str, variant: Variant, settings: Settings, metrics: Metrics) -> Model:
        """Return a model that serves an archive's variant, whose blobs are files."""
        return cls(
            name,
            version,
            # The closure holds the variant, and so the temporary folder that an archive file was unpacked to.
            lambda device, threads: load_engine(
                variant.path(),
                format=variant.serving.format,
                device=device,
                threads=threads,
                allow_code=settings.allow_code,
                ort_library=settings.ort_library,
            ),
            signature=variant.signature,
            goldens=variant.goldens(),
            tolerance=variant.serving.golden_tolerance,
            variant=variant.name,
            settings=settings,
            metrics=metrics,
        )

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
        self._scheduler = Scheduler(limits, batching=signature.batch is not None)
        self._instances = [
            Instance(engine, signature, self._done, f"ingot-{self.name}-{self.version}-{index}")
            for index, engine in enumerate(engines)
        ]
        self._idle = list(self._instances)
        self.state = State.READY
        log.info("model %s version %s is ready on %s", self.name, self.version, self.device)

    def _open(self, engines: list[Engine]) -> Signature:
        """Fill ``engines`` with tested ones; whatever is in it when this fails is the caller's to close."""
        count = self._settings.instances
        for _ in range(count):
            engines.append(self._open_engine(self._settings.device, max(1, devices.cpu_count() // count)))
        first = engines[0]
        self.platform, self.device = first.platform, first.device
        signature = self._signature = self._signature or first.signature
        tensors.check_same(signature, first.signature)
        self.state = State.TESTING
        self._test(first)
        self.state = State.WARMING
        for engine in engines[1:]:
            self._test(engine)
        return signature

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
        for instance in self._instances:
            instance.close(timeout)
        self._instances, self._idle, self._goldens = [], [], ()
        if self.state is not State.FAILED:
            self.state = State.UNLOADED

    def _test(self, engine: Engine) -> None:
        for case, golden in enumerate(self._goldens):
            output, error = arrays.worst_error(golden.outputs, engine.run(golden.inputs))
            if error > self._tolerance:
                raise InternalError(
                    f"model '{self.name}' does not answer as it did when it was exported: output '{output}' of golden "
                    f"case {case} departs by {error:.2e}, tolerance {self._tolerance:.0e}; this machine or its ONNX "
                    "Runtime computes something else, so it is not served"
                )

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
