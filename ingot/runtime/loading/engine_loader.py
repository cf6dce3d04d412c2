"""The engines of one model: opened, tested, timed and run at the sizes of traffic before the model is ready."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ingot import tensors
from ingot.errors import EngineLost, IngotError, InvalidArgument, SamplesFailed, Unavailable
from ingot.runtime.dispatch import padding
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.engines.engine import Engine, lanes_of
from ingot.runtime.engines.isolation.calls import Ask
from ingot.runtime.engines.isolation.engine import ProcessEngine
from ingot.runtime.engines.isolation.supervisor import Supervision
from ingot.runtime.loading import self_test, warmup
from ingot.runtime.loading.choice import Choice
from ingot.runtime.loading.engine_swap import EngineSwap, Replaceable
from ingot.runtime.loading.threads import Tuned
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Array, Range, Signature
from ingot.tensors.padding import Padder

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Learned:
    """Measurements of a model's first load, which later loads use."""

    threads: int
    threads_why: str
    latency: Latency
    padding: PaddingPolicy | None


class EngineLoader:
    """Opens, tests and warms a model's engines; call the methods in the order in which they are defined.

    If one of them fails, close the loader. Otherwise its engines belong to a dispatcher, which closes them.

    Args:
        name: the model's name.
        choice: what is served, with its first engine.
        signature: the contract for requests; None uses the engine's own reading of the file.
        settings: how the model is run.
        learned: by an earlier load of the same choice.

    Attributes:
        engines: all of them, once opened; on a GPU, the lanes of each.
        instances: number of copies of the model in memory.
        signature: the model's signature.
        threads: CPU threads of each engine.
        swap: replaces engines that serve at once by those that share memory; None if there is nothing to replace.
        padding: how inputs are padded; None if they are not.
        isolated: the engines that run in engine processes, once supervised.
    """

    def __init__(
        self, name: str, choice: Choice, signature: Signature | None, settings: Settings, learned: Learned | None
    ):
        self.engines = [choice.engine]
        self.signature = signature or _of_file(choice)
        self.threads = settings.threads
        self.instances = 1
        self.swap: EngineSwap | None = None
        self.padding: PaddingPolicy | None = None
        self.isolated: Sequence[ProcessEngine | Replaceable] = ()
        self._name = name
        self._choice = choice
        self._spec = choice.spec
        self._settings = settings
        self._learned = learned
        self._threads_why = ""
        self._latency: Latency | None = None
        # The goldens of a decoder are answers of many steps.
        self._examples = (
            [] if choice.spec.decoder is not None else [golden.inputs for golden in choice.spec.goldens[:1]]
        )
        if not self._examples and (example := choice.engine.example):
            self._examples = [{**example}]

    def open(self) -> None:
        """Find the number of threads, and open an engine for each instance.

        Raises:
            InvalidArgument: the engine's inputs and outputs are not those of the signature.
            IngotError: an engine cannot be opened.
        """
        settings, first = self._settings, self._choice.engine
        tensors.check_same(self.signature, first.signature)
        if self._learned is None:
            tuned = self._spec.tune(first, settings, self.signature)
        else:
            tuned = Tuned(first, self._learned.threads, self._learned.threads_why)
        self.engines[0] = tuned.engine
        self.threads, self._threads_why = tuned.threads, tuned.why
        self._note_unchecked(tuned.engine)
        self.instances = settings.instances * len(settings.devices)
        while len(self.engines) < self.instances:
            device = self._spec.device(len(self.engines))
            self.engines.append(self._spec.start(device, tuned.threads, self._name)[0])
        # Lanes of different engines take turns, so that the first batches use all devices.
        rows = [lanes_of(engine, settings.lanes) for engine in self.engines]
        self.engines = [lane for row in itertools.zip_longest(*rows) for lane in row if lane is not None]

    def _note_unchecked(self, engine: Engine) -> None:
        """Log the inputs whose values may be indices that a GPU does not refuse."""
        unchecked = [] if engine.device == "cpu" else self._spec.unchecked(self.signature)
        if unchecked:
            log.warning(
                "model %s: a GPU does not refuse indices out of range, and the values of %s are not checked; if they "
                "are indices, declare their ranges when the model is exported (--input 'NAME:int64[...]=0..100')",
                self._name,
                ", ".join(unchecked),
            )

    @property
    def described(self) -> dict[str, str]:
        """How the engines run, for users."""
        lanes = len(self.engines) // self.instances
        shown = {"instances": str(self.instances)} | ({"lanes": str(lanes)} if lanes > 1 else {})
        return {**shown, **self.engines[0].settings, "threads_why": self._threads_why}

    def fallback(self) -> str:
        """Log and return why engines run on the CPU though the model was placed on a GPU; empty if none does."""
        placement = self._spec.placement
        on_cpu = [engine for engine in self.engines if engine.device == "cpu"]
        if placement is None or not placement.planned or not on_cpu:
            return ""
        isolated = self._spec.isolation is not None
        reason = (
            f"on the CPU: placed on {', '.join(placement.planned)}, which "
            f"{'its engine process' if isolated else 'its engine'} could not use; the log of its load has the reason"
        )
        remedy = ", or --isolate none to run it in the server's process" if isolated else ""
        log.warning("model %s runs %s; set --device cuda to refuse it instead%s", self._name, reason, remedy)
        return reason

    def test(self) -> None:
        """Replay the goldens in each engine.

        Raises:
            InternalError: the outputs differ.
            InvalidArgument: the model's own example fails.
        """
        for engine in self.engines:
            if engine is not self._choice.engine or not self._choice.tested:
                self._spec.test(engine, self._name)
        if not self._spec.goldens and self._examples:
            self._run_example(self._examples[0])

    def _run_example(self, example: Mapping[str, Array]) -> None:
        """Run the example that a model's code gives; one that calls other models has to wait until they are loaded.

        Raises:
            InvalidArgument: it fails.
        """
        try:
            self.engines[0].run(example)
        except EngineLost:
            raise
        except IngotError as error:
            errors = error.errors.values() if isinstance(error, SamplesFailed) else [error]
            if not all(isinstance(each, Unavailable) for each in errors):
                raise InvalidArgument(
                    f"the example of model '{self._name}' fails: {error}; change or remove it"
                ) from error
            log.warning("model %s: its example is not run before it is ready, nor batches timed: %s", self._name, error)
            self._examples = []

    def warm(self, max_batch: int, sizes: Sequence[int], swapped: Callable[[str], None]) -> Latency:
        """Time the engines, and run sizes that are slow the first time.

        Args:
            max_batch: most samples of a batch.
            sizes: numbers of samples that the traffic of the model's predecessor had.
            swapped: called with the result of replacing engines.
        """
        self.swap = self._spec.engine_swap(self.engines, self._settings.threads, self._name, swapped)
        if self.swap is not None:
            self.engines[:] = self.swap.engines
        first, examples, seconds = self.engines[0], self._examples, self._settings.warm_time
        if not examples and not first.capabilities.accepts_zeros:
            seconds = 0
        if self._learned is not None:
            latency, self.padding = self._learned.latency, self._learned.padding
            by_samples = latency if self.padding is None else _by_samples(latency, self.padding, max_batch)
        else:
            recorded = self._spec.latency if first.device == "cpu" else {}
            latency = by_samples = warmup.measure(first, self.signature, examples, max_batch, seconds, recorded)
        budget = self_test.SHARE * seconds
        if left := self_test.run_sizes(self.engines, self.signature, examples, by_samples, max_batch, budget, sizes):
            log.info("model %s: %d batch sizes were not tested within %.1f s", self._name, left, budget)
        if self._learned is None and self._spec.padding and examples:
            self.padding, latency = self._padded(latency, examples[0])
        if self.swap is not None:
            self.swap.start()
        self._latency = latency
        return latency

    def _padded(self, latency: Latency, example: Mapping[str, Array]) -> tuple[PaddingPolicy, Latency]:
        """Return the padding, and the latency by work instead of samples."""
        first, padder = self.engines[0], Padder(self.signature, self._spec.padding)
        policy = PaddingPolicy(padder, padder.sizes(example), rounded=first.capabilities.compiles_shapes)
        each = policy.work(policy.example)
        measured = padding.measure(first, padder, policy.work, example, self._settings.warm_time)
        return policy, Latency(measured | {samples * each: seconds for samples, seconds in latency.known.items()})

    @property
    def sample_bytes(self) -> float:
        """Bytes of one sample, or of one unit of its work, of the inputs by which the engines were timed."""
        work = prod(self.padding.example) if self.padding is not None else 1
        return warmup.sample_bytes(self.signature, self._examples) / work

    @property
    def learned(self) -> Learned | None:
        """The measurements; None before :meth:`warm`."""
        if self._latency is None:
            return None
        return Learned(self.threads, self._threads_why, self._latency, self.padding)

    def supervise(self, lost: Callable[[str], None], changed: Callable[[], None], ask: Ask | None) -> Mapping[str, str]:
        """Keep the processes of engines running; return properties that clients see.

        ``lost``, ``changed`` and ``ask`` are those of :class:`Supervision`.
        """
        name, spec = self._name, self._spec
        found = [
            each
            for each in self.engines
            if isinstance(each, ProcessEngine | Replaceable) and each.capabilities.isolated
        ]
        if spec.isolation is None or not found:
            if spec.risk:
                log.warning("model %s runs in the server's process, which it might end or freeze: %s", name, spec.risk)
            return {}
        confinement, why = ", ".join(found[0].measures) or "nothing", spec.isolation.why
        log.info("model %s runs in an engine process, since %s; confined by: %s", name, why, confinement)
        supervision = Supervision(name, lambda run: spec.replay(run, name), lost, changed, ask)
        for engine in found:
            engine.supervise(supervision)
        self.isolated = found
        return {"isolation": "process", "isolation_reason": why, "isolation_confinement": confinement}

    def close(self) -> None:
        """Close the engines."""
        for engine in self.engines:
            engine.close()


def _by_samples(latency: Latency, padding: PaddingPolicy, most: int) -> Latency:
    """Return the latency of samples of the size that was timed, from that by work."""
    each = padding.work(padding.example)
    return Latency({work // each: taken for work, taken in latency.known.items() if each <= work <= most * each})


def _of_file(choice: Choice) -> Signature:
    """Return the signature of a bare file; a class in Python declares all of it."""
    signature = choice.engine.signature
    return signature if choice.spec.graph is None else choice.spec.ranged(_of_any_size(signature))


def _of_any_size(signature: Signature) -> Signature:
    """Return a bare file's signature with unbounded dimensions: only the engine knows their limits."""
    return replace(signature, ranges={name: Range(0) for name in signature.symbols})
