"""The parts of ``serving.json`` about the origin of a variant and its measurements."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import packages_distributions, version
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ingot._version import __version__
from ingot.bounds import LOOSE, excess
from ingot.errors import InvalidArgument
from ingot.report import units

# Archives may come from anyone, and measurements are used in computations: bound these numbers.
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of items."""
Number = Annotated[float, Field(gt=-1e150, lt=1e150)]
"""A measured value."""
Seconds = Annotated[float, Field(gt=1e-12, lt=1e9)]
"""A duration: more than a picosecond, and less than some years."""
Share = Annotated[float, Field(ge=0, lt=1e9)]
"""A part of a whole; it may exceed 1."""


class Record(BaseModel):
    """Documents of Ingot: snake_case; unknown fields of the same schema version are ignored."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore")


class ParityEvidence(Record):
    """The largest error of an output compared with its source, relative to the output's largest value."""

    tensor: str
    error: float
    tolerance: float
    cases: Count


class BatchLatency(Record):
    """The median time of one engine call at a batch size.

    ``cpu`` is the median CPU time of all threads of the process; None if unknown. ``spread`` is the uncertainty of the
    ratio to the model that was timed in turn, as a share: with 0.05 the 95 % interval reaches from 1 / 1.05 to 1.05
    times the ratio. ``disturbed`` states that other programs made the wall-clock times scatter, so that the ratio, and
    the spread, are those of CPU times.
    """

    rows: Count
    seconds: Seconds
    cpu: Seconds | None = None
    spread: Share = 0.0
    disturbed: bool = False


def speedups(baseline: Iterable[BatchLatency], latency: Iterable[BatchLatency]) -> dict[int, float]:
    """Return how many times as fast a model is as another by batch size, where both were timed."""
    before = {item.rows: item for item in baseline}
    return {item.rows: _ratio(before[item.rows], item) for item in latency if item.rows in before}


def _ratio(before: BatchLatency, after: BatchLatency) -> float:
    if after.disturbed and before.cpu is not None and after.cpu is not None:
        return before.cpu / after.cpu
    return before.seconds / after.seconds


class Agreement(Record):
    """Agreement of one output with that of the variant's origin, on the calibration data.

    ``cosine`` is the mean similarity per row, ``top1`` the share of rows with the same largest element (only for rows
    of several), ``error`` the largest difference relative to the largest value, ``sqnr`` the
    signal-to-quantization-noise ratio over all values, in dB, at most 200. None means unknown, or that the signal is
    zero.
    """

    tensor: str
    cosine: float
    error: float
    top1: float | None = None
    sqnr: float | None = None


def _finite(item: Agreement) -> Agreement:
    if not all(value is None or abs(value) < 1e150 for value in (item.cosine, item.error, item.top1, item.sqnr)):
        raise ValueError("an agreement must be of finite numbers")
    return item


OutputAgreement = Annotated[Agreement, AfterValidator(_finite)]
"""A stored agreement; values that are only measured may be infinite."""


class Interval(Record):
    """A measured value with its 95 % interval."""

    value: Number
    low: Number
    high: Number


class MetricEvidence(Record):
    """A task metric of a variant and of its origin, on the same ``rows``.

    ``drop`` is the loss, and ``budget`` the allowed loss. ``held_out`` states that these rows were not used for
    calibration; ``data`` is their digest, empty for generated inputs.
    """

    name: str
    before: Interval
    after: Interval
    drop: Interval
    budget: Number
    rows: Count
    held_out: bool = False
    data: str = ""


class CallBytes(Record):
    """The bytes of a call with these ``sizes`` of named dimensions: at most ``peak``, and those that were measured.

    ``measured`` is 0 for sizes that only illustrate the bound.
    """

    sizes: dict[str, Count]
    peak: Count = 0
    measured: Count = 0

    @property
    def excess(self) -> float:
        """How many times the measured bytes the peak is; 0 if they were not measured."""
        return excess(self.peak, self.measured)

    def __str__(self) -> str:
        sizes = ", ".join(f"{name} {size}" for name, size in self.sizes.items())
        bound = f"{units.size(self.peak)}{sizes and ' at '}{sizes}"
        if not self.excess:
            return f"up to {bound}"
        measured = units.size(self.measured)
        return f"the bound of a call's memory, {bound}, is {self.excess:.3g} times the {measured} measured"


class BoundsEvidence(Record):
    """Whether the sizes of a graph's inputs bound the work and memory of a call; see :mod:`ingot.bounds`.

    ``reasons`` say why not, and name each node; they are empty for a bounded graph, whose ``peak`` is a formula of the
    bytes that a call needs, such as ``8000 + 4096 batch``. ``calls`` are examples of it. Servers do not rely on these
    peaks: they analyse the graph, and compare the result with what was measured.
    """

    reasons: tuple[str, ...] = ()
    peak: str = ""
    calls: tuple[CallBytes, ...] = ()

    @property
    def loosest(self) -> CallBytes | None:
        """The measured call that the bound exceeds most, if by so much that servers limit nothing by the bound."""
        loose = [call for call in self.calls if call.excess > LOOSE]
        return max(loose, key=lambda call: call.excess, default=None)


