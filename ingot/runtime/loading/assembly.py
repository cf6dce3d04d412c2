"""The parts that serve a loaded model: its dispatcher, the states of its sequences, and its response cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ingot.errors import InvalidArgument
from ingot.model_store import Generation
from ingot.report import units
from ingot.runtime.dispatch.batch_check import BatchCheck
from ingot.runtime.dispatch.batch_run import AnswerLimit
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.dispatch.pending import Accepts
from ingot.runtime.dispatch.response_cache import ResponseCache
from ingot.runtime.dispatch.sequences import Sequences
from ingot.runtime.dispatch.signature_check import CallLimit
from ingot.runtime.dispatch.statistics import Statistics
from ingot.runtime.dispatch.stepped import Stepped
from ingot.runtime.dispatch.streams import Streams, of_calls
from ingot.runtime.generation.generator import Generator
from ingot.runtime.loading.engine_loader import EngineLoader
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.machine.devices import cpu_count
from ingot.runtime.metrics import Metrics
from ingot.runtime.scheduling.scheduler import Scheduler
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Signature

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assembly:
    """Makes the parts of one model.

    Args:
        name: the model's name.
        version: the model's version.
        settings: how it is run.
        metrics: where requests and batches are counted.
        statistics: counts of the model, also of earlier loads.
    """

    name: str
    version: str
    settings: Settings
    metrics: Metrics
    statistics: Statistics

    def dispatcher(
        self,
        engines: EngineLoader,
        spec: LoadSpec,
        sizes: Sequence[int],
        *,
        batching: bool,
        lost: Callable[[str], None],
        derived: Callable[[str], None],
    ) -> Dispatcher:
        """Warm the engines, and return the dispatcher that serves them.

        Args:
            engines: opened and tested.
            spec: what they run.
            sizes: numbers of samples that are run before the model is ready.
            batching: whether requests may share a batch, as far as the graph allows.
            lost: called with the reason when the devices of all engines have failed.
            derived: called with each result of the derived cache.
        """
        settings, signature, served = self.settings, engines.signature, engines.engines
        most = settings.limits.max_batch
        if (placement := spec.placement) is not None:
            most = min(most, placement.max_batch)
        limits = replace(settings.limits, max_batch=signature.max_samples(most))
        batching = batching and signature.batch is not None and spec.batchable
        scheduler = Scheduler(
            limits,
            batching=batching,
            latency=engines.warm(limits.max_batch, sizes, derived),
            engines=len(served),
            lanes=len(served) // engines.instances,
            sample_bytes=engines.sample_bytes,
            work=None if engines.padding is None else engines.padding.work,
        )
        call_limit = None
        if (bounds := spec.limiting(signature)) is not None:
            call_limit = CallLimit(bounds.peak, settings.max_call_bytes, self.name)
        return Dispatcher(
            self.name,
            self.version,
            served,
            of_calls(signature) if served[0].capabilities.streams else signature,
            scheduler,
            padding=engines.padding,
            slo=None if spec.decoder is not None else settings.slo,  # calls of decoders are steps of many answers
            answer_limit=AnswerLimit(settings.max_answer_bytes, self.name),
            call_limit=call_limit,
            metrics=self.metrics,
            statistics=self.statistics if spec.decoder is None else Statistics(),
            crowded=served[0].device == "cpu" and cpu_count() <= len(served) * engines.threads,
            inline=not spec.risk,
            lost=lost,
            batch_check=self._batch_check(spec.tolerance) if batching and settings.verify_batches else None,
        )

    def _batch_check(self, tolerance: float) -> BatchCheck:
        return BatchCheck(self.settings.verify_batches, tolerance, self.metrics, self.name, self.version)

    def sequences(self, signature: Signature, model: Accepts) -> Sequences | None:
        """Return the states of a model's sequences; None if it has no states."""
        settings = self.settings
        if not settings.states:
            return None
        return Sequences(self.name, self.version, signature, settings.states, model, settings.sequences, self.metrics)

    def streams(self, engines: EngineLoader, dispatcher: Dispatcher) -> Streams | None:
        """Return the open streams of a model whose code answers in parts; None if it does not.

        Raises:
            InvalidArgument: the model has several engine processes: each has its own generators.
        """
        first, *others = engines.engines
        if not first.capabilities.streams:
            return None
        if others:
            raise InvalidArgument(
                f"model '{self.name}' answers in parts, which needs one engine process: leave out --instances"
            )
        return Streams(self.name, engines.signature, dispatcher, first.end_streams, self.settings.limits)

    def stepped(self, spec: LoadSpec, accepts: Accepts, lost: Callable[[str], None]) -> Stepped | None:
        """Return the component that accepts raw requests in front of ``accepts``; None without steps.

        Args:
            spec: the model's load spec.
            accepts: answers requests of tensors.
            lost: called with how a process that decodes items ended.
        """
        if spec.steps is None:
            return None
        for processes in spec.decoding:
            processes.check()
            processes.supervise(self.name, lost)
        return Stepped(self.name, self.version, spec.steps, accepts, self.settings.limits, self.metrics)

    def generator(self, spec: LoadSpec, generation: Generation | None, steps: Dispatcher) -> Generator | None:
        """Return the component that answers requests for tokens by steps of a decoder; None for other models."""
        if spec.decoder is None or generation is None:
            return None
        return Generator(
            self.name,
            self.version,
            generation,
            spec.decoder,
            self.settings,
            steps,
            statistics=self.statistics,
            metrics=self.metrics,
        )

    def uncertainty(self, spec: LoadSpec, *, streams: bool) -> str:
        """Return why responses are not cached, though they should be; empty if they are."""
        settings = self.settings
        if not settings.cache_bytes:
            return ""
        if settings.states:
            why = "they depend on the states of sequences"
        else:
            why = "a request has several" if streams or settings.repeat.inputs else spec.uncertainty()
        if why:
            log.warning("model %s: its responses are not cached: %s", self.name, why)
        return why

    def cache(self, dispatcher: Dispatcher, uncertain: str) -> tuple[ResponseCache | None, dict[str, str]]:
        """Return the cache of responses, if there is to be one, and the properties that clients see.

        Args:
            dispatcher: answers what is not cached.
            uncertain: why equal requests may have different responses; see :meth:`uncertainty`.
        """
        limit = self.settings.cache_bytes
        if not limit or uncertain:
            return None, {"response_cache": f"off: {uncertain}"} if limit else {}
        cache = ResponseCache(limit, dispatcher, self.statistics, (self.name, self.version), self.metrics)
        return cache, {"response_cache": units.size(limit)}
