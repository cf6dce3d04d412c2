"""Try plans: build the model of each, load it, and compare its speed and outputs with the original's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from ingot.errors import IngotError
from ingot.model_store import BlobFolder
from ingot.model_store.format import onnx_graph
from ingot.model_store.format.evidence import Agreement
from ingot.quant.data import ranges, variance
from ingot.quant.data.ranges import Observation
from ingot.quant.data.samples import Samples
from ingot.quant.graph.source import Source
from ingot.quant.measure import audit
from ingot.quant.measure.limits import TimeUp
from ingot.quant.measure.trial import Built, Trial, is_clear
from ingot.quant.metric import Comparison, Metric
from ingot.quant.metric.base import rows_of
from ingot.quant.report.records import Audit
from ingot.quant.schemes import plan, static
from ingot.quant.schemes.plan import Plan
from ingot.runtime import Engine, EngineSpec
from ingot.runtime.profiling import profile
from ingot.tensors import Array

log = logging.getLogger(__name__)

# Seconds for each batch size and model while candidates are tried.
_TIMING = 0.15
# Models of more bytes than this should not be in memory twice.
_LARGE = 1 << 30


class TrialRunner:
    """Tries plans of one model on one set of samples.

    Args:
        source: the original.
        calibration: the samples for calibration; None without data.
        evaluation: the samples for the metric.
        metric: the measure of accuracy.
        batches: the batch sizes that are timed.
        threads: CPU threads per call.
        progress: called with the name of each step as it begins.
        check: called between the parts of long work; an error that it raises ends the work.
    """

    def __init__(
        self,
        source: Source,
        *,
        calibration: Samples | None,
        evaluation: Samples,
        metric: Metric,
        batches: Sequence[int],
        threads: int | None,
        progress: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
    ):
        self.source = source
        self.calibration = calibration
        self.evaluation = evaluation
        self.batches = tuple(batches)
        self.threads = threads
        self.check = check
        self.example = source.timed(next(evaluation.batches(1)).inputs)
        self._metric = metric
        self._progress = progress
        self._loaded: Engine | None = None
        self._seen: dict[str, Observation] | None = None
        self._known: dict[tuple[str, ...], Trial] = {}
        progress(f"Running the original on {evaluation.rows} samples")
        self._expected = self._answers(self.original)
        # Also checks early that the metric accepts these outputs.
        self.before = metric.compare(self._expected, self._expected, evaluation).before
        self.notes = (*metric.notes(self._expected, self.before, evaluation), *self._unvaried())

    @property
    def original(self) -> Engine:
        """The original's engine, loaded on first use."""
        if self._loaded is None:
            self._loaded = self.source.open(EngineSpec(self.source.path, device="cpu", threads=self.threads))
        return self._loaded

    def close(self) -> None:
        """Free the original; it is loaded again when it is needed."""
        if self._loaded is not None:
            self._loaded.close()
            self._loaded = None

    def compare(self, engine: Engine) -> tuple[Comparison, tuple[Agreement, ...]]:
        """Return the metric of a model, and how its outputs agree with the original's.

        Raises:
            QuantizationError: its outputs have NaN or infinity where the original's do not.
        """
        answers = self._answers(engine)
        comparison = self._metric.compare(self._expected, answers, self.evaluation)
        return comparison, self.source.agreement(self._expected, answers, self.evaluation)

    def time(
        self,
        engines: Sequence[Engine],
        timing: float,
        settled: Callable[[Sequence[profile.Latencies]], bool] = profile.steady,
    ) -> list[profile.Latencies]:
        """Return the latencies by batch of engines, timed in turn until they are settled or a limit is reached."""

        def checked(found: Sequence[profile.Latencies]) -> bool:
            self.check()
            return settled(found)

        return profile.measure_together(
            engines, self.source.signature, self.example, self.batches, timing, settled=checked
        )

    @property
    def large(self) -> bool:
        """Whether the model is too large to be in memory twice."""
        return self.source.variant.size > _LARGE

    def _make_room(self) -> None:
        """Free a large original while another model is built from it."""
        if self.large:
            self.close()

    @property
    def seen(self) -> Mapping[str, Observation]:
        """The values of activations on the calibration data, observed on first use."""
        if self._seen is None:
            self._seen = self._observe() if self.calibration is not None else {}
        return self._seen

    def build(self, candidate: Plan, blobs: BlobFolder, *, link: bool = True) -> Built:
        """Build the model of a plan.

        Args:
            candidate: the plan.
            blobs: the folder for its files.
            link: link large weights that do not change. While the links exist, no other model can be built: onnx_ir
                refuses files with several links.

        Raises:
            QuantizationError: the plan quantizes nothing.
        """
        seen = self.seen if candidate.needs_data else {}
        self._make_room()
        model = plan.make(self.source, candidate, seen)
        graph, weights = onnx_graph.pack(model, blobs, self.source.blobs if link else None)
        return Built(blobs, graph, weights, engine=candidate.engine, compute=candidate.compute, open=self.source.open)

    def measure(
        self, candidate: Plan, built: Built, timing: float = _TIMING, settled: Callable[[Trial], bool] = is_clear
    ) -> Trial:
        """Compare the speed and outputs of a plan's model with the original's.

        It is timed again while it is not ``settled``, for ``timing`` seconds per batch size and model each time.

        Raises:
            IngotError: the plan's engine cannot load or run it, or its outputs are unusable.
        """
        self.check()
        with contextlib.closing(built.load(self.threads)) as engine:
            self.check()
            baseline, latency = self.time(
                [self.original, engine],
                timing,
                lambda found: settled(Trial(plan=candidate, baseline=found[0], latency=found[1])),
            )
            comparison, outputs = self.compare(engine)
        return Trial(
            plan=candidate,
            size=built.size,
            latency=latency,
            baseline=baseline,
            audit=audit.audit(built.blobs.path(built.graph), built.engine) if candidate.schemes else Audit(),
            comparison=comparison,
            outputs=outputs,
        )

    def attempt(self, candidate: Plan, timing: float = _TIMING, settled: Callable[[Trial], bool] = is_clear) -> Trial:
        """Build and measure a plan; one that cannot run yields a trial with a failure.

        The arguments are those of :meth:`measure`.
        """
        try:
            built = self.build(candidate, BlobFolder.scratch())
            # Two plans may yield the same model, for instance if there is nothing between its layers.
            same = self._known.get(built.key)
            if same is not None:
                return replace(same, plan=candidate)
            trial = self.measure(candidate, built, timing, settled)
        except TimeUp:
            raise
        except IngotError as error:
            return Trial(plan=candidate, failure=str(error))
        except Exception as error:  # onnx_ir and engines raise any error for odd graphs, which must not end the search
            log.debug("candidate '%s' failed", candidate.name, exc_info=True)
            return Trial(plan=candidate, failure=f"it cannot be built: {type(error).__name__}: {error}")
        self._known[built.key] = trial
        return trial

    def time_again(
        self, trials: Sequence[Trial], timing: float, settled: Callable[[Sequence[Trial]], bool]
    ) -> list[Trial]:
        """Return trials with new latencies, timed in turn with each other and the original until they are settled."""

        def timed(found: Sequence[profile.Latencies]) -> list[Trial]:
            baseline, *others = found
            return [replace(trial, latency=item, baseline=baseline) for trial, item in zip(trials, others, strict=True)]

        built = [self.build(trial.plan, BlobFolder.scratch(), link=len(trials) == 1) for trial in trials]
        with contextlib.ExitStack() as stack:
            engines = [stack.enter_context(contextlib.closing(item.load(self.threads))) for item in built]
            return timed(self.time([self.original, *engines], timing, lambda found: settled(timed(found))))

    def _observe(self) -> dict[str, Observation]:
        if self.calibration is None:
            return {}
        rows = self.calibration.rows
        self._make_room()
        self._progress(f"Calibrating on {rows} samples")
        model = self.source.model()
        names = set(plan.fitting(self.source, "static"))
        layers = [layer for name, layer in self.source.by_name(model).items() if name in names]
        return ranges.observe(
            model,
            static.watched(model, layers),
            static.contracted(layers),
            self.calibration,
            self.source.blobs,
            self._calibrated,
        )

    def _calibrated(self, done: int, total: int) -> None:
        self.check()
        self._progress(f"Calibrating: {done} of {total} samples")

    def _unvaried(self) -> Iterator[str]:
        """Yield notes on outputs of the original that are the same for all rows."""
        if self.evaluation.rows < 2:
            return
        for spec in self.source.signature.outputs:
            if variance.equal_rows(rows_of(self._expected, spec.name, self.source.signature)):
                yield f"the original's output '{spec.name}' is the same for all rows: its accuracy is not tested"

    def _answers(self, engine: Engine) -> list[dict[str, Array]]:
        answers = []
        for batch in self.evaluation.batches():
            self.check()
            answers.append(engine.run(batch.inputs))
        return answers
