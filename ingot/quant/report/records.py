"""The records of a quantization report: candidates, measurements, and the choice. They are stored in the archive."""

from __future__ import annotations

import math
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, computed_field

from ingot.model_store.format.evidence import BatchLatency, Count, Number, OutputAgreement, speedups

DOCUMENT = "quantization.json"
"""The name of the report in an archive."""

Verdict = Literal["quantized", "nothing faster", "budget broken"]
"""Whether a quantization yielded a new variant, and the reason if not."""


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
        """Return the record of a :class:`ingot.quant.metric.Score`, or None if it has no value."""
        if not math.isfinite(score.value):
            return None
        low, high = (bound if math.isfinite(bound) else score.value for bound in (score.low, score.high))
        return cls(value=score.value, low=low, high=high)


class DataRecord(_Record):
    """The data of a quantization.

    Attributes:
        digest: ``sha256:...`` over names, types, shapes and values; empty for generated inputs.
        source: its name, such as ``digits.npz``.
        calibration_rows: the number of rows for calibration.
        evaluation_rows: the number of rows for the metric.
        held_out: whether the two sets are disjoint.
    """

    digest: str = ""
    source: str = ""
    calibration_rows: Count = 0
    evaluation_rows: Count = 0
    held_out: bool = False


class Candidate(_Record):
    """One candidate of the search.

    Attributes:
        name: its name in tables and charts, such as ``static int8``.
        recipe: its configuration.
        size: bytes of its graph and weights.
        latency: the median time of a call by batch.
        speedups: the speed-up by batch over the original, timed in turn with it.
        score: the metric.
        drop: the drop of the metric from the original.
        holds: whether the drop is within the budget.
        chosen: whether it is the result.
        rejected: the reason why it cannot be chosen; empty if it is within the budget and faster than the original.
        remark: the reason why it was not chosen despite a higher speed-up than the chosen one.
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

    @property
    def accepted(self) -> bool:
        """Whether it could be chosen: it is within the budget, and faster than the original; or it was chosen."""
        return self.chosen or (self.holds and not self.rejected)


class Layer(_Record):
    """One layer of the model, in the graph's order.

    Attributes:
        name: the layer's, as the user's model calls it.
        operator: its operator, such as ``Conv``.
        scheme: the chosen candidate's scheme for it: ``static int8``, ``dynamic int8``, ``float`` and so on.
        sqnr: signal to quantization noise in dB, of this layer's output when it alone is quantized.
        low: the smallest observed value of its input.
        high: the largest observed value of its input.
        clipped: the share of its input's values outside the quantized range.
        rank: its position by damage to the metric, from 1 for the most.
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
    """The operators of the chosen model in the engine.

    Attributes:
        quantized: the integer operators of the optimized graph, by the engine's names, with the number of each.
        floats: the float operators that were left between quantized ones, such as ``Conv layer1.0.conv1``; only known
            for ONNX Runtime.
    """

    quantized: dict[str, Count] = {}
    floats: tuple[str, ...] = ()


class Report(_Record):
    """A quantization.

    Attributes:
        model: the archive's name.
        variant: the new variant's name.
        verdict: whether there is a new variant, and the reason if not.
        reason: the verdict in words; for a forced variant, its faults.
        created: the time in ISO 8601.
        machine: the machine of the measurements.
        versions: the versions of the packages involved.
        data: the data.
        metric: the metric's name.
        budget: the largest drop that was allowed.
        before: the original's score.
        after: the chosen candidate's score.
        drop: the drop between the two, on the same rows.
        threads: how many CPU threads a call had; 0 if that is not known.
        size: bytes of the original's graph and weights; 0 if that is not known.
        baseline: the original's latency by batch.
        candidates: all candidates, in the order of the search.
        layers: the chosen candidate's, in the graph's order.
        audit: the integer and float operators of the optimized graph.
        outputs: the agreement of each output with the original's.
        notes: remarks.
    """

    schema_version: Literal[1] = 1
    model: str
    variant: str = ""
    verdict: Verdict = "quantized"  # the default for older reports in archives, which lack it
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
        archive: the user's name of it.
        variant: the variant that was run.
        format: the variant's format, such as ``onnx``.
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
    """Two models with the same inputs and outputs, run on the same data by :func:`ingot.quant.compare`.

    Attributes:
        model: the first archive's name.
        before: the model that the other is compared with.
        after: the other.
        data: the data.
        goldens: whether the data is the archive's golden inputs instead of the user's.
        metric: the metric's name.
        score_before: the metric of the first.
        score_after: the metric of the other.
        drop: the drop between the two, on the same rows.
        outputs: the agreement of each floating-point output with the first's.
        threads: how many CPU threads a call had; 0 for as many as there are.
        machine: the machine of the measurements.
        created: the time in ISO 8601.
        versions: the versions of the packages involved.
        notes: remarks.
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
        """The speed-up of the other over the first, by batch."""
        return speedups(self.before.latency, self.after.latency)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def size_ratio(self) -> float:
        """The other's size as a share of the first's."""
        return self.after.size / self.before.size if self.before.size else 1.0