class MemoryEvidence(Record):
    """The plan of a call's memory, in bytes: inputs and intermediate results, as PyTorch runs the captured graph.

    Weights come on top. Dimensions other than the batch have the sizes of the examples.
    """

    fixed: Count
    per_row: Count

    def at(self, rows: int) -> int:
        """Return the bytes for so many rows."""
        return self.fixed + self.per_row * rows


UNCONFIRMED = "no original confirms"
"""In a note on steps that are not proved."""


class StepsEvidence(Record):
    """How a model's steps compared with the original's at the export.

    ``reference`` is what they were compared with; ``items`` raw inputs had tensors that differ by at most
    ``deviation``, which is 0 if they are equal to the last bit, and ``answers`` of them final answers that differ by
    at most ``error``, with ``tolerance`` allowed, relative to an answer's largest value.
    """

    reference: str
    items: Count
    deviation: Number = 0.0
    answers: Count
    error: Number
    tolerance: Number


class TokensEvidence(Record):
    """How the greedy tokens of a decoder compared with those of ``generate()`` of transformers at the export.

    ``prompts`` of up to ``longest`` tokens had answers of ``tokens`` in all. ``gap`` is the smallest difference between
    the logits of a chosen token and of the next best one: with a gap above the error, equal tokens mean something.
    ``ties`` name the tokens that were not equal, where the gap was within the tolerance. ``rows`` is how many rows ran
    at once, whose logits differed from those of each row alone by at most ``rows_error``, relative to the largest one.
    """

    reference: str
    prompts: Count
    longest: Count
    tokens: Count
    gap: Number
    ties: tuple[str, ...] = ()
    rows: Count
    rows_error: Number


class Evidence(Record):
    """Measurements of a variant, and the machine they are from; and what its graph shows.

    ``baseline`` is the latency of the variant's origin, measured in the same run. ``holds`` is whether the requested
    accuracy budget was kept; None if none was requested. ``bounds`` is None for other formats than ONNX, and ``memory``
    where the model does not run without data. ``deviations`` are operators whose ONNX form differs from PyTorch
    within a stated bound, one line for each with its place in the code. ``tried_paddings`` are the dimensions along
    which only examples show that padding changes no output.
    """

    machine: str = ""
    parity: tuple[ParityEvidence, ...] = ()
    latency: tuple[BatchLatency, ...] = ()
    agreement: tuple[OutputAgreement, ...] = ()
    baseline: tuple[BatchLatency, ...] = ()
    holds: bool | None = None
    metric: MetricEvidence | None = None
    bounds: BoundsEvidence | None = None
    memory: MemoryEvidence | None = None
    deviations: tuple[str, ...] = ()
    tried_paddings: tuple[str, ...] = ()
    steps: StepsEvidence | None = None
    tokens: TokensEvidence | None = None

    def speedups(self) -> dict[int, float]:
        """Return the speed-up over the baseline for each batch size."""
        return speedups(self.baseline, self.latency)


def now() -> str:
    """Return the current time as in archives, in UTC and whole seconds: ``2026-01-31T12:00:00Z``.

    ``SOURCE_DATE_EPOCH`` (seconds) overrides it.

    Raises:
        InvalidArgument: that variable is not a number of seconds.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        moment = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidArgument(f"SOURCE_DATE_EPOCH is '{epoch}', not a number of seconds since 1970") from error
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


@cache
def distributions() -> Mapping[str, Sequence[str]]:
    """Return the distributions that install each package: ``onnxruntime`` may be from ``onnxruntime-gpu``.

    Reading them takes half a second of CPU time.
    """
    return packages_distributions()


UNBATCHED = "served without batching: "
"""How the note begins that says why requests must not share a batch."""


class Provenance(Record):
    """The origin of a variant."""

    source: str
    created: str
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()

    @property
    def unbatched(self) -> str:
        """Why the export found that requests must not share a batch; empty if it did not."""
        return next((note.removeprefix(UNBATCHED) for note in self.notes if note.startswith(UNBATCHED)), "")

    @classmethod
    def of(cls, source: str, packages: Iterable[str], notes: Iterable[str] = ()) -> Provenance:
        """Return a record with the current time and the installed versions of Ingot and ``packages``.

        Raises:
            InvalidArgument: see :func:`now`.
        """
        versions = {"ingot": __version__} | {name: version(name) for name in packages}
        return cls(source=source, created=now(), versions=versions, notes=tuple(notes))
