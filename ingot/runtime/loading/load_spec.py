"""What a load of a model needs: how its engine is opened, and which answers it must reproduce."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from ingot import permissions, tensors
from ingot.bounds import LOOSE, Bounds, bounds_of, excess
from ingot.bounds.indices import indices_of
from ingot.bounds.randomness import random_of
from ingot.bounds.samples import mixing_of
from ingot.errors import InternalError, InvalidArchive, InvalidArgument, TooLarge
from ingot.model_store import BoundsEvidence, Golden, Variant
from ingot.runtime.engines.decoder.options import DecoderOptions, options_of
from ingot.runtime.engines.engine import Engine
from ingot.runtime.engines.isolation.engine import Isolation
from ingot.runtime.engines.isolation.policy import check_shards, isolation_of, risk_of
from ingot.runtime.engines.isolation.step_processes import StepProcesses
from ingot.runtime.engines.loader import (
    check_engine_runs,
    engine_of,
    graphs_for,
    load_engine,
    measured_with,
    precision_of,
    tensorrt_cache,
    uses_cuda,
)
from ingot.runtime.engines.opening import ENGINES
from ingot.runtime.engines.python.requirements import prepared
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.generation import offline
from ingot.runtime.loading import item_processes, warmup
from ingot.runtime.loading.engine_swap import EngineSwap
from ingot.runtime.loading.placement import Need, Placement, place
from ingot.runtime.loading.prepacked import Prepacked
from ingot.runtime.loading.threads import Tuned, tune
from ingot.runtime.profiling.profile import zeros
from ingot.runtime.settings.settings import Settings
from ingot.steps import OpenedSteps, Values
from ingot.steps.completion.texts import CompletionTexts
from ingot.tensors import Array, Signature, arrays
from ingot.tensors.padding import Padding

OpenEngine = Callable[[str, int], Engine]


# What an answer that differs from a golden shows, of the graph and of steps, which read what the golden holds.
_GRAPH = "the graph was changed since, or this machine or its engine computes something else"
_STEPS = "the steps, or the packages that run them, compute something else than when the archive was made"


@dataclass(frozen=True)
class LoadSpec:
    """The description of a model to load, from a variant or a file.

    ``open`` opens an engine, given the device and its number of CPU threads. ``goldens`` are cases that must be
    reproduced within ``tolerance`` before the model is ready; see :func:`ingot.tensors.arrays.departure`. ``variant``
    is its name in the archive. ``batchable`` is whether requests may share a batch, if the signature allows it, and
    ``unbatched`` is why the export found that they must not. ``prepacked`` describes how to open it through the
    derived cache. ``padding`` describes how its inputs may be padded, and ``latency`` what was recorded on this
    machine. ``isolation`` is why and how engines run in separate processes,
    and ``risk`` why they might end or freeze the process that runs them; ``graph`` is the file of an ONNX graph, and
    ``bounds`` are its bounds, and ``loose`` is whether they exceed what was measured by too much to limit calls by
    them. ``size`` is that of its files, in bytes. ``needed`` returns the memory that an instance needs on a GPU, and
    ``placement`` is where instances run, once that is decided. ``steps`` are those around the graph, and ``decoding``
    the processes of those that decode items. ``texts`` are the tokenizer and the chat template of a decoder, and
    ``decoder`` is its cache.
    ``source`` is the variant, whose files ``open`` reads.
    """

    open: OpenEngine
    goldens: Sequence[Golden] = ()
    _: KW_ONLY
    tolerance: float = 1e-3
    variant: str = ""
    batchable: bool = True
    unbatched: str = ""
    prepacked: Prepacked | None = None
    padding: Mapping[str, Padding] = field(default_factory=dict)
    latency: Mapping[int, float] = field(default_factory=dict)
    isolation: Isolation | None = None
    risk: str = ""
    bounds: Bounds | None = None
    loose: bool = False
    size: int = 0
    graph: Path | None = None
    needed: Callable[[], Need | None] = lambda: None
    placement: Placement | None = None
    decoder: DecoderOptions | None = None
    texts: CompletionTexts | None = None
    steps: OpenedSteps | None = None
    decoding: Sequence[StepProcesses] = ()
    # An archive file is unpacked into a temporary folder that is removed with the last reference to its variants.
    # ``open`` has only the path, and reads the file again when an engine process is restarted.
    source: Variant | None = None

    @classmethod
    def of_file(cls, path: Path, settings: Settings) -> LoadSpec:
        """Return the load spec of a bare ``.onnx`` file.

        Raises:
            Unsupported: it would have to be divided over processes.
        """
        check_shards(settings, "onnx")
        bounds = bounds_of(path)
        risk = risk_of(settings, "onnx", bounds)
        isolation = isolation_of(settings, "onnx", risk)
        size = path.stat().st_size
        engine, graphs = settings.engine or ENGINES[0], graphs_for("onnx", None, settings)
        spec = EngineSpec(
            path,
            engine=engine,
            graphs=graphs,
            convolutions=settings.convolutions,
            gpu_arena=settings.gpu_arena,
            max_batch=settings.limits.max_batch,
        )
        return cls(
            lambda device, threads: load_engine(replace(spec, device=device, threads=threads), isolation),
            isolation=isolation,
            risk=risk,
            bounds=bounds,
            size=size,
            graph=path,
            needed=lambda: _need("onnx", engine, weights=size, own=isolation is None),
        )

    @classmethod
    def of_class(cls, path: Path, settings: Settings) -> LoadSpec:
        """Return the load spec of a class in Python, as ``model.py:Model``: a file of the user, not of an archive.

        Raises:
            Unsupported: it would have to be divided over processes, or have an engine for graphs.
        """
        check_shards(settings, "python")
        check_engine_runs("python", settings.engine)
        risk = risk_of(settings, "python", None)
        isolation = isolation_of(settings, "python", risk)
        spec = EngineSpec(
            path,
            format="python",
            allow_code=True,
            settings=settings.model_settings,
            permissions=settings.permissions,
        )
        return cls(
            lambda device, threads: load_engine(replace(spec, device=device, threads=threads), isolation),
            isolation=isolation,
            risk=risk,
        )

    @classmethod
    def of_variant(cls, variant: Variant, settings: Settings) -> LoadSpec:
        """Return the load spec of a variant whose archive is unpacked.

        Raises:
            InvalidArchive: its goldens are damaged.
            Unsupported: it cannot be divided over as many processes as the settings ask for, it is a decoder, which
                has one instance and no other state, or the configured engine does not run its format.
            InvalidArgument: it is a decoder that knows fewer positions than the settings ask for.
        """
        form = variant.serving.format
        plan = variant.serving.tensor_parallel
        check_shards(settings, form)
        check_engine_runs(form, settings.engine)
        measured = measured_with(variant, settings.engine)
        bounds = bounds_of(variant.path(), variant.signature) if form == "onnx" else None
        risk = risk_of(settings, form, bounds)
        isolation = isolation_of(settings, form, risk, planned=bool(plan))
        goldens = variant.goldens()
        steps, decoding = item_processes.confined(variant, settings)
        generation = variant.serving.generation
        decoder = None if generation is None else options_of(generation, settings)

        def needed() -> Need | None:
            if variant.serving.requires.get("device") == "cpu" or decoder is not None:
                return None
            batching = variant.serving.batchable and variant.signature.batch is not None
            return _need(
                form,
                engine_of(variant, settings.engine),
                weights=variant.size,
                activations=_activations(variant, bounds, goldens, recorded=measured),
                most=variant.signature.max_samples(settings.limits.max_batch) if batching else 1,
                own=isolation is None,
            )

        spec = EngineSpec(
            variant.path(),
            format=form,
            allow_code=settings.allow_code,
            ort_library=settings.ort_library,
            engine=engine_of(variant, settings.engine),
            precision=precision_of(variant),
            graphs=graphs_for(form, variant.signature.batch, settings, padded=variant.serving.batchable),
            convolutions=settings.convolutions,
            gpu_arena=settings.gpu_arena,
            cache=tensorrt_cache(variant, settings),
            max_batch=variant.signature.max_samples(settings.limits.max_batch),
            shards=settings.shards,
            plan=plan,
            batchable=variant.serving.batchable,
            settings=settings.model_settings,
            decoder=decoder,
        )
        code = variant.python_plan()
        needed_permissions = code.permissions if code is not None else ()

        def open_on(device: str, threads: int) -> Engine:
            if settings.allow_code:
                permissions.check(needed_permissions, settings.permissions)
            packages = None
            if code is not None and settings.allow_code:
                packages = prepared(code, variant.path().parent, install=settings.install_requirements)
            return load_engine(
                replace(spec, device=device, threads=threads, packages=packages, permissions=needed_permissions),
                isolation,
            )

        return cls(
            open_on,
            goldens,
            tolerance=variant.serving.golden_tolerance,
            variant=variant.name,
            batchable=variant.serving.batchable,
            unbatched=variant.serving.provenance.unbatched,
            prepacked=None if decoder is not None else Prepacked.of_variant(variant, settings, isolation),
            padding=variant.serving.padding,
            # Recorded latencies are of one call on all cores.
            latency=warmup.recorded(variant.serving.evidence) if settings.instances == 1 and measured else {},
            isolation=isolation,
            risk=risk,
            bounds=None if decoder is not None else bounds,  # they are of the graph, and calls are steps
            loose=bounds is not None and _loose(bounds, variant.serving.evidence.bounds),
            size=variant.size,
            graph=variant.path() if form == "onnx" else None,
            needed=needed,
            decoder=decoder,
            texts=variant.opened_texts(),
            steps=steps,
            decoding=decoding,
            source=variant,
        )

    def placed(self, settings: Settings, model: str) -> LoadSpec:
        """Return this spec with its placement; see :func:`ingot.runtime.loading.placement.place`.

        Raises:
            Unavailable: there is too little memory on the devices.
        """
        return replace(self, placement=place(model, self.needed, settings))

    def limiting(self, signature: Signature) -> Bounds | None:
        """Return the bounds that limit the memory of calls; None if there are none, or if they say too little.

        Args:
            signature: the model's; an engine may name the dimensions of a bare file otherwise than the file does.
        """
        bounds = self.bounds
        if bounds is not None and self.graph is not None and not bounds.symbols <= set(signature.symbols):
            bounds = bounds_of(self.graph, signature)
        return bounds if bounds is not None and bounds.bounded and not self.loose else None

    def mixing(self, signature: Signature) -> str:
        """Return why requests may influence each other in a batch; empty if they cannot.

        The export has decided it for an archive, and noted the reason; a bare file is analysed here.
        """
        if self.variant:
            return "" if signature.batch is not None else self.unbatched
        if self.graph is None or signature.batch is None:
            return ""
        found = mixing_of(self.graph, signature, signature.batch)
        return "" if found is None else f"{found.reason}; export the file with --independent if that is wrong"

    def ranged(self, signature: Signature) -> Signature:
        """Return a bare file's signature with the ranges of the inputs that are indices."""
        ranges = {} if self.graph is None else indices_of(self.graph).ranges
        inputs = (replace(spec, values=spec.values or ranges.get(spec.name)) for spec in signature.inputs)
        return replace(signature, inputs=tuple(inputs))

    def unchecked(self, signature: Signature) -> list[str]:
        """Return the integer inputs without a range that indices may depend on."""
        unknown = None if self.graph is None else indices_of(self.graph).unknown
        return [
            spec.name
            for spec in signature.inputs
            if spec.dtype.is_integer and spec.values is None and (unknown is None or spec.name in unknown)
        ]

    def uncertainty(self) -> str:
        """Return why equal inputs may have different outputs; empty if they cannot. This reads the graph."""
        if self.decoder is not None:
            return "its tokens may be drawn"
        return "its format is not ONNX, so it may be random" if self.graph is None else random_of(self.graph)

    def device(self, instance: int = 0) -> str:
        """Return the device of an instance, once it is placed."""
        places = self.placement.devices if self.placement is not None else ("auto",)
        return places[instance % len(places)]

    def start(self, device: str, threads: int, model: str) -> tuple[Engine, bool]:
        """Open the engine that is ready soonest; return it and whether it was tested.

        A tested engine may be slow with batches until :class:`~ingot.runtime.loading.engine_swap.EngineSwap` replaces
        it.
        """
        if self.prepacked is not None:
            early = self.prepacked.open_early(threads, lambda engine: self.test(engine, model))
            if early is not None:
                return early, True
        return self.open(device, threads), False

    def tune(self, engine: Engine, settings: Settings, signature: Signature) -> Tuned:
        """Return the engine with the number of CPU threads that pays off, given one with all threads.

        Raises:
            IngotError: the model cannot be opened again.
        """
        if settings.engine_threads is not None:
            return Tuned(engine, settings.threads, "as configured")
        if settings.threads == 1:
            return Tuned(engine, 1, "an instance has one core")
        loaded = engine.capabilities.load_seconds
        if loaded is None or engine.device != "cpu" or self.prepacked is not None:
            return Tuned(engine, settings.threads, "one per core of the instance; not measured")
        example = self.goldens[0].inputs if self.goldens else zeros(signature)
        return tune(
            engine, settings.threads, loaded, signature, example, lambda count: self.open(settings.devices[0], count)
        )

    def engine_swap(
        self, engines: Sequence[Engine], threads: int, model: str, done: Callable[[str], None]
    ) -> EngineSwap | None:
        """Return the swap to engines that share memory, not started; None if there is nothing to swap."""
        if self.prepacked is None:
            return None
        return EngineSwap(
            self.prepacked,
            engines,
            threads=threads,
            test=lambda engine: self.test(engine, model),
            done=done,
            name=model,
        )

    def test(self, engine: Engine, model: str) -> None:
        """Replay the goldens; see :meth:`replay`."""
        self.replay(engine.run, model)

    def replay(self, run: Callable[[Mapping[str, Array]], dict[str, Array]], model: str) -> float:
        """Replay the goldens; return the largest departure.

        Raises:
            InternalError: the outputs differ; ``model`` is its name in the message.
        """
        if self.decoder is not None:
            offline.replay(run, self.decoder, self.goldens, model)
            return 0.0
        errors = [0.0]
        for case, golden in enumerate(self.goldens):
            outputs = run(golden.inputs)
            errors.append(self._compare(golden.outputs, outputs, model, f"golden case {case}"))
            if self.steps is not None and golden.raw:
                values = self._prepared(self.steps, golden, case)
                tensors = self.steps.tensors(values)
                where = f"the steps before golden case {case}"
                errors.append(self._compare(golden.inputs, tensors, model, where, _STEPS))
                answers = self.steps.config.comparable(self.steps.finish(values, outputs))
                expected = self.steps.config.comparable(golden.answers)
                errors.append(self._compare(expected, answers, model, f"the steps after golden case {case}", _STEPS))
        return max(errors)

    def _prepared(self, steps: OpenedSteps, golden: Golden, case: int) -> Values:
        """Return the values that the steps before the graph make of raw inputs.

        Raises:
            InvalidArchive: they refuse the raw inputs.
        """
        try:
            return steps.prepare(golden.raw)
        except (InvalidArgument, TooLarge) as error:
            raise InvalidArchive(f"the archive's steps refuse its own raw golden case {case}: {error}") from error

    def _compare(
        self,
        expected: Mapping[str, Array],
        actual: Mapping[str, Array],
        model: str,
        where: str,
        cause: str = _GRAPH,
    ) -> float:
        output, error = arrays.worst_error(expected, actual)
        if error > self.tolerance:
            raise InternalError(
                f"model '{model}' does not reproduce its golden outputs: output '{output}' of {where} departs by "
                f"{error:.2e}, tolerance {self.tolerance:.0e}; {cause}, so the model is not served"
            )
        return error


def _need(form: str, engine: str, **needed: Any) -> Need | None:
    """Return the memory that an instance needs on a GPU; None if its engine cannot use one."""
    return Need(**needed) if uses_cuda(form, engine) else None


def _loose(bounds: Bounds, evidence: BoundsEvidence | None) -> bool:
    if evidence is None or not bounds.bounded:
        return False
    with contextlib.suppress(KeyError):  # the archive is not trusted to name all sizes
        return any(excess(bounds.peak(call.sizes), call.measured) > LOOSE for call in evidence.calls)
    return False


def _activations(
    variant: Variant, bounds: Bounds | None, goldens: Sequence[Golden], *, recorded: bool
) -> Callable[[int], int]:
    """Return the planned bytes of a call, by its samples: the recorded ones, or else by the graph's bounds.

    Other dimensions have the sizes of the goldens. Without both, nothing is planned.
    """
    signature = variant.signature
    if recorded and (plan := variant.serving.evidence.memory) is not None:
        return plan.at
    if bounds is None or not bounds.bounded or not goldens:
        return lambda samples: 0
    sizes = tensors.check_inputs(signature, goldens[0].inputs)
    batch = signature.batch
    return lambda samples: bounds.peak(sizes if batch is None else {**sizes, batch: samples})
