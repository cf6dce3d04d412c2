"""The loading of a model: from its source to the parts that serve it."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ingot.errors import InternalError
from ingot.runtime.dispatch.acceptor import State
from ingot.runtime.dispatch.dispatcher import Dispatcher
from ingot.runtime.dispatch.pending import Accepts
from ingot.runtime.dispatch.sequences import Sequences
from ingot.runtime.engines.decoder import step
from ingot.runtime.engines.isolation.calls import Ask
from ingot.runtime.loading.assembly import Assembly
from ingot.runtime.loading.choice import Choice, Choose, Reason
from ingot.runtime.loading.engine_loader import EngineLoader, Learned
from ingot.runtime.loading.gauges import ModelGauges
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.loading.loaded import Loaded
from ingot.runtime.loading.placement import Placement
from ingot.runtime.loading.source import ModelSource
from ingot.runtime.loading.trust_check import ServingTerms
from ingot.runtime.machine.devices import kind_of
from ingot.runtime.settings.labels import check_labels
from ingot.steps import OpenedSteps
from ingot.steps.completion.texts import CompletionTexts
from ingot.tensors import Array

log = logging.getLogger(__name__)


class ModelLoader:
    """Loads a model, once or, if it is parkable, again and again; one load at a time.

    The attributes describe the last load, as far as it came; before the first they are empty.

    Args:
        source: the variant or file to serve; it is opened by the first load.
        terms: checks to pass before anything is opened, and properties to report to clients.
        assembly: makes the parts.
        gauges: what the metrics show of the model.
        labels: names of classes, which must fit the signature.

    Attributes:
        signature: None if only the engine knows it, and none is open.
        sequences: the states of sequences; None if the model has no states.
        steps: the steps around the graph; None if the model has none.
        generation: how a decoder is run; None for other models.
        texts: the tokenizer and the chat template of a decoder; None if the model has none.
        size: of the served files, in bytes.
        instances: number of copies in memory.
        example: inputs that the model's code gives itself; empty for others.
        engine_settings: how the engines run, for users.
        ask: asks another model for the code of this one; None if there are no others.
    """

    def __init__(
        self,
        source: ModelSource,
        terms: ServingTerms,
        assembly: Assembly,
        gauges: ModelGauges,
        labels: Sequence[str] = (),
    ):
        self.platform = self.device = self.variant = ""
        self.size = 0
        self.instances = 1
        self.properties: Mapping[str, str] = {}
        self.engine_settings: Mapping[str, str] = {}
        self.example: Mapping[str, Array] = {}
        self.sequences: Sequences | None = None
        self.steps: OpenedSteps | None = None
        self.texts: CompletionTexts | None = None
        self.placement: Placement | None = None
        self.terms = terms
        self.ask: Ask | None = None
        self._name, self._settings = assembly.name, assembly.settings
        self.signature = source.signature  # it is read by each request
        self.generation = source.generation
        self._engines_signature = (
            source.signature if source.generation is None else step.signature_of(source.generation)
        )
        self._choose: Choose | None = source.choose
        self._assembly = assembly
        self._gauges = gauges
        self._labels = labels
        self._uncertain: str | None = None
        self._reason: Reason = ""
        self._fallback = ""
        self._learned: Learned | None = None

    def load(
        self,
        sizes: Sequence[int],
        model: Accepts,
        enter: Callable[[State], object],
        *,
        lost: Callable[[str], None],
        changed: Callable[[], None],
        parkable: bool,
    ) -> Loaded:
        """Open the engines, replay the goldens, warm up, and make the parts; whatever fails, the engines are closed.

        Args:
            sizes: numbers of samples in a batch that are run before the model is ready.
            model: accepts the steps of sequences.
            enter: called with TESTING and WARMING as these begin.
            lost: called with the reason when the devices of all engines have failed.
            changed: called when an engine process starts or ends, in the thread of its supervisor.
            parkable: keep what another load needs.

        Raises:
            IngotError: the model cannot be loaded, or its answers differ from its goldens.
        """
        try:
            with contextlib.ExitStack() as on_error:
                on_error.callback(self.leave_devices)
                choice = self._choose_now()
                for processes in choice.spec.decoding:
                    on_error.callback(processes.close)
                engines = EngineLoader(self._name, choice, self._engines_signature, self._settings, self._learned)
                dispatcher: Dispatcher | None = None

                def close() -> None:
                    if engines.swap is not None:
                        engines.swap.close()
                    (dispatcher or engines).close()

                on_error.callback(close)
                mixing = self._open(engines, choice, model, enter)
                dispatcher = self._assembly.dispatcher(
                    engines, choice.spec, sizes, batching=not mixing, lost=lost, derived=self._gauges.count_derived
                )
                loaded = self._supervised(engines, choice.spec, dispatcher, changed)
                on_error.pop_all()
        finally:
            if not parkable:
                # They hold the archive, which a closed model that something still refers to must not.
                self._choose, self.terms = None, replace(self.terms, check=lambda: None)
        if parkable:
            self._choose = functools.partial(self._choose_again, choice.spec)
            self._learned = engines.learned
        if mixing:
            log.warning("model %s: requests run one at a time: %s", self._name, mixing)
        return loaded

    def leave_devices(self) -> None:
        """Stop counting on GPUs."""
        self._gauges.leave_devices()
        if self.placement is not None:
            self.placement.release()
            self.placement = None

    def _choose_now(self) -> Choice:
        """Open the first engine of what is served, and describe it."""
        if self._choose is None:
            raise InternalError(f"model '{self._name}' is loaded once only")
        self.terms.check()
        choice = self._choose()
        self.variant, self.properties = choice.spec.variant, {**choice.properties, **self.terms.properties}
        self.size, self.placement, self.steps = choice.spec.size, choice.spec.placement, choice.spec.steps
        self.texts = choice.spec.texts
        return choice

    def _choose_again(self, spec: LoadSpec) -> Choice:
        """Open an engine of the variant that was chosen before, with as many threads."""
        threads = self._settings.threads if self._learned is None else self._learned.threads
        spec = spec.placed(self._settings, self._name)
        engine, tested = spec.start(spec.device(), threads, self._name)
        why = self.properties.get("variant_detail", "")
        return Choice(spec, engine, reason=self._reason, why=why, tested=tested)

    def _open(self, engines: EngineLoader, choice: Choice, model: Accepts, enter: Callable[[State], object]) -> str:
        """Open and test the engines; return why requests may not share a batch, empty if they may."""
        self._engines_signature = engines.signature
        if self.sequences is None and self.generation is None:
            self.signature = engines.signature
        engines.open()
        first = engines.engines[0]
        self.instances, self.example = engines.instances, first.example
        self.platform, self.device, self.engine_settings = first.platform, first.device, engines.described
        if kind_of(self.device) == "cuda":
            self._assembly.metrics.gpus.use()
        elif self.placement is not None:
            self.placement.release()
            self.placement = None
        self._fallback = engines.fallback()
        enter(State.TESTING)
        engines.test()
        enter(State.WARMING)
        self._reason = choice.reason
        self._gauges.chosen(self.variant, choice.reason)
        if self.generation is not None:
            return ""
        self.sequences = self._assembly.sequences(engines.signature, model)
        if self.sequences is not None and self._gauges.published:
            self.sequences.publish()
        signature = engines.signature if self.sequences is None else self.sequences.signature
        self.signature = signature
        if self._settings.repeat.inputs:
            self._settings.repeat.check(signature)
        check_labels(self._labels, signature, f"the labels of model '{self._name}'")
        return choice.spec.mixing(engines.signature)

    def _supervised(
        self, engines: EngineLoader, spec: LoadSpec, dispatcher: Dispatcher, changed: Callable[[], None]
    ) -> Loaded:
        """Return the parts that serve, with engine processes that are kept running."""
        self.engine_settings = engines.described  # captures of batches may have failed
        confinement = engines.supervise(self._gauges.engine_lost, changed, self.ask)
        streams = self._assembly.streams(engines, dispatcher)
        if self._uncertain is None:  # the first load
            self._uncertain = self._assembly.uncertainty(spec, streams=streams is not None)
        cache, cached = self._assembly.cache(dispatcher, self._uncertain)
        placed = self._gauges.placed(self.placement, self._fallback)
        self.properties = {**self.properties, **confinement, **placed, **cached}
        stepped = self._assembly.stepped(spec, cache or dispatcher, self._gauges.engine_lost)
        generator = self._assembly.generator(spec, self.generation, dispatcher)
        return Loaded(dispatcher, cache, streams, stepped, spec.decoding, engines.isolated, engines.swap, generator)
