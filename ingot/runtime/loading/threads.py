"""The number of CPU threads of an engine, found by timing it with all threads and with one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from ingot.errors import IngotError
from ingot.runtime.engine import Engine
from ingot.runtime.profile import repeat
from ingot.tensors import Array, Signature

# Shorter calls are over before a second core wakes up.
_TINY = 200e-6
# Smallest speed-up for which all threads are used: other work wants the cores too.
_PAYS = 1.1
# Models that load within this many seconds are opened twice to compare. A tiny model is reopened with one thread only
# if that goes unnoticed.
_LOADS_SOON = 0.5
_LOADS_AT_ONCE = 0.05
# Timed batches: one sample, and a small batch; number of calls for each, and seconds for both engines.
_SIZES = (1, 8)
_CALLS = 3
_BUDGET = 0.1


@dataclass(frozen=True)
class Tuned:
    """An engine with its number of threads; ``why`` is the reason for display."""

    engine: Engine
    threads: int
    why: str


def tune(
    engine: Engine,
    threads: int,
    loaded: float,
    signature: Signature,
    example: Mapping[str, Array],
    reopen: Callable[[int], Engine],
) -> Tuned:
    """Return the engine with the number of threads that pays off; the other engine, if any, is closed.

    Args:
        engine: the model with all available threads.
        threads: their number.
        loaded: seconds that loading took.
        signature: the model's.
        example: valid inputs, whose first sample is used.
        reopen: opens the model with another number of threads.

    Raises:
        IngotError: the model cannot be opened again.
    """
    batches = [
        repeat(signature, example, signature.max_samples(samples)) for samples in _SIZES if signature.batch is not None
    ]
    batches = batches or [dict(example)]
    try:
        seconds = _least([engine], batches[-1:])[0]
    except IngotError as error:
        return Tuned(engine, threads, f"not measured, since the model rejects the generated inputs: {error}")
    if seconds < _TINY:
        if loaded > _LOADS_AT_ONCE:
            return Tuned(engine, threads, f"calls take {seconds * 1e6:.0f} us, too short for threads to matter")
        alone = reopen(1)
        engine.close()
        return Tuned(alone, 1, f"calls take {seconds * 1e6:.0f} us, too short to parallelize")
    if loaded > _LOADS_SOON:
        return Tuned(engine, threads, f"one per core; fewer were not tried, since loading takes {loaded:.1f} s")
    alone = reopen(1)
    with ExitStack() as on_error:
        on_error.callback(alone.close)
        gain = _gain(alone, engine, batches)
        on_error.pop_all()
    kept, closed, count = (engine, alone, threads) if gain >= _PAYS else (alone, engine, 1)
    closed.close()
    return Tuned(kept, count, f"{threads} threads are {gain:.2f} times as fast as 1")


def _gain(alone: Engine, shared: Engine, batches: list[dict[str, Array]]) -> float:
    """Return the speed-up of the second, as the geometric mean over the batches that fit the time limit."""
    end = time.perf_counter() + _BUDGET
    gain, count = 1.0, 0
    for inputs in batches:
        if count and time.perf_counter() > end:
            break
        first, second = _least([alone, shared], [inputs], end)
        gain, count = gain * first / second, count + 1
    return float(gain ** (1 / count))


def _least(engines: list[Engine], batches: list[dict[str, Array]], end: float | None = None) -> list[float]:
    """Return the least seconds of each engine, called alternately; slow engines are called once."""
    least = [float("inf")] * len(engines)
    end = time.perf_counter() + _BUDGET if end is None else end
    for inputs in batches:
        for call in range(_CALLS + 1):
            for index, engine in enumerate(engines):
                began = time.perf_counter()
                engine.run(inputs)
                if call:  # the first may compile or allocate
                    least[index] = min(least[index], time.perf_counter() - began)
            if call and time.perf_counter() > end:
                break
    return least
