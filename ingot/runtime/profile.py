"""The latency-by-batch profile: how long one engine call takes, by rows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from statistics import median

import numpy as np

from ingot.model_store import BatchLatency
from ingot.runtime.engine import Engine
from ingot.tensors import Array, Signature

BATCHES = (1, 8, 32)


def measure(
    engine: Engine,
    signature: Signature,
    example: Mapping[str, Array],
    batches: Iterable[int] = BATCHES,
    budget: float = 0.3,
) -> tuple[BatchLatency, ...]:
    """Time an engine at several batch sizes.

    Args:
        engine: the loaded model.
        signature: says along which axis rows are repeated; a model without a batch is timed as it is.
        example: valid inputs; their first row is repeated.
        batches: the row counts; those over the signature's range become its upper end.
        budget: seconds for each batch size, after one call that is not counted. At least three calls are timed.
    """
    if signature.batch is None:
        return (_time(engine, example, 1, budget),)
    allowed = dict.fromkeys(signature.max_rows(rows) for rows in batches)
    return tuple(_time(engine, repeat(signature, example, rows), rows, budget) for rows in allowed)


def repeat(signature: Signature, example: Mapping[str, Array], rows: int) -> dict[str, Array]:
    """Return inputs of ``rows`` rows, each the example's first."""
    axes = signature.batch_axes(signature.inputs)
    return {
        name: np.repeat(array.take([0], axes[name]), rows, axes[name]) if name in axes else array
        for name, array in example.items()
    }


def _time(engine: Engine, inputs: Mapping[str, Array], rows: int, budget: float) -> BatchLatency:
    engine.run(inputs)
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        engine.run(inputs)
        times.append(time.perf_counter() - start)
    return BatchLatency(rows=rows, seconds=median(times))
