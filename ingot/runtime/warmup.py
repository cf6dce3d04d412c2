"""What is timed before a model is ready, so that its first requests are scheduled by what it really takes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ingot.errors import IngotError
from ingot.runtime.engine import Engine
from ingot.runtime.latency import Latency
from ingot.runtime.profile import repeat, zeros
from ingot.tensors import Array, Signature

# Calls at each size: one that is not counted, since it may compile or allocate, and those whose least time counts.
_CALLS = 4


def measure(
    engine: Engine, signature: Signature, examples: Sequence[Mapping[str, Array]], most: int, budget: float
) -> Latency:
    """Time an engine at 1, 2, 4... rows, as far as the budget goes; larger batches are learnt from traffic.

    Args:
        engine: the loaded model.
        signature: the model's.
        examples: valid inputs, of which the first row of the first is used; zeros if there are none.
        most: rows of the largest batch.
        budget: seconds for all of it. 0 times nothing.
    """
    end = time.perf_counter() + budget
    found: dict[int, float] = {}
    example = examples[0] if examples else zeros(signature)
    rows = 1
    while budget and rows <= most:
        inputs = repeat(signature, example, rows) if signature.batch is not None else example
        if found and time.perf_counter() + _CALLS * 2 * max(found.values()) > end:
            break
        try:
            found[rows] = _least(engine, inputs, end)
        except IngotError:
            break  # the model rejects what was made up for it
        if signature.batch is None:
            break
        rows *= 2
    return Latency(found)


def _least(engine: Engine, inputs: Mapping[str, Array], end: float) -> float:
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
