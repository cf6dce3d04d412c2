"""The latency profile of a model: duration of an engine call by batch size."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from ingot.model_store import BatchLatency
from ingot.runtime.engines.engine import Engine
from ingot.tensors import Array, DType, Signature

BATCHES = (1, 8, 32)
LOOKS = 5
"""How often engines are timed at most until their speeds are certain enough."""
STEADY = 0.05
"""A ratio of two engines' times that is less certain than this is disturbed by other programs."""
_MOST = 1000

Latencies = tuple[BatchLatency, ...]
"""The latencies of one model by batch size."""


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
    settled: Callable[[Sequence[Latencies]], bool] = lambda found: True,
) -> list[Latencies]:
    """Time engines of one signature alternately, so that a busy machine disturbs all of them alike.

    Arguments and behaviour are those of :func:`measure`; ``budget`` is per engine. ``settled`` is called with all
    latencies so far; if it returns False, all batch sizes are timed again and the calls are added, at most
    :data:`LOOKS` times in all. The latencies' ``spread`` is that of the ratio to the first engine.
    """
    calls: dict[int, _Calls] = {
        samples: _Calls(engines) for samples in dict.fromkeys(signature.max_samples(samples) for samples in batches)
    }
    found: list[Latencies] = []
    for _ in range(LOOKS):
        for samples, timed in calls.items():
            timed.run(repeat(signature, example, samples) if signature.batch is not None else example, budget, least)
        found = [tuple(timed.latency(place, rows) for rows, timed in calls.items()) for place, _ in enumerate(engines)]
        if settled(found):
            break
    return found


def steady(found: Sequence[Latencies]) -> bool:
    """Return whether all ratios to the first engine are certain to 5 %, by the wall clock."""
    return all(item.spread <= STEADY and not item.disturbed for latencies in found for item in latencies)


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
        array = np.full([size(dim) for dim in spec.shape], spec.nearest_to_zero, spec.dtype.numpy)
        if spec.dtype is DType.BYTES:
            array[...] = b""
        arrays[spec.name] = array
    return arrays


class _Calls:
    """Calls of engines in turn, with the same inputs."""

    def __init__(self, engines: Sequence[Engine]):
        self._engines = engines
        self._times: list[list[tuple[float, float]]] = []  # per round and engine: wall-clock and CPU seconds

    def run(self, inputs: Mapping[str, Array], budget: float, least: int) -> None:
        """Call each engine ``least`` times or more, as many as ``budget`` seconds per engine allow, at most 1000."""
        for engine in self._engines:
            engine.run(inputs)
        end = time.perf_counter() + budget * len(self._engines)
        done = 0
        while done < least or (time.perf_counter() < end and done < _MOST):
            self._times.append([_timed(engine, inputs) for engine in self._engines])
            done += 1

    def latency(self, place: int, rows: int) -> BatchLatency:
        wall, cpu = np.array(self._times).transpose(2, 1, 0)  # each [engines, rounds]
        spread, spread_of_cpu = (_spread(times[0], times[place]) for times in (wall, cpu))
        on_cpu = all(engine.device == "cpu" for engine in (self._engines[0], self._engines[place]))
        known = on_cpu and bool((cpu[[0, place]] > 0).all())
        disturbed = known and spread > STEADY and spread_of_cpu < spread
        return BatchLatency(
            rows=rows,
            seconds=float(np.median(wall[place])),
            cpu=float(np.median(cpu[place])) if known else None,
            spread=spread_of_cpu if disturbed else spread,
            disturbed=disturbed,
        )


def _timed(engine: Engine, inputs: Mapping[str, Array]) -> tuple[float, float]:
    """Return the wall-clock seconds of a call, and the CPU seconds of the process."""
    busy, start = time.process_time(), time.perf_counter()
    engine.run(inputs)
    end = time.perf_counter()
    return end - start, time.process_time() - busy


def _spread(first: Array, second: Array) -> float:
    """Return the uncertainty of the median ratio of pairs of calls, as a share.

    It is half the width of the median's 95 % interval, which order statistics have for any distribution; with fewer
    than six pairs, of the whole range.
    """
    ratios = np.sort(first / np.maximum(second, 1e-12))
    cut = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    low, high = float(ratios[cut]), float(ratios[-1 - cut])
    return math.sqrt(high / low) - 1 if low > 0 else 0.0
