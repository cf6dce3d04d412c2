"""The latency profile of a model: duration of an engine call by batch size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from ingot.model_store import BatchLatency
from ingot.runtime.engine import Engine
from ingot.tensors import Array, DType, Signature

BATCHES = (1, 8, 32)


def measure(
    engine: Engine,
    signature: Signature,
    example: Mapping[str, Array],
    batches: Iterable[int] = BATCHES,
    budget: float = 0.3,
    least: int = 3,
) -> tuple[BatchLatency, ...]:
    """Time an engine at several batch sizes.

    Args:
        engine: the loaded model.
        signature: determines the batch axis; a model without a batch is timed as it is.
        example: valid inputs, whose first sample is repeated.
        batches: the batch sizes; sizes beyond the signature's range are clipped to its upper end.
        budget: seconds for each batch size, after one call that is not counted.
        least: smallest number of timed calls.
    """
    return measure_together([engine], signature, example, batches, budget, least)[0]


def measure_together(
    engines: Sequence[Engine],
    signature: Signature,
    example: Mapping[str, Array],
    batches: Iterable[int] = BATCHES,
    budget: float = 0.3,
    least: int = 3,
) -> list[tuple[BatchLatency, ...]]:
    """Time engines of one signature alternately, so that a busy machine disturbs all of them alike.

    Arguments and behaviour are those of :func:`measure`; ``budget`` is per engine.
    """
    profiles: list[list[BatchLatency]] = [[] for _ in engines]
    for samples in dict.fromkeys(signature.max_samples(samples) for samples in batches):
        inputs = repeat(signature, example, samples) if signature.batch is not None else example
        for profile, seconds in zip(profiles, _time(engines, inputs, budget, least), strict=True):
            profile.append(BatchLatency(rows=samples, seconds=seconds))
    return [tuple(profile) for profile in profiles]


def repeat(signature: Signature, example: Mapping[str, Array], samples: int) -> dict[str, Array]:
    """Return inputs of ``samples`` samples, each a copy of the example's first."""
    axes = signature.batch_axes(signature.inputs)
    return {
        name: np.repeat(array.take([0], axes[name]), samples, axes[name]) if name in axes else array
        for name, array in example.items()
    }


def zeros(signature: Signature) -> dict[str, Array]:
    """Return inputs of one sample: empty text, or numbers as close to 0 as the declared range of values allows.

    Each named dimension is as close to 1 as its range allows.
    """

    def size(dim: int | str) -> int:
        return dim if isinstance(dim, int) else signature.range(dim).nearest(1)

    arrays: dict[str, Array] = {}
    for spec in signature.inputs:
        array = np.full([size(dim) for dim in spec.shape], spec.least, spec.dtype.numpy)
        if spec.dtype is DType.BYTES:
            array[...] = b""
        arrays[spec.name] = array
    return arrays


def _time(engines: Sequence[Engine], inputs: Mapping[str, Array], budget: float, least: int) -> list[float]:
    """Return the median seconds per call for each engine."""
    times: list[list[float]] = [[] for _ in engines]
    for engine in engines:
        engine.run(inputs)
    end = time.perf_counter() + budget * len(engines)
    while len(times[0]) < least or (time.perf_counter() < end and len(times[0]) < 1000):
        for engine, taken in zip(engines, times, strict=True):
            start = time.perf_counter()
            engine.run(inputs)
            taken.append(time.perf_counter() - start)
    return [median(taken) for taken in times]
