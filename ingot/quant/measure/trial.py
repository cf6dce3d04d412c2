"""Try a plan: build its model, load it, and compare its speed and outputs with the original's."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ingot.errors import IngotError
from ingot.model_store import BatchLatency, BlobFolder
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format import onnx_graph
from ingot.model_store.format.evidence import Agreement, speedups
from ingot.quant.data import ranges
from ingot.quant.data.ranges import Observation
from ingot.quant.data.samples import Samples
from ingot.quant.graph.source import Source
from ingot.quant.measure import audit
from ingot.quant.measure.limits import TimeUp
from ingot.quant.measure.runner import Runner
from ingot.quant.metric import Comparison, Metric, within
from ingot.quant.report.records import Audit
from ingot.quant.report.words import mean
from ingot.quant.schemes import plan, static
from ingot.quant.schemes.plan import EngineName, Plan
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.runtime.profiling import profile

log = logging.getLogger(__name__)

# A candidate is faster only if its speed-up exceeds the noise of timing and no batch size is clearly slower.
FASTER = 1.02
_SLOWEST = 0.9
# Seconds for each batch size and model while candidates are tried.
_TIMING = 0.15
# Models of more bytes than this should not be in memory twice.
_LARGE = 1 << 30


@dataclass(frozen=True)
class Trial:
    """The measurements of a plan.

    Attributes:
        plan: the plan.
        size: bytes of the graph and weights.
        latency: the latency by batch.
        baseline: the original's latency in the same run.
        audit: the operators that the plan's engine computes in integers.
        comparison: the metric, or None if it could not be computed.
        outputs: agreement with the original by output.
        failure: the reason why the plan has no usable model; empty if it has one.
    """

    plan: Plan
    size: int = 0
    latency: tuple[BatchLatency, ...] = ()
    baseline: tuple[BatchLatency, ...] = ()
    audit: Audit = field(default_factory=Audit)
    comparison: Comparison | None = None
    outputs: tuple[Agreement, ...] = ()
    failure: str = ""

    @property
    def speedups(self) -> dict[int, float]:
        """How many times faster than the original, by batch."""
        return speedups(self.baseline, self.latency)

    @property
    def speed(self) -> float:
        """The geometric mean of the speed-ups; 0 for a failure."""
        return mean(self.speedups.values()) or 0.0

    @property
    def faster(self) -> bool:
        """Whether it is faster than the original overall, and not clearly slower at any batch size."""
        return is_faster(self.speedups)

    @property
    def spread(self) -> float:
        """The uncertainty of the speed, as a share."""
        logs = [math.log1p(item.spread) for item in self.latency]
        return math.expm1(math.hypot(*logs) / len(logs)) if logs else 0.0

    @property
    def disturbed(self) -> bool:
        """Whether speed-ups are ratios of CPU times, since other programs made wall-clock times scatter."""
        return any(item.disturbed for item in self.latency)

    @property
    def unclear(self) -> bool:
        """Whether the timing is too uncertain to say whether it is faster."""
        spreads = {item.rows: 1 + item.spread for item in self.latency}
        best, worst = (
            {rows: value * spreads[rows] ** sign for rows, value in self.speedups.items()} for sign in (1, -1)
        )
        return is_faster(best) != is_faster(worst)

    @property
    def drop(self) -> float:
        return self.comparison.drop.value if self.comparison is not None else math.inf

    def holds(self, budget: float) -> bool:
        """Return whether the metric's drop is within a budget."""
        return within(self.drop, budget)


def is_faster(speedups: Mapping[int, float]) -> bool:
    """Return whether speed-ups by batch are a gain overall, and not a clear loss at any batch size."""
    return not slowness(speedups)


def slowness(speedups: Mapping[int, float]) -> str:
    """Return why speed-ups by batch are not a gain, in a few words; empty if they are."""
    whole = mean(speedups.values()) or 0.0
    if whole < FASTER:
        return "not faster than the original" if whole <= 1 else f"less than {FASTER}x"
    rows, least = min(speedups.items(), key=lambda item: item[1])
    return f"slower at batch {rows} ({least:.2f}x)" if least < _SLOWEST else ""


def _clear(trial: Trial) -> bool:
    return not trial.unclear


def certain(trial: Trial) -> bool:
    """Return whether the speed of a trial may be kept as evidence."""
    return not trial.unclear and profile.steady([trial.latency])


@dataclass(frozen=True)
class Built:
    """A plan's model as files."""

    blobs: BlobFolder
    graph: Descriptor
    weights: tuple[Descriptor, ...]
    engine: EngineName = "onnxruntime"
    compute: str = "f32"

    @property
    def size(self) -> int:
        return self.graph.size + sum(item.size for item in self.weights)

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for equal models on the same engine."""
        return (self.engine, self.compute, self.graph.digest, *(item.digest for item in self.weights))

    def load(self, threads: int | None = None) -> Engine:
        return load_engine(
            EngineSpec(
                self.blobs.path(self.graph), device="cpu", threads=threads, engine=self.engine, precision=self.compute
            )
        )


class TrialRunner(Runner):
    """Tries plans of one model on one set of samples.

    Args:
        source: the original.

    The other arguments are those of :class:`Runner`.
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
        self._seen: dict[str, Observation] | None = None
        self._known: dict[tuple[str, ...], Trial] = {}
        super().__init__(
            source.variant,
            lambda: load_engine(EngineSpec(source.path, device="cpu", threads=threads)),
            calibration=calibration,
            evaluation=evaluation,
            metric=metric,
            batches=batches,
            threads=threads,
            progress=progress,
            check=check,
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
        return Built(blobs, graph, weights, engine=candidate.engine, compute=candidate.compute)

    def measure(
        self, candidate: Plan, built: Built, timing: float = _TIMING, settled: Callable[[Trial], bool] = _clear
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

    def attempt(self, candidate: Plan, timing: float = _TIMING, settled: Callable[[Trial], bool] = _clear) -> Trial:
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
