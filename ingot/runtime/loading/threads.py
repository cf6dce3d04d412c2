"""Choose an engine's number of CPU threads by timing it with all of them and with one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from ingot.errors import IngotError
from ingot.runtime.engines.engine import Engine
from ingot.runtime.profiling.profile import repeat
from ingot.tensors import Array, Signature

# Seconds; a shorter call ends before a second core wakes up.
TINY_CALL = 200e-6
# Least speed-up that justifies all threads, since other work needs the cores, too.
_MIN_SPEEDUP = 1.1
# Longest loading time, in seconds, for which a model is opened a second time: to compare thread counts, and to switch a
# model with tiny calls to one thread.
_MAX_LOAD_TO_COMPARE = 0.5
_MAX_LOAD_TO_REOPEN = 0.05
# Samples per timed batch, timed calls per batch, and the time limit in seconds for both engines together.
_SIZES = (1, 8)
_CALLS = 3
_BUDGET = 0.1


@dataclass(frozen=True)
class Tuned:
    """An engine and its number of threads; ``why`` is the reason for that number, shown to users."""

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
    """Return the engine with the number of threads that is worth using; close the other, if one was opened.

    Args:
        engine: the model, opened with all available threads.
        threads: the number of available threads.
        loaded: how long loading took, in seconds.
        signature: the model's signature.
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
        seconds = _shortest_calls([engine], batches[-1:])[0]
    except IngotError as error:
        return Tuned(engine, threads, f"not measured, since the model rejects the generated inputs: {error}")
    if seconds < TINY_CALL:
        if loaded > _MAX_LOAD_TO_REOPEN:
            return Tuned(engine, threads, f"calls take {seconds * 1e6:.0f} us, too short for threads to matter")
        single = reopen(1)
        engine.close()
        return Tuned(single, 1, f"calls take {seconds * 1e6:.0f} us, too short to parallelize")
    if loaded > _MAX_LOAD_TO_COMPARE:
        return Tuned(engine, threads, f"one per core; fewer were not tried, since loading takes {loaded:.1f} s")
    single = reopen(1)
    with ExitStack() as on_error:
        on_error.callback(single.close)
        gain = _gain(single, engine, batches)
        on_error.pop_all()
    kept, closed, count = (engine, single, threads) if gain >= _MIN_SPEEDUP else (single, engine, 1)
    closed.close()
    return Tuned(kept, count, f"calls with {threads} threads are {gain:.2f} times as fast as with 1")


def _gain(single: Engine, parallel: Engine, batches: list[dict[str, Array]]) -> float:
    """Return the speed-up of ``parallel`` over ``single``: the geometric mean over the batches that the time allows."""
    end = time.perf_counter() + _BUDGET
    gain, count = 1.0, 0
    for inputs in batches:
        if count and time.perf_counter() > end:
            break
        first, second = _shortest_calls([single, parallel], [inputs], end)
        gain, count = gain * first / second, count + 1
    return float(gain ** (1 / count))


def _shortest_calls(engines: list[Engine], batches: list[dict[str, Array]], end: float | None = None) -> list[float]:
    """Return the shortest call of each engine in seconds. Engines take turns; slow ones are timed only once."""
    shortest = [float("inf")] * len(engines)
    end = time.perf_counter() + _BUDGET if end is None else end
    for inputs in batches:
        for call in range(_CALLS + 1):
            for index, engine in enumerate(engines):
                began = time.perf_counter()
                engine.run(inputs)
                if call:  # the first call, which may compile or allocate, is not timed
                    shortest[index] = min(shortest[index], time.perf_counter() - began)
            if call and time.perf_counter() > end:
                break
    return shortest
