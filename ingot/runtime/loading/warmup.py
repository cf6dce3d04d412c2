"""Timing of a model before it is ready, so that its first requests are scheduled with realistic estimates."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ingot.errors import IngotError
from ingot.model_store import Evidence
from ingot.runtime.engines.engine import Engine
from ingot.runtime.machine import devices
from ingot.runtime.profiling.profile import repeat, zeros
from ingot.runtime.scheduling.entry import size_of
from ingot.runtime.scheduling.latency_model import Latency
from ingot.tensors import Array, Signature

# Calls per size: one that is not counted, since it may compile or allocate, and those whose minimum counts.
_CALLS = 4
# A record within this factor of the current duration is trusted.
_SAME = 1.5
# Archives may come from anyone: bound their numbers.
_MOST_RECORDED = 1 << 20


def recorded(evidence: Evidence) -> dict[int, float]:
    """Return recorded call durations in seconds by samples; empty if they were not recorded on this machine.

    The durations were measured on the CPU, with all cores for one call.
    """
    if evidence.machine != devices.describe():
        return {}
    return {item.rows: item.seconds for item in evidence.latency if 0 < item.rows <= _MOST_RECORDED}


def sample_bytes(signature: Signature, examples: Sequence[Mapping[str, Array]]) -> int:
    """Return the bytes of one sample of the inputs that :func:`measure` uses."""
    example = examples[0] if examples else zeros(signature)
    sample = repeat(signature, example, 1) if signature.batch is not None else example
    return sum(size_of(array) for array in sample.values())


def measure(
    engine: Engine,
    signature: Signature,
    examples: Sequence[Mapping[str, Array]],
    most: int,
    budget: float,
    known: Mapping[int, float] | None = None,
) -> Latency:
    """Time an engine at 1, 2, 4... samples as far as the budget allows; larger batches are learned from traffic.

    Recorded durations are trusted if one sample takes about as long now.

    Args:
        engine: the loaded model.
        signature: the model's signature.
        examples: valid inputs, whose very first sample is used; zeros if empty.
        most: samples of the largest batch.
        budget: seconds in total; 0 measures nothing.
        known: recorded durations by samples, see :func:`recorded`.

    Returns:
        The durations of calls by samples; empty if the model rejects the inputs, or nothing was measured.
    """
    if known and not budget:
        return Latency(known)
    end = time.perf_counter() + budget
    found: dict[int, float] = {}
    example = examples[0] if examples else zeros(signature)
    samples = 1
    while budget and samples <= most:
        inputs = repeat(signature, example, samples) if signature.batch is not None else example
        if found and time.perf_counter() + _CALLS * 2 * max(found.values()) > end:
            break
        try:
            found[samples] = _least(engine, inputs, end)
        except IngotError:
            break  # the model rejects the generated inputs
        if known and samples == 1 and _SAME > found[1] / Latency(known)(1) > 1 / _SAME:
            return Latency({**known, 1: found[1]})
        if signature.batch is None:
            break
        samples *= 2
    return Latency(found)


def _least(engine: Engine, inputs: Mapping[str, Array], end: float) -> float:
    """Return the seconds of the fastest call, without the first one unless that ends after ``end``."""
    times = []
    for call in range(_CALLS):
        start = time.perf_counter()
        engine.run(inputs)
        now = time.perf_counter()
        if call or now > end:
            times.append(now - start)
        if now > end:
            break
    return min(times)
