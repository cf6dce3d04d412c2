"""One version of a model, from loading to unloading."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ingot.errors import IngotError, InternalError, Unavailable
from ingot.model_store import Generation
from ingot.protocol.context import BatchTimes
from ingot.protocol.keys import Step
from ingot.runtime.dispatch.acceptor import Acceptor, State
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.dispatch.pending import Accepts, Submitted
from ingot.runtime.dispatch.sequences import Sequences
from ingot.runtime.dispatch.statistics import Duration, Statistics
from ingot.runtime.dispatch.stepped import Aside
from ingot.runtime.dispatch.streams import AnswerStream, Streams
from ingot.runtime.dispatch.worker import Worker
from ingot.runtime.engines.isolation.calls import Ask
from ingot.runtime.generation.requests import GenerationRequest, Stream, TokenInputs
from ingot.runtime.gpu.array import Direct
from ingot.runtime.loading.assembly import Assembly
from ingot.runtime.loading.gauges import ModelGauges
from ingot.runtime.loading.loaded import Loaded
from ingot.runtime.loading.loader import ModelLoader
from ingot.runtime.loading.source import ModelSource
from ingot.runtime.loading.trust_check import ServingTerms
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.entry import Outcome, Request
from ingot.runtime.settings.labels import read_labels
from ingot.runtime.settings.repeat import Repeat
from ingot.runtime.settings.settings import Settings
from ingot.steps import Steps
from ingot.steps.completion.texts import CompletionTexts
from ingot.tensors import Array, Signature

T = TypeVar("T")

log = logging.getLogger(__name__)

_NUMBERS = itertools.count(1)
# The gauges of a model, by their attributes of Metrics; a cache and a decoder have further ones.
_GAUGES: Mapping[str, Callable[[Loaded], float]] = {
    "in_flight": lambda loaded: loaded.in_flight,
    "queued": lambda loaded: loaded.waiting,
    "queued_bytes": lambda loaded: loaded.queued_bytes,
}
_OF_CACHES: Mapping[str, Callable[[Loaded], float]] = {"cache_bytes": lambda loaded: loaded.cached_bytes}
_OF_DECODERS: Mapping[str, Callable[[Loaded], float]] = {
    "slots_in_use": lambda loaded: loaded.slots_in_use,
    "slots_bytes": lambda loaded: loaded.slots_bytes,
}
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
        source: the variant or file to serve; it is opened by ``load``.
        terms: settings, checks to pass before anything is opened, and properties to report to clients.
        metrics: where to count.
        digest: of the archive; for a bare file another text that changes with its content.
    """

    def __init__(
        self,
        name: str,
        version: str,
        source: ModelSource,
        terms: ServingTerms | None = None,
        metrics: Metrics | None = None,
        digest: str = "",
    ):
        terms, metrics, defaults = terms or ServingTerms(Settings()), metrics or Metrics(), source.defaults
        self.name = name
        self.version = version
        self.number = next(_NUMBERS)
        self.digest = digest or terms.properties.get("digest", "")
        self.acceptor = Acceptor(name, version)
        self._settings = terms.settings.completed(defaults)
        self.labels = read_labels(self._settings.labels) or (defaults.labels if defaults is not None else ())
        self._steps = source.steps
        self._gauges = ModelGauges(metrics, name, version)
        self._counted = Statistics()
        assembly = Assembly(name, version, self._settings, metrics, self._counted)
        self._loader = ModelLoader(source, terms, assembly, self._gauges, self.labels)
        self._loaded: Loaded | None = None
        self._update_failed = ""
        self._parkable = False
        self._loading = threading.Lock()

    def connect(self, ask: Ask) -> None:
        """Let the model's code call other models, from its next load on."""
        self._loader.ask = ask

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
        return self._parkable and self.streams is None

    @property
    def parked(self) -> bool:
        """Whether requests wait until it is loaded again; see :meth:`drain`."""
        return self.acceptor.parked

    @property
    def settings(self) -> Settings:
        """How it is run."""
        return self._settings

    @property
    def platform(self) -> str:
        return self._loader.platform

    @property
    def device(self) -> str:
        return self._loader.device

    @property
    def size(self) -> int:
        return self._loader.size

    @property
    def instances(self) -> int:
        return self._loader.instances

    @property
    def variant(self) -> str:
        return self._loader.variant

    @property
    def engine_settings(self) -> Mapping[str, str]:
        return self._loader.engine_settings

    @property
    def example(self) -> Mapping[str, Array]:
        """Inputs that the model's code gives itself; empty for others, and before it is loaded."""
        return self._loader.example

    @property
    def properties(self) -> Mapping[str, str]:
        failed = {"update_failed": self._update_failed} if self._update_failed else {}
        return {**self._loader.properties, **failed}

    @property
    def loaded(self) -> bool:
        """Whether it is ready, or will be once an engine process has restarted: the server stays ready meanwhile."""
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
        if (signature := self._loader.signature) is None:
            raise self.acceptor.unavailable()
        return signature

    @property
    def steps(self) -> Steps | None:
        """The steps around its graph, which answer requests with raw inputs; None if it has none."""
        return self._steps

    @property
    def generation(self) -> Generation | None:
        """How it is run if it is a decoder, whose requests are for tokens; see :meth:`generate`. None for others."""
        return self._loader.generation

    @property
    def texts(self) -> CompletionTexts | None:
        """The tokenizer and the chat template of a decoder; None if it is another model, has none, or is not loaded."""
        return self._loader.texts

    def steps_for(self, inputs: Iterable[str]) -> Steps | None:
        """Return the steps that a request with inputs of these names takes; None for one of the graph's tensors."""
        steps = self._steps
        return steps if steps is not None and steps.takes(inputs) else None

    @property
    def sequential(self) -> bool:
        """Whether its requests are steps of sequences; see :meth:`submit_step`."""
        return bool(self._settings.states)

    @property
    def repeat(self) -> Repeat | None:
        """How it is run again after an answer; None if a request gets one answer."""
        return self._settings.repeat if self._settings.repeat.inputs else None

    @property
    def decoupled(self) -> bool:
        """Whether a request may get several answers: it is run again, or its code yields them."""
        return self.repeat is not None or self.streams is not None

    @property
    def streams(self) -> Streams | None:
        """The open streams of code that answers in parts; None if it does not, and before it is loaded."""
        loaded = self._loaded
        return None if loaded is None else loaded.streams

    def open_stream(self, request: Request) -> AnswerStream:
        """Begin the answers to a request, which this version gives to the end; see :meth:`Streams.open`.

        Raises:
            Unavailable: the model is not ready, or too many streams are open.
        """
        if (streams := self.streams) is None or self.state is not State.READY:
            raise self.acceptor.unavailable()
        return streams.open(request)

    def show_update(self, failure: str) -> None:
        """Show clients why a newer version did not take over; empty if none failed."""
        self._update_failed = failure

    def publish(self) -> None:
        """Let the metrics of its name and version show this model, instead of the one that had them before."""
        cached = _OF_CACHES if self._settings.cache_bytes else {}
        decoder = {} if self.generation is None else _OF_DECODERS
        numbers = {
            name: functools.partial(self._number, number) for name, number in {**_GAUGES, **cached, **decoder}.items()
        }
        self._gauges.publish({"ready": lambda: self.ready, **numbers})
        if self._sequences is not None:
            self._sequences.publish()

    def withdraw(self, *, successor: bool) -> None:
        """End what :meth:`publish` began; with a successor, only the gauges that the successor does not publish."""
        gauges = [*_OF_CACHES] if self._settings.cache_bytes else []
        if not successor:
            gauges += ["ready", *_GAUGES]
            if self._sequences is not None:
                gauges += ["sequences", "sequence_state_bytes"]
            if self.generation is not None:
                gauges += _OF_DECODERS
        self._gauges.withdraw(*gauges)

    def succeed(self, earlier: Model) -> None:
        """Let the model that this one replaces keep its open sequences until they end."""
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
            return self._loaded is None

    def _load(self, sizes: Sequence[int]) -> None:
        try:
            loaded = self._loader.load(
                sizes,
                self,
                self.acceptor.move,
                lost=self._devices_lost,
                changed=self._engine_changed,
                parkable=self._parkable,
            )
            with contextlib.ExitStack() as on_error:
                on_error.callback(self._loader.leave_devices)
                on_error.callback(lambda: loaded.close(self.acceptor.unavailable()))
                with self.acceptor.lock:
                    self.acceptor.open(loaded.accepts, restarts=bool(loaded.isolated))
                    self._loaded = loaded
                on_error.pop_all()
        except Exception as error:  # whatever fails, the state must become FAILED
            self.acceptor.move(State.FAILED, str(error), after=_BEFORE_READY)
            if isinstance(error, IngotError):
                raise
            raise InternalError(f"model '{self.name}' cannot be loaded: {error}") from error
        self._engine_changed()
        summary = ", ".join(f"{name} {value}" for name, value in self.engine_settings.items())
        log.info("model %s version %s is ready on %s: %s", self.name, self.version, self.device, summary)

    def _devices_lost(self, reason: str) -> None:
        """Refuse requests for good, since no device is left to run them."""
        self.acceptor.move(State.FAILED, reason, after=(State.READY, State.STUCK))
        if (loaded := self._loaded) is not None:
            loaded.fail_unqueued(self.acceptor.unavailable())

    def _engine_changed(self) -> None:
        """Refuse requests while no engine process runs; called in their supervisors' threads."""
        with self.acceptor.lock:
            if self._loaded is None or not self._loaded.isolated:
                return
            isolated = self._loaded.isolated
            if not all(engine.down for engine in isolated):
                self.acceptor.move(State.READY, after=(State.RESTARTING, State.FAILED))
                return
            state = State.FAILED if all(engine.failed for engine in isolated) else State.RESTARTING
            reason = f"its engine process {isolated[-1].down}"
            self.acceptor.move(state, reason, after=(State.READY, State.RESTARTING, State.FAILED))

    def settle(self, timeout: float | None = None) -> bool:
        """Wait until the final engines serve; return whether they do."""
        loaded = self._loaded
        return loaded is None or loaded.swap is None or loaded.swap.wait(timeout)

    def split(self, split: Accepts | None) -> None:
        """Let a canary's traffic split accept the requests while the model is ready; None ends that."""
        self.acceptor.split(split)

    @property
    def split_up(self) -> bool:
        """Whether a canary's traffic split accepts its requests; see :meth:`split`."""
        return self.acceptor.split_up

    def submit(self, request: Request) -> Submitted:
        """Accept a request and return at once; see :meth:`Dispatcher.submit`.

        Raises:
            Unavailable: the model is not ready, too many requests are queued, or too little memory is left.
        """
        return self.acceptor.accepting.submit(request)

    def submit_alone(self, request: Request) -> Submitted:
        """Accept a request that neither a canary nor the cache may answer; errors as for :meth:`submit`."""
        loaded = self._loaded
        if loaded is None or self.state is not State.READY:
            raise self.acceptor.unavailable()
        return loaded.submit_alone(request)

    def generate(self, request: GenerationRequest) -> Stream:
        """Accept a request for tokens, and return the stream of them at once.

        Raises:
            InvalidArgument: the prompt is not valid, or does not fit a slot with the answer.
            Unavailable: the model is not ready, or too many requests wait.
        """
        stream = Stream(request)
        stream.pending = self.submit(
            Request(TokenInputs(stream), stream.settle, request.timeout, request.priority, client=request.client)
        )
        return stream

    async def with_steps(self, work: Aside[T], nbytes: int, client: Hashable) -> T:
        """Return the result of work with the steps of a model that is ready; see :meth:`Stepped.aside`.

        Raises:
            Unavailable: the model is not ready, or too many requests wait.
        """
        loaded = self._loaded
        if loaded is None or loaded.stepped is None or self.state is not State.READY:
            raise self.acceptor.unavailable()
        return await loaded.stepped.aside(work, nbytes, client)

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
        return 0.0 if (loaded := self._loaded) is None else loaded.last_use

    def _number(self, number: Callable[[Loaded], float]) -> float:
        return 0 if (loaded := self._loaded) is None else number(loaded)

    @property
    def in_flight(self) -> int:
        """Number of requests that are accepted and not answered."""
        return 0 if (loaded := self._loaded) is None else loaded.in_flight

    @property
    def waiting(self) -> int:
        """Number of requests that wait for an engine."""
        return 0 if (loaded := self._loaded) is None else loaded.waiting

    @property
    def wait(self) -> float:
        """Seconds that a request which arrives now is expected to wait for an engine; 0 while none is loaded."""
        return 0.0 if (dispatcher := self._dispatcher) is None else dispatcher.wait

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
        """The last batch that ran; None before the first, and of a decoder, whose answers take many steps."""
        return None if (loaded := self._loaded) is None else loaded.last_batch

    def submit_step(self, step: Step, request: Request) -> Submitted:
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
        loaded = self._loaded
        described: dict[str, Any] = {
            "state": self.state.value,
            "device": self.device,
            "variant": self.variant,
            "engine": dict(self.engine_settings),
            "cached": loaded is not None and loaded.cache is not None,
            "digest": self.digest,
            "variants": self._loader.terms.variants,
        }
        return self._counted.copy(Duration(), described) if loaded is None else loaded.statistics(described)

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that serve it; none before it is ready and after it is closed. May be read from any thread."""
        return () if (dispatcher := self._dispatcher) is None else dispatcher.workers

    def suspend(self, reason: str, worker: Worker, error: IngotError) -> None:
        """Refuse requests until :meth:`resume`, as an engine call does not end.

        Args:
            reason: shown to clients.
            worker: runs the call.
            error: the outcome of the worker's requests; queued requests fail with ``reason``.
        """
        self.acceptor.move(State.STUCK, reason, after=(State.READY,))
        if (loaded := self._loaded) is not None:
            loaded.fail_unqueued(self.acceptor.unavailable())
            loaded.dispatcher.fail(worker, error, self.acceptor.unavailable())

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
        if (loaded := self._loaded) is not None:
            await loaded.wait_quiet()

    def close(self, timeout: float | None = None) -> None:
        """Stop the workers and free the engines; call it after ``drain``. Closing twice does nothing.

        Args:
            timeout: seconds to wait for an engine call that ``drain`` did not wait for.
        """
        with self.acceptor.lock:  # a server may stop while the model is being replaced
            self.acceptor.close()
            loaded, self._loaded = self._loaded, None
        if self._sequences is not None:
            self._sequences.close()
        if loaded is not None:
            loaded.close(self.acceptor.unavailable(), timeout)
            self._loader.leave_devices()  # a load that still runs does so itself

    @property
    def _dispatcher(self) -> Dispatcher | None:
        loaded = self._loaded  # which close() sets to None in a thread
        return None if loaded is None else loaded.dispatcher

    @property
    def _sequences(self) -> Sequences | None:
        return self._loader.sequences


def _resolve(future: asyncio.Future[Mapping[str, Array]], outcome: Outcome) -> None:
    if future.done():  # the client left
        return
    if isinstance(outcome, IngotError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
