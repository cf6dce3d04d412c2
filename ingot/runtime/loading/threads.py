"""How many CPU threads an engine gets: those that make it faster, found by timing it with all and with one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ingot.errors import IngotError
from ingot.runtime.engine import Engine
from ingot.runtime.profile import repeat
from ingot.tensors import Array, Signature

# A call that takes less is over before a second core has woken up for it.
_TINY = 200e-6
# Threads must make calls this many times as fast: other work wants the cores too.
_PAYS = 1.1
# Models that load within this many seconds are opened a second time to compare; one thread for one that is tiny is
# worth the second time only if it is not noticed.
_LOADS_SOON = 0.5
_LOADS_AT_ONCE = 0.05
# What is timed: one sample, and as many as a small batch; each this often, within so many seconds for both engines.
_SIZES = (1, 8)
_CALLS = 3
_BUDGET = 0.1


@dataclass(frozen=True)
class Tuned:
    """An engine and the threads that it has; ``why`` is fit for people to read."""

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
    """Return the engine with as many threads as pay; the other one, if there was one, is closed.

    Args:
        engine: the model with all threads that it may have.
        threads: how many those are.
        loaded: seconds that it took to load.
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
        return Tuned(engine, threads, f"not measured, since the model rejects what was made up for it: {error}")
    if seconds < _TINY:
        if loaded > _LOADS_AT_ONCE:
            return Tuned(engine, threads, f"calls take {seconds * 1e6:.0f} us, so few or many make no difference")
        alone = reopen(1)
        engine.close()
        return Tuned(alone, 1, f"calls take {seconds * 1e6:.0f} us, too little to share out")
    if loaded > _LOADS_SOON:
        return Tuned(engine, threads, f"one a core; fewer were not tried, since loading takes {loaded:.1f} s")
    alone = reopen(1)
    try:
        gain = _gain(alone, engine, batches)
    except BaseException:
        alone.close()
        raise
    kept, closed, count = (engine, alone, threads) if gain >= _PAYS else (alone, engine, 1)
    closed.close()
    return Tuned(kept, count, f"{threads} threads are {gain:.2f} times as fast as 1")


def _gain(alone: Engine, shared: Engine, batches: list[dict[str, Array]]) -> float:
    """Return how many times as fast the second is, as the geometric mean over the batches that there is time for."""
    end = time.perf_counter() + _BUDGET
    gain, count = 1.0, 0
    for inputs in batches:
        if count and time.perf_counter() > end:
            break
        first, second = _least([alone, shared], [inputs], end)
        gain, count = gain * first / second, count + 1
    return float(gain ** (1 / count))


def _least(engines: list[Engine], batches: list[dict[str, Array]], end: float | None = None) -> list[float]:
    """Return each engine's least seconds, called in turn; once is enough for those that take long."""
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
