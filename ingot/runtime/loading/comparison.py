"""Find the fastest of several variants, from the archive's records or by timing them now."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ingot.model_store import Evidence, Variant
from ingot.runtime.engines.decoder import step
from ingot.runtime.engines.engine import Engine
from ingot.runtime.machine import devices
from ingot.runtime.profiling import profile
from ingot.tensors import Array, Signature

Costs = Mapping[int, float]
"""Cost of one engine call by samples. Only the ratio of two variants' costs is meaningful."""

EQUAL = 1.05
"""Variants whose speeds differ by less than this factor count as equally fast."""

# Timing stops before a batch size that would take more than this multiple of the budget.
_PATIENCE = 20


def speed(costs: Costs, other: Costs) -> float:
    """Return how many times as fast the first is as the other: the geometric mean over their common batch sizes."""
    logs = [math.log(other[samples] / costs[samples]) for samples in costs if samples in other]
    return math.exp(sum(logs) / len(logs))


def describe(name: str, costs: Costs, other_name: str, other: Costs) -> str:
    """Return a comparison as text."""
    batches = ", ".join(f"batch {size}: {other[size] / costs[size]:.2f}" for size in costs if size in other)
    return f"{name} is {speed(costs, other):.2f} times as fast as {other_name} ({batches})"


def recorded(variants: Sequence[Variant]) -> dict[str, Costs] | None:
    """Return the variants' costs as recorded when they were made.

    Latencies of one run are comparable, those of different runs only roughly. If all variants were timed alongside one
    that they were made from, their speed-ups over that one are compared, otherwise the latencies themselves.

    Returns:
        Costs by variant name, at the same batch sizes for all; None if any variant was not measured on this machine.
    """
    if not all(_timed_here(variant.serving.evidence) for variant in variants):
        return None
    costs = _relative(variants) or {
        variant.name: {item.rows: item.seconds for item in variant.serving.evidence.latency} for variant in variants
    }
    common = set.intersection(*(set(item) for item in costs.values()))
    if not common:
        return None
    return {name: {samples: item[samples] for samples in sorted(common)} for name, item in costs.items()}


def measured(
    engines: Sequence[Engine], signature: Signature, example: Mapping[str, Array], limit: int, budget: float
) -> list[Costs]:
    """Time engines alternately.

    Args:
        engines: loaded engines of one signature.
        signature: the model's signature.
        example: valid inputs, whose first sample is repeated.
        limit: the largest possible batch.
        budget: seconds per engine and batch size. A batch size that would take far longer is left out, except the
            first.
    """
    costs: list[dict[int, float]] = [{} for _ in engines]
    slowest = 0.0  # seconds per sample
    for samples in dict.fromkeys(signature.max_samples(min(samples, limit)) for samples in profile.BATCHES):
        calls = 4 * len(engines)  # one to warm up, three that are timed
        if slowest * samples * calls > _PATIENCE * budget:
            break
        timed = profile.measure_together(engines, signature, example, [samples], budget)
        for item, (latency,), seconds in zip(costs, timed, _certain(timed), strict=True):
            item[latency.rows] = seconds
        slowest = max(latency.seconds for (latency,) in timed) / samples
    return list(costs)


def measured_steps(engines: Sequence[Engine], slots: int, budget: float) -> list[Costs]:
    """Time steps of decoders alternately, each of up to ``slots`` rows; ``budget`` is as for :func:`measured`."""
    costs: list[dict[int, float]] = [{} for _ in engines]
    for rows in dict.fromkeys(min(rows, slots) for rows in profile.BATCHES):
        timed = profile.measure_together(engines, step.SIGNATURE, step.example(rows), budget=budget)
        for item, latency in zip(costs, _certain(timed), strict=True):
            item[rows] = latency
    return list(costs)


def _certain(timed: Sequence[profile.Latencies]) -> list[float]:
    """Return the seconds of a call of each engine: of the processor where the machine was busy.

    On a busy machine, the ratios of CPU times are the more certain ones.
    """
    disturbed = any(latency.disturbed for (latency,) in timed)
    return [latency.cpu if disturbed and latency.cpu is not None else latency.seconds for (latency,) in timed]


def _timed_here(evidence: Evidence) -> bool:
    """Return whether latencies were recorded on this machine, with ratios that are certain enough to compare."""
    times = (*evidence.latency, *evidence.baseline)
    certain = all(1 + item.spread <= EQUAL for item in times)
    return evidence.machine == devices.describe() and bool(times) and certain


def _relative(variants: Sequence[Variant]) -> dict[str, Costs] | None:
    """Return costs relative to the variant that all others were made from, or None."""
    parents = {variant.descriptor.digest for variant in variants}
    parents.update(digest for variant in variants for digest in variant.serving.parents)
    for parent in sorted(parents):
        children = [variant for variant in variants if variant.descriptor.digest != parent]
        speedups = {item.name: item.serving.evidence.speedups() for item in children if parent in item.serving.parents}
        if len(speedups) < len(children) or not all(speedups.values()):
            continue
        costs = {name: {samples: 1 / factor for samples, factor in item.items()} for name, item in speedups.items()}
        samples = {samples for item in costs.values() for samples in item}
        return {variant.name: costs.get(variant.name, dict.fromkeys(samples, 1.0)) for variant in variants}
    return None
