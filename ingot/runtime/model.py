"""One version of a model, from loading to unloading."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingot.errors import IngotError, InternalError, Unavailable
from ingot.model_store import Archive, ServingDefaults, Variant
from ingot.protocol.context import BatchTimes
from ingot.protocol.keys import Step
from ingot.runtime.dispatch.acceptor import Acceptor, State
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.dispatch.pending import Accepts, Cancellable
from ingot.runtime.dispatch.response_cache import ResponseCache
from ingot.runtime.dispatch.sequences import Sequences
from ingot.runtime.dispatch.statistics import Duration, Statistics
from ingot.runtime.dispatch.worker import Worker
from ingot.runtime.engines.isolation.engine import ProcessEngine
from ingot.runtime.gauges import ModelGauges
from ingot.runtime.gpu.array import Direct
from ingot.runtime.loading.assembly import Assembly
from ingot.runtime.loading.choice import Choice, Choose, Chooser, Reason, single_variant, warn_of
from ingot.runtime.loading.engine_loader import EngineLoader, Learned
from ingot.runtime.loading.engine_swap import EngineSwap, Replaceable
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.loading.placement import Placement
from ingot.runtime.loading.trust_check import ServingTerms
from ingot.runtime.machine.devices import kind_of
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Outcome, Request
from ingot.runtime.settings.labels import check_labels, read_labels
from ingot.runtime.settings.repeat import Repeat
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Array, Signature

log = logging.getLogger(__name__)

_NUMBERS = itertools.count(1)
_BEFORE_READY = (State.LOADING, State.TESTING, State.WARMING)


class Model:
    """A served model. It chooses, loads and tests its engines; a :class:`Dispatcher` serves it while it is ready.

    ``load`` and ``close`` block and may run in any thread; everything else belongs to one event loop.

    Its :class:`Acceptor` has its state, and who accepts its requests. A ``parkable`` model can be loaded again after it
    was closed; while it is ``parked``, requests wait for that.

    ``variant`` is the served variant's name, and ``properties`` describe it and the reason for the choice; both are
    empty until it is chosen, and for a bare file. ``engine_settings`` describe how the engines run. ``number`` is
    unique in the process. ``size`` is that of the served files in bytes, known as ``variant`` is, and
    ``instances`` the number of copies in memory.

    Args:
        name: the served name.
        version: the served version.
        choose: opens the variant or file to serve; called once, by ``load``.
        signature: the contract for requests; None uses the engine's own reading of the file.
        settings: device, instances and limits.
        metrics: where to count.
        terms: checks to pass before anything is opened, and properties to report to clients.
        digest: of the archive; for a bare file another text that changes with its content.
        defaults: settings of the archive, where the server's have none.
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
        terms: ServingTerms | None = None,
        digest: str = "",
        defaults: ServingDefaults | None = None,
    ):
        self.name = name
        self.version = version
        self.number = next(_NUMBERS)
        self.digest = digest or (terms.properties.get("digest", "") if terms else "")
        self.acceptor = Acceptor(name, version)
        self.platform = ""
        self.device = ""
        self.size = 0
        self.instances = 1
        self.variant = ""
        self.properties: Mapping[str, str] = {}
        self.engine_settings: Mapping[str, str] = {}
        self._choose: Choose | None = choose
        self._signature = signature
        self._settings = (settings or Settings()).completed(defaults)
        self.labels = read_labels(self._settings.labels) or (defaults.labels if defaults is not None else ())
        self._terms = terms or ServingTerms(self._settings)
        self._metrics = metrics or Metrics()
        self._gauges = ModelGauges(self._metrics, name, version)
        self._engine_swap: EngineSwap | None = None
        self._isolated: Sequence[ProcessEngine | Replaceable] = ()
        self._dispatcher: Dispatcher | None = None
        self._sequences: Sequences | None = None
        self._cache: ResponseCache | None = None
        self._uncertain: str | None = None
        self._choice_reason: Reason | None = None
        self._learned: Learned | None = None
        self._placement: Placement | None = None
        self._parkable = False
        self._loading = threading.Lock()
        self._counted = Statistics()
        self._assembly = Assembly(name, version, self._settings, self._metrics, self._counted)

    @classmethod
    def of_file(
        cls, name: str, version: str, path: Path, terms: ServingTerms, metrics: Metrics, digest: str = ""
    ) -> Model:
        """Return a model that serves a bare ``.onnx`` file."""
        settings = terms.settings
        choose = single_variant(LoadSpec.of_file(path, settings), settings, model=name)
        return cls(name, version, choose, settings=settings, metrics=metrics, terms=terms, digest=digest)

    @classmethod
    def of_variant(
        cls,
        name: str,
        version: str,
        variant: Variant,
        terms: ServingTerms,
        metrics: Metrics,
        reason: Reason = "requested",
    ) -> Model:
        """Return a model that serves one variant of an unpacked archive."""
        settings, signature = terms.settings, variant.signature
        warn_of(variant, name, settings)
        choose = single_variant(LoadSpec.of_variant(variant, settings), settings, reason, name)
        return cls(
            name,
            version,
            choose,
            signature=signature,
            settings=settings,
            metrics=metrics,
            terms=terms,
            defaults=variant.serving.defaults,
        )

    @classmethod
    def of_archive(cls, name: str, version: str, archive: Archive, terms: ServingTerms, metrics: Metrics) -> Model:
        """Return a model that serves the best variant of an unpacked archive for this machine."""
        if len(archive.variants) == 1:
            return cls.of_variant(name, version, archive.variant(), terms, metrics, "only")
        settings, signature = terms.settings, archive.signature
        choose = Chooser(name, archive.variants, settings)
        return cls(
            name,
            version,
            choose,
            signature=signature,
            settings=settings,
            metrics=metrics,
            terms=terms,
            defaults=archive.variants[0].serving.defaults,
        )

    @property
    def ready(self) -> bool:
        """Whether requests are accepted: those for a parked model wait until it is loaded."""
        return self.acceptor.ready

    @property
    def state(self) -> State:
        return self.acceptor.state

    @property
    def reason(self) -> str:
        """Why it is in its state, for users; may be empty."""
        return self.acceptor.reason

    @property
    def parkable(self) -> bool:
        """Whether it can be loaded again after it was closed."""
        return self._parkable

    @property
    def parked(self) -> bool:
        """Whether requests wait until it is loaded again; see :meth:`drain`."""
        return self.acceptor.parked

    @property
    def settings(self) -> Settings:
        """How it is run."""
        return self._settings

    @property
    def loaded(self) -> bool:
        """Whether it is ready, or will be again when an engine process runs: that must not make the server unready."""
        return self.acceptor.loaded

    @property
    def failed(self) -> bool:
        """Whether it has failed; one whose engine processes ended too often is tried again after some time."""
        return self.state is State.FAILED

    @property
    def signature(self) -> Signature:
        """The model's inputs and outputs.

        Raises:
            Unavailable: the model is not loaded yet.
        """
        if self._signature is None:
            raise self.acceptor.unavailable()
        return self._signature if self._sequences is None else self._sequences.signature

    @property
    def sequential(self) -> bool:
        """Whether its requests are steps of sequences; see :meth:`submit_step`."""
        return bool(self._settings.states)

    @property
    def repeat(self) -> Repeat | None:
        """How it is run again after an answer; None if a request gets one answer."""
        return self._settings.repeat if self._settings.repeat.inputs else None

    def show_update(self, failure: str) -> None:
        """Show clients why a newer version did not take over; empty if none failed."""
        kept = {name: value for name, value in self.properties.items() if name != "update_failed"}
        self.properties = {**kept, "update_failed": failure} if failure else kept

    def publish(self) -> None:
        """Let the metrics of its name and version show this model, instead of the one that had them before."""
        cached = {"cache_bytes": lambda: self.cached_bytes} if self._settings.cache_bytes else {}
        self._gauges.publish(
            {
                "in_flight": lambda: self.in_flight,
                "queued": lambda: self.waiting,
                "queued_bytes": lambda: self.queued_bytes,
                "ready": lambda: self.ready,
                **cached,
            }
        )
        if self._sequences is not None:
            self._sequences.publish()

    def withdraw(self, *, successor: bool) -> None:
        """End what :meth:`publish` began; with a successor only what that does not replace."""
        gauges = ["cache_bytes"] if self._settings.cache_bytes else []
        if not successor:
            gauges += ["in_flight", "queued", "queued_bytes", "ready"]
            if self._sequences is not None:
                gauges += ["sequences", "sequence_state_bytes"]
        self._gauges.withdraw(*gauges)

    def succeed(self, earlier: Model) -> None:
        """Leave the open sequences of a model that this one replaces to it until they end."""
        if self._sequences is not None and earlier._sequences is not None:
            self._sequences.succeed(earlier._sequences)

    @property
    def keeps_sequences(self) -> bool:
        """Whether a sequence is open, which only this model can continue."""
        return bool(self._sequences)

    def load(
        self, sizes: Sequence[int] = (), *, parkable: bool = False, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Load the engines, replay the goldens and warm up; a parkable model is faster from the second time on.

        Args:
            sizes: numbers of samples in a batch that traffic is known to have; they are run before it is ready.
            parkable: keep what another load after :meth:`close` needs; a model with states of sequences, which would be
                lost, cannot be loaded again.
            wanted: whether the caller still waits when the load begins; false before :meth:`give_up` is called.

        Raises:
            Unavailable: an earlier load, which was given up, has not ended.
            InternalError: it is loaded, or it was given up or closed meanwhile.
            IngotError: the model cannot be loaded, or its answers differ from its goldens; the state is then FAILED.
        """
        # One load at a time, so that whatever a load changes or releases is its own.
        if not self._loading.acquire(blocking=False):
            raise self._still_loading()
        try:
            with self.acceptor.lock:
                if not wanted():
                    raise InternalError(f"the load of model '{self.name}' was given up before it began")
                self.acceptor.move(State.LOADING)
            self._parkable = parkable and not self.sequential
            self._load(sizes)
        finally:
            self._loading.release()

    def check_no_load(self) -> None:
        """Check that :meth:`load` may be called.

        Raises:
            Unavailable: an earlier load, which was given up, has not ended.
        """
        if self._loading.locked():
            raise self._still_loading()

    def _still_loading(self) -> Unavailable:
        return Unavailable(
            f"an earlier load of model '{self.name}' version {self.version}, which took too long, has not ended; try "
            "again later"
        )

    def give_up(self, reason: str) -> bool:
        """End a load that takes too long, unless the model is ready by now; return whether it was ended.

        A parked model stays parked. The load's thread cannot be interrupted: the load closes its engines once they are
        open. Until then, another load is refused.

        Args:
            reason: why, for users.
        """
        with self.acceptor.lock:
            self.acceptor.move(State.UNLOADED, reason, after=_BEFORE_READY)
            return self._dispatcher is None

    def _load(self, sizes: Sequence[int]) -> None:
        engines: EngineLoader | None = None
        dispatcher: Dispatcher | None = None
        try:
            choice = self._choose_now()
            engines = EngineLoader(self.name, choice, self._signature, self._settings, self._learned)
            self._signature = engines.signature
            engines.open()
            first = engines.engines[0]
            self.instances = engines.instances
            self.platform, self.device, self.engine_settings = first.platform, first.device, engines.described
            if kind_of(self.device) == "cuda":
                self._metrics.gpus.use()
            elif self._placement is not None:
                self._placement.release()
                self._placement = None
            fallback = engines.fallback()
            self.acceptor.move(State.TESTING)
            engines.test()
            self.acceptor.move(State.WARMING)
            self._choice_reason = choice.reason
            self._gauges.chosen(self.variant, choice.reason)
            self._sequences = self._assembly.sequences(engines.signature, self)
            if self._sequences is not None and self._gauges.published:
                self._sequences.publish()
            if self.repeat is not None:
                self.repeat.check(self.signature)
            check_labels(self.labels, self.signature, f"the labels of model '{self.name}'")
            mixing = choice.spec.mixing(engines.signature)
            dispatcher = self._assembly.dispatcher(
                engines,
                choice.spec,
                sizes,
                batching=not mixing,
                lost=self._devices_lost,
                derived=self._gauges.count_derived,
            )
            self.engine_settings = engines.described  # captures of batches may have failed
            measures = engines.supervise(self._gauges.engine_lost, self._engine_changed)
            self._isolated, self._engine_swap = engines.isolated, engines.swap
            if self._uncertain is None:  # the first load
                self._uncertain = self._assembly.uncertainty(choice.spec)
            self._cache, cached = self._assembly.cache(dispatcher, self._uncertain)
            placed = self._gauges.placed(self._placement, fallback)
            self.properties = {**self.properties, **measures, **placed, **cached}
            with self.acceptor.lock:
                self.acceptor.open(self._cache or dispatcher, restarts=bool(self._isolated))
                self._dispatcher = dispatcher
        except Exception as error:  # whatever fails, the state must become FAILED and the engines be closed
            if engines is not None:
                if engines.swap is not None:
                    engines.swap.close()
                (dispatcher or engines).close()
            self._leave_devices()
            self.acceptor.move(State.FAILED, str(error), after=_BEFORE_READY)
            if isinstance(error, IngotError):
                raise
            raise InternalError(f"model '{self.name}' cannot be loaded: {error}") from error
        finally:
            if not self._parkable:
                # They hold the archive, which a closed model that something still refers to must not.
                self._choose, self._terms = None, replace(self._terms, check=lambda: None)
        if self._parkable:
            self._choose = functools.partial(self._choose_again, choice.spec)
            self._learned = engines.learned
        self._engine_changed()
        summary = ", ".join(f"{name} {value}" for name, value in self.engine_settings.items())
        log.info("model %s version %s is ready on %s: %s", self.name, self.version, self.device, summary)
        if mixing:
            log.warning("model %s: requests run one at a time: %s", self.name, mixing)

    def _choose_now(self) -> Choice:
        """Open the first engine of what is served, and describe it."""
        if self._choose is None:
            raise InternalError(f"model '{self.name}' is loaded once only")
        self._terms.check()
        choice = self._choose()
        self.variant, self.properties = choice.spec.variant, {**choice.properties, **self._terms.properties}
        self.size, self._placement = choice.spec.size, choice.spec.placement
        return choice

    def _choose_again(self, spec: LoadSpec) -> Choice:
        """Open an engine of the variant that was chosen before, with as many threads."""
        threads = self._settings.threads if self._learned is None else self._learned.threads
        spec = spec.placed(self._settings, self.name)
        engine, tested = spec.start(spec.device(), threads, self.name)
        return Choice(
            spec,
            engine,
            reason=self._choice_reason or "",
            why=self.properties.get("variant_detail", ""),
            tested=tested,
        )

    def _leave_devices(self) -> None:
        """Stop counting on GPUs."""
        self._gauges.left()
        if self._placement is not None:
            self._placement.release()
            self._placement = None

    def _devices_lost(self, reason: str) -> None:
        """Refuse requests for good, since no device is left to run them."""
        self.acceptor.move(State.FAILED, reason, after=(State.READY, State.STUCK))

    def _engine_changed(self) -> None:
        """Refuse requests while no engine process runs; called in their supervisors' threads."""
        with self.acceptor.lock:
            if self._dispatcher is None or not self._isolated:
                return
            if not all(engine.down for engine in self._isolated):
                self.acceptor.move(State.READY, after=(State.RESTARTING, State.FAILED))
                return
            state = State.FAILED if all(engine.failed for engine in self._isolated) else State.RESTARTING
            reason = f"its engine process {self._isolated[-1].down}"
            self.acceptor.move(state, reason, after=(State.READY, State.RESTARTING, State.FAILED))

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the final engines serve; return whether they do."""
        return self._engine_swap is None or self._engine_swap.wait(timeout)

    def split(self, split: Accepts | None) -> None:
        """Let a canary's traffic split accept the requests while the model is ready; None ends that."""
        self.acceptor.split(split)

    @property
    def split_up(self) -> bool:
        """Whether a canary's traffic split accepts its requests; see :meth:`split`."""
        return self.acceptor.split_up

    def submit(self, request: Request) -> Cancellable:
        """Accept a request and return at once; see :meth:`Dispatcher.submit`.

        Raises:
            Unavailable: the model is not ready, too many requests are queued, or too little memory is left.
        """
        return self.acceptor.accepting.submit(request)

    def submit_alone(self, request: Request) -> Cancellable:
        """Accept a request for this model, not its canary, and not for its cache; errors as for :meth:`submit`."""
        dispatcher = self._dispatcher
        if dispatcher is None or self.state is not State.READY:
            raise self.acceptor.unavailable()
        return dispatcher.submit(request)

    @property
    def direct(self) -> Direct:
        """The tensors of requests that need not leave a device: none unless its engines accept the requests at once."""
        dispatcher = self._dispatcher
        if dispatcher is None or self.acceptor.accepting is not dispatcher or self._sequences is not None:
            return Direct()
        return dispatcher.direct

    @property
    def last_use(self) -> float:
        """When the last batch or the last response from the cache was ready: seconds of a monotonic clock, or 0."""
        cache = self._cache  # which close() sets to None in a thread
        batch = self.last_batch
        return max(0.0 if batch is None else batch.ended, 0.0 if cache is None else cache.last_hit)

    @property
    def cached_bytes(self) -> int:
        """Memory of the cached responses."""
        cache = self._cache
        return 0 if cache is None else cache.nbytes

    @property
    def in_flight(self) -> int:
        """Number of requests that are accepted and not answered."""
        return 0 if self._dispatcher is None else self._dispatcher.in_flight

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an engine."""
        return 0 if self._dispatcher is None else self._dispatcher.waiting

    @property
    def wait(self) -> float:
        """Seconds that a request which arrives now is expected to wait for an engine; 0 while none is loaded."""
        return 0.0 if self._dispatcher is None else self._dispatcher.wait

    @property
    def queued_bytes(self) -> int:
        """Memory of the inputs of requests that wait for an engine."""
        return 0 if self._dispatcher is None else self._dispatcher.queued_bytes

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
        pending = self.submit(Request(inputs, functools.partial(_resolve, future), timeout))
        try:
            return await future
        finally:
            pending.cancel()  # no effect unless the client left

    @property
    def last_batch(self) -> BatchTimes | None:
        """The last batch that ran; None before the first."""
        return None if self._dispatcher is None else self._dispatcher.last_batch

    def submit_step(self, step: Step, request: Request) -> Cancellable:
        """Submit a request of a sequence; see :meth:`Sequences.submit`."""
        if self._sequences is None:
            raise self.acceptor.unavailable()
        return self._sequences.submit(step, request)

    def drop_sequence(self, step: Step) -> None:
        """Drop the sequence of a step; see :meth:`Sequences.drop`."""
        if self._sequences is not None:
            self._sequences.drop(step)

    def statistics(self) -> Statistics:
        """Return the counts so far and the state of the scheduler."""
        described: dict[str, Any] = {
            "state": self.state.value,
            "device": self.device,
            "variant": self.variant,
            "engine": dict(self.engine_settings),
            "cached": self._cache is not None,
            "digest": self.digest,
            "variants": self._terms.variants,
        }
        if self._dispatcher is None:
            return self._counted.copy(Duration(), described)
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
        self.acceptor.move(State.STUCK, reason, after=(State.READY,))
        if self._dispatcher is not None:
            self._dispatcher.fail(worker, error, self.acceptor.unavailable())

    def resume(self) -> None:
        """Serve again after :meth:`suspend`."""
        self.acceptor.move(State.READY, after=(State.STUCK,))

    async def drain(self, parked: Accepts | None = None, reason: str = "") -> None:
        """Refuse new requests and wait until those in flight are answered.

        Args:
            parked: accepts new requests from now until the model is loaded again; it is parkable.
            reason: why it is parked, for users.
        """
        self.acceptor.drain(parked, reason)
        if self._dispatcher is not None:
            await self._dispatcher.wait_quiet()

    def close(self, timeout: float | None = None) -> None:
        """Stop the workers and free the engines; call it after ``drain``. Closing twice does nothing.

        Args:
            timeout: seconds to wait for an engine call that ``drain`` did not wait for.
        """
        with self.acceptor.lock:  # a server may stop while the model is being replaced
            self.acceptor.close()
            dispatcher, self._dispatcher = self._dispatcher, None
            swap, self._engine_swap = self._engine_swap, None
        if swap is not None:
            swap.close(timeout)
        if self._sequences is not None:
            self._sequences.close()
        if dispatcher is not None:
            dispatcher.close(timeout)
            self._leave_devices()  # a load that still runs does so itself
        self._isolated = ()
        self._cache = None


def _resolve(future: asyncio.Future[Mapping[str, Array]], outcome: Outcome) -> None:
    if future.done():  # the client left
        return
    if isinstance(outcome, IngotError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
