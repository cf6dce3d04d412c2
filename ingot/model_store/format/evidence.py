"""What ``serving.json`` says of how a variant was made, and of what was measured of it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ingot._version import __version__
from ingot.errors import InvalidArgument

# An archive may come from anybody, and what was measured is computed with: such numbers are finite and bounded.
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
"""A number of things."""
Number = Annotated[float, Field(gt=-1e150, lt=1e150)]
"""A measured value."""
Seconds = Annotated[float, Field(gt=1e-12, lt=1e9)]
"""How long something took: more than a picosecond, and less than some years."""


class Record(BaseModel):
    """Our own documents: snake_case, unknown fields of the same schema version ignored."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore")


class ParityEvidence(Record):
    """The worst error seen when an output was compared with its source, as a share of the output's largest value."""

    tensor: str
    error: float
    tolerance: float
    cases: Count


class BatchLatency(Record):
    """The median time of one engine call at a batch size."""

    rows: Count
    seconds: Seconds


class Agreement(Record):
    """How one output agrees with that of the variant it was made from, on the calibration data.

    ``cosine`` is the mean similarity by row, ``top1`` the share of rows whose largest element is the same one (only for
    rows of several), ``error`` the largest difference as a share of the largest value, ``sqnr`` the signal to
    quantization noise over all values, in dB, at most 200; None where that is unknown or the signal is zero.
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
"""One that is kept: what is only measured may be infinite."""


class Interval(Record):
    """A measured value and its 95 % interval."""

    value: Number
    low: Number
    high: Number


class MetricEvidence(Record):
    """A task metric of a variant and of the one that it was made from, on the same ``rows``.

    ``drop`` is by how much it is worse, and ``budget`` what was allowed. ``held_out`` tells that nothing was learnt
    from those rows; ``data`` is their digest, empty where inputs were generated.
    """

    name: str
    before: Interval
    after: Interval
    drop: Interval
    budget: Number
    rows: Count
    held_out: bool = False
    data: str = ""


class Evidence(Record):
    """What was measured about a variant, and on which machine.

    ``baseline`` is the latency of the variant that it was made from, measured in the same run. ``holds`` tells whether
    the accuracy budget was kept that was asked for when it was made; None: none was asked for.
    """

    machine: str = ""
    parity: tuple[ParityEvidence, ...] = ()
    latency: tuple[BatchLatency, ...] = ()
    agreement: tuple[OutputAgreement, ...] = ()
    baseline: tuple[BatchLatency, ...] = ()
    holds: bool | None = None
    metric: MetricEvidence | None = None

    def speedups(self) -> dict[int, float]:
        """Return how many times faster than the baseline each batch size is."""
        before = {item.rows: item.seconds for item in self.baseline}
        return {item.rows: before[item.rows] / item.seconds for item in self.latency if item.rows in before}


def now() -> str:
    """Return this moment as archives write it, in UTC and whole seconds: ``2026-01-31T12:00:00Z``.

    ``SOURCE_DATE_EPOCH`` (seconds) sets another.

    Raises:
        InvalidArgument: that variable is not a number of seconds.
    """
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        moment = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise InvalidArgument(f"SOURCE_DATE_EPOCH is '{epoch}', not a number of seconds since 1970") from error
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")


class Provenance(Record):
    """Where a variant came from."""

    source: str
    created: str
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: str, packages: Iterable[str], notes: Iterable[str] = ()) -> Provenance:
        """Return a record of this moment and of the installed versions of Ingot and ``packages``.

        Raises:
            InvalidArgument: see :func:`now`.
        """
        versions = {"ingot": __version__} | {name: version(name) for name in packages}
        return cls(source=source, created=now(), versions=versions, notes=tuple(notes))
