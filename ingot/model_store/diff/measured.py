"""Measurements of two variants next to each other: accuracy, agreement, parity, latency and goldens."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

from ingot.model_store.diff.records import GoldenChange, LatencyChange, Measure
from ingot.model_store.format.evidence import Evidence
from ingot.model_store.format.goldens import Golden
from ingot.report.text import one_line
from ingot.tensors import Array, DType, arrays


def measures(before: Evidence, after: Evidence) -> Iterator[Measure]:
    """Yield the accuracy measurements of either variant."""
    first, second = dict(_numbers(before)), dict(_numbers(after))
    for what in dict.fromkeys((*first, *second)):
        yield Measure(what=what, before=first.get(what), after=second.get(what))


def latencies(before: Evidence, after: Evidence) -> Iterator[LatencyChange]:
    """Yield the duration of a call by batch size."""
    first, second = ({item.rows: item.seconds for item in evidence.latency} for evidence in (before, after))
    for rows in sorted({*first, *second}):
        yield LatencyChange(rows=rows, before=first.get(rows), after=second.get(rows))


def doubts(before: Evidence, after: Evidence) -> Iterator[str]:
    """Yield reasons why the measurements may not be comparable."""
    if before.latency and after.latency and before.machine != after.machine:
        machines = " and on ".join(f"'{one_line(item.machine)}'" for item in (before, after))
        yield f"the latencies were measured on {machines}: their ratio includes the difference between the machines"
    one, other = before.metric, after.metric
    if one is not None and other is not None:
        if one.name != other.name:
            yield "the metrics are not the same"
        elif (one.data, one.rows) != (other.data, other.rows):
            yield "the metric was not measured on the same data"


def goldens(before: Sequence[Golden], after: Sequence[Golden]) -> tuple[int, list[GoldenChange]]:
    """Return the number of golden cases with equal inputs, and how much their outputs differ."""
    answers = {_key(case.inputs): case.outputs for case in after}
    worst: dict[str, float] = {}
    count = 0
    for case in before:
        other = answers.get(_key(case.inputs))
        if other is None:
            continue
        count += 1
        for name in case.outputs.keys() & other.keys():
            difference = arrays.departure(case.outputs[name], other[name])
            worst[name] = max(worst.get(name, 0.0), difference)
    changes = [GoldenChange(tensor=name, difference=_finite(worst[name])) for name in sorted(worst)]
    return count, changes


def _key(inputs: Mapping[str, Array]) -> bytes:
    sha = hashlib.sha256()
    for name in sorted(inputs):
        array = inputs[name]
        sha.update(repr((name, DType.of(array).value, array.shape)).encode())
        sha.update(arrays.to_bytes(array))
    return sha.digest()


def _numbers(evidence: Evidence) -> Iterator[tuple[str, float | None]]:
    metric = evidence.metric
    if metric is not None:
        yield metric.name, metric.after.value
        yield f"{metric.name} of its original", metric.before.value
        yield f"{metric.name}: drop", metric.drop.value
    for item in evidence.agreement:
        for what, value in (
            ("cosine to its original", item.cosine),
            ("largest error against its original", item.error),
            ("SQNR in dB", item.sqnr),
            ("same top class", item.top1),
        ):
            if value is not None:
                yield f"{item.tensor}: {what}", _finite(value)
    for parity in evidence.parity:
        yield f"{parity.tensor}: error of the export", _finite(parity.error)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
