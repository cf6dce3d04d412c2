"""The measurements of a plan, and what they say of its speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ingot.model_store import BatchLatency, BlobFolder
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format.evidence import Agreement, speedups
from ingot.quant.metric import Comparison, within
from ingot.quant.report.records import Audit
from ingot.quant.report.words import mean
from ingot.quant.schemes.plan import EngineName, Plan
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.runtime.profiling import profile

# A candidate is faster only if its speed-up exceeds the noise of timing and no batch size is clearly slower.
FASTER = 1.02
_SLOWEST = 0.9


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


def is_clear(trial: Trial) -> bool:
    """Return whether a trial shows if its plan is faster."""
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
    open: Callable[[EngineSpec], Engine] = load_engine

    @property
    def size(self) -> int:
        return self.graph.size + sum(item.size for item in self.weights)

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for equal models on the same engine."""
        return (self.engine, self.compute, self.graph.digest, *(item.digest for item in self.weights))

    def spec(self, threads: int | None = None) -> EngineSpec:
        """Return how its engine opens it."""
        path = self.blobs.path(self.graph)
        return EngineSpec(path, device="cpu", threads=threads, engine=self.engine, precision=self.compute)

    def load(self, threads: int | None = None) -> Engine:
        return self.open(self.spec(threads))
