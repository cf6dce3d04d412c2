"""One form of a model that can be run: how its engine is opened, and what that must answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from ingot import arrays
from ingot.errors import InternalError
from ingot.model_store import Golden, Variant
from ingot.padding import Padding
from ingot.runtime.engine import Engine
from ingot.runtime.loading import warmup
from ingot.runtime.loading.engine_swap import EngineSwap
from ingot.runtime.loading.loader import engine_of, load_engine, precision_of
from ingot.runtime.loading.prepacked import Prepacked
from ingot.runtime.loading.threads import Tuned, tune
from ingot.runtime.profile import zeros
from ingot.runtime.settings import Settings
from ingot.tensors import Signature

OpenEngine = Callable[[str, int], Engine]


@dataclass(frozen=True)
class Runnable:
    """One form of a model.

    ``open`` makes one engine, given the device and its number of CPU threads. ``goldens`` are cases that must come out
    as stored before the model is ready, but for ``tolerance``; see :func:`ingot.arrays.departure`. ``variant`` is what
    the archive calls it. ``batchable`` tells whether requests may be joined, if the signature allows it. ``prepacked`` says
    how it is opened by way of the derived cache, if it is. ``padding`` tells how its inputs may be padded, and
    ``latency`` what was recorded of it on this machine.
    """

    open: OpenEngine
    goldens: Sequence[Golden] = ()
    _: KW_ONLY
    tolerance: float = 1e-3
    variant: str = ""
    batchable: bool = True
    prepacked: Prepacked | None = None
    padding: Mapping[str, Padding] = field(default_factory=dict)
    latency: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path) -> Runnable:
        """Return the form that a bare ``.onnx`` file is."""
        return cls(lambda device, threads: load_engine(path, device=device, threads=threads))

    @classmethod
    def of_variant(cls, variant: Variant, settings: Settings) -> Runnable:
        """Return the form that an archive's variant is, whose blobs are files.

        Raises:
            InvalidArchive: its goldens are damaged.
        """
        return cls(
            # The closure holds the variant, and so the temporary folder that an archive file was unpacked to.
            lambda device, threads: load_engine(
                variant.path(),
                format=variant.serving.format,
                device=device,
                threads=threads,
                allow_code=settings.allow_code,
                ort_library=settings.ort_library,
                engine=engine_of(variant),
                precision=precision_of(variant),
            ),
            variant.goldens(),
            tolerance=variant.serving.golden_tolerance,
            variant=variant.name,
            batchable=variant.serving.batchable,
            prepacked=Prepacked.of_variant(variant, settings),
            padding=variant.serving.padding,
            # It was recorded with all cores for one call.
            latency=warmup.recorded(variant.serving.evidence) if settings.instances == 1 else {},
        )

    def start(self, device: str, threads: int, model: str) -> tuple[Engine, bool]:
        """Open the engine that is ready soonest; return it and whether it has answered the goldens.

        One that has may be slow with batches, until :class:`~ingot.runtime.loading.engine_swap.EngineSwap` replaces it.
        """
        if self.prepacked is not None:
            early = self.prepacked.open_early(threads, lambda engine: self.test(engine, model))
            if early is not None:
                return early, True
        return self.open(device, threads), False

    def tune(self, engine: Engine, settings: Settings, signature: Signature) -> Tuned:
        """Return an engine of this form with as many CPU threads as pay, in place of one that has all.

        Raises:
            IngotError: the form cannot be opened again.
        """
        if settings.engine_threads is not None:
            return Tuned(engine, settings.threads, "as was asked for")
        if settings.threads == 1:
            return Tuned(engine, 1, "an instance has one core")
        loaded = getattr(engine, "loaded", None)
        if loaded is None or engine.device != "cpu" or self.prepacked is not None:
            return Tuned(engine, settings.threads, "one for each of an instance's cores; not measured")
        example = self.goldens[0].inputs if self.goldens else zeros(signature)
        return tune(
            engine, settings.threads, loaded, signature, example, lambda count: self.open(settings.device, count)
        )

    def engine_swap(
        self, engines: Sequence[Engine], threads: int, model: str, done: Callable[[str], None]
    ) -> EngineSwap | None:
        """Return what replaces engines at work by such as share memory, not started; None if nothing is to."""
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
        """Replay the goldens.

        Raises:
            InternalError: the engine answers otherwise; ``model`` is what the message calls it.
        """
        for case, golden in enumerate(self.goldens):
            output, error = arrays.worst_error(golden.outputs, engine.run(golden.inputs))
            if error > self.tolerance:
                raise InternalError(
                    f"model '{model}' does not answer as it did when it was exported: output '{output}' of golden "
                    f"case {case} departs by {error:.2e}, tolerance {self.tolerance:.0e}; this machine or its engine "
                    "computes something else, so it is not served"
                )
