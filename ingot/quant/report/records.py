"""The quantization report: what was tried, measured and chosen, and why. It travels in the archive."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, computed_field

from ingot.model_store.format.evidence import BatchLatency, Count, Number, OutputAgreement

DOCUMENT = "quantization.json"
"""The name of the report in an archive."""

Verdict = Literal["quantized", "nothing faster", "budget broken"]
"""Whether a quantization gave a new variant, and if not, why."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Interval(Protocol):
    @property
    def value(self) -> float: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...


class Score(_Record):
    """A metric's value and its 95 % interval."""

    value: Number
    low: Number
    high: Number

    @classmethod
    def of(cls, score: _Interval) -> Score | None:
        """Return the record of a :class:`ingot.quant.metric.Score`, or None of one that has no value."""
        if not math.isfinite(score.value):
            return None
        low, high = (bound if math.isfinite(bound) else score.value for bound in (score.low, score.high))
        return cls(value=score.value, low=low, high=high)


class DataRecord(_Record):
    """What data was used.

    Attributes:
        digest: ``sha256:...`` over names, types, shapes and values; empty if the inputs were generated.
        source: where it came from, such as ``digits.npz``.
        calibration_rows: how many rows the ranges were learnt from.
        evaluation_rows: how many rows the metric was taken of.
        held_out: whether none of the latter is among the former.
    """

    digest: str = ""
    source: str = ""
    calibration_rows: Count = 0
    evaluation_rows: Count = 0
    held_out: bool = False


class Candidate(_Record):
    """One recipe that was tried.

    Attributes:
        name: what it is called in tables and plots, such as ``static int8``.
        recipe: its configuration.
        size: bytes of its graph and weights.
        latency: the median time of a call by batch.
        speedups: by batch, how many times faster than the original, timed in turn with it.
        score: the metric.
        drop: by how much it is worse than the original.
        holds: whether the drop is within the budget.
        chosen: whether it is the result.
        rejected: why it cannot be; empty for one that is within the budget and faster than the original.
        remark: why it is not, though its speed-up is higher than the chosen one's.
    """

    name: str
    recipe: dict[str, Any] = {}
    size: Count = 0
    latency: tuple[BatchLatency, ...] = ()
    speedups: dict[Count, Number] = {}
    score: Score | None = None
    drop: Score | None = None
    holds: bool = False
    chosen: bool = False
    rejected: str = ""
    remark: str = ""


class Layer(_Record):
    """One layer of the model, in the graph's order.

    Attributes:
        name: the layer's, as the user's model calls it.
        operator: its operator, such as ``Conv``.
        scheme: how the chosen candidate computes it: ``static int8``, ``dynamic int8``, ``float`` and so on.
        sqnr: signal to quantization noise in dB, of this layer's output when it alone is quantized.
        low: the smallest value that its input was seen to have.
        high: the largest.
        clipped: the share of its input's values that lie outside the quantized range.
        rank: 1 for the layer that hurts the metric most, and so on.
    """

    name: str
    operator: str
    scheme: str
    sqnr: Number | None = None
    low: Number | None = None
    high: Number | None = None
    clipped: Number | None = None
    rank: Count | None = None


class Audit(_Record):
    """What the engine made of the chosen model.

    Attributes:
        quantized: the integer operators of the optimized graph, by the engine's names, and how often each stands in it.
        floats: the float operators that were left between quantized ones, such as ``Conv layer1.0.conv1``; known of
            ONNX Runtime alone.
    """

    quantized: dict[str, Count] = {}
    floats: tuple[str, ...] = ()


class Report(_Record):
    """Everything that a quantization did.

    Attributes:
        model: the archive's name.
        variant: the variant that this report is of.
        verdict: whether there is such a variant, and if not, why.
        reason: the verdict in words; of a variant that was forced, what is wrong with it.
        created: when, in ISO 8601.
        machine: where it was measured.
        versions: those of the packages that took part.
        data: what data was used.
        metric: the metric's name.
        budget: the largest drop that was allowed.
        before: the original's score.
        after: the chosen candidate's score.
        drop: by how much the latter is worse, from the same rows for both.
        threads: how many CPU threads a call had; 0 if that is not known.
        size: bytes of the original's graph and weights; 0 if that is not known.
        baseline: the original's latency by batch.
        candidates: all that was tried, in that order.
        layers: the chosen candidate's, in the graph's order.
        audit: what is integer and what is not in the optimized graph.
        outputs: how each output agrees with the original's.
        notes: what else should be known.
    """

    schema_version: Literal[1] = 1
    model: str
    variant: str = ""
    verdict: Verdict = "quantized"  # so it is of the older reports, which lack it: they lie in archives
    reason: str = ""
    created: str = ""
    machine: str = ""
    versions: dict[str, str] = {}
    data: DataRecord = DataRecord()
    metric: str = ""
    budget: Number = 0.0
    before: Score | None = None
    after: Score | None = None
    drop: Score | None = None
    threads: Count = 0
    size: Count = 0
    baseline: tuple[BatchLatency, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    layers: tuple[Layer, ...] = ()
    audit: Audit | None = None
    outputs: tuple[OutputAgreement, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that became the result, or None if the model was left as it was."""
        return next((item for item in self.candidates if item.chosen), None)


class Side(_Record):
    """One of two compared models.

    Attributes:
        archive: how the user named it.
        variant: the variant that was run.
        format: what kind of file that is, such as ``onnx``.
        digest: the digest of its manifest.
        size: bytes of its graph and weights.
        latency: the median time of a call by batch, timed in turn with the other.
    """

    archive: str
    variant: str
    format: str = ""
    digest: str = ""
    size: Count = 0
    latency: tuple[BatchLatency, ...] = ()

    @property
    def label(self) -> str:
        """The archive and the variant in one."""
        return f"{self.archive}#{self.variant}"


class ModelComparison(_Record):
    """Two models with the same inputs and outputs, asked the same; see :func:`ingot.quant.measure.comparison.compare`.

    Attributes:
        model: the first archive's name.
        before: the model that the other is compared with.
        after: the other.
        data: what both were asked; ``evaluation_rows`` says how much of it.
        goldens: whether that was not the user's data but the archive's golden inputs.
        metric: the metric's name.
        score_before: the metric of the first.
        score_after: the metric of the other.
        drop: by how much the other is worse, from the same rows for both.
        outputs: how each floating-point output of the other agrees with the first's.
        threads: how many CPU threads a call had; 0 for as many as there are.
        machine: where it was measured.
        created: when, in ISO 8601.
        versions: those of the packages that took part.
        notes: what else should be known.
    """

    schema_version: Literal[1] = 1
    model: str
    before: Side
    after: Side
    data: DataRecord = DataRecord()
    goldens: bool = False
    metric: str = ""
    score_before: Score | None = None
    score_after: Score | None = None
    drop: Score | None = None
    outputs: tuple[OutputAgreement, ...] = ()
    threads: Count = 0
    machine: str = ""
    created: str = ""
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def speedups(self) -> dict[int, float]:
        """How many times faster than the first the other is, by batch."""
        first = {item.rows: item.seconds for item in self.before.latency}
        return {item.rows: first[item.rows] / item.seconds for item in self.after.latency if item.rows in first}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def size_ratio(self) -> float:
        """The other's size as a share of the first's."""
        return self.after.size / self.before.size if self.before.size else 1.0
