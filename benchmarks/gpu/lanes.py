"""Times an ONNX model on a GPU by batch size, in and without a pipeline: ``python -m benchmarks.gpu.lanes MODEL.onnx``.

``plain`` is the session's own ``run`` from ordinary memory. ``lanes`` is how Ingot runs it: inputs in pinned memory,
and several batches in flight, by a thread each; the time is that of all of them by their number. Calls of both
alternate, so that other load on the machine affects both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

from ingot.errors import InvalidArgument
from ingot.runtime.engines.ort.ort_engine import OrtEngine
from ingot.runtime.profiling.profile import repeat, zeros
from ingot.tensors import Array

# Calls of each lane in a row.
_CALLS = 10


def time_in_turn(calls: list[Callable[[], object]], budget: float) -> list[float]:
    """Return the median seconds of each, over as many calls as fit the time, but at least five."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    end = time.perf_counter() + budget
    while len(times[0]) < 5 or time.perf_counter() < end:
        for call, taken in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return [median(taken) for taken in times]


def placed(engine: OrtEngine, inputs: dict[str, Array]) -> dict[str, Array]:
    """Return inputs in the memory from which the engine reads fastest."""
    found = {spec.name: engine.allocate(spec, inputs[spec.name].shape) for spec in engine.signature.inputs}
    for name, array in found.items():
        array[...] = inputs[name]
    return found


def call(lane: OrtEngine, feed: dict[str, Array]) -> None:
    """Run a lane often enough for the start of its thread not to matter."""
    for _ in range(_CALLS):
        lane.run(feed)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.lanes")
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cuda", help="cpu shows that the script works, and no more")
    parser.add_argument("--lanes", type=int, default=3, help="batches in flight")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64,128", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each batch size")
    options = parser.parse_args()
    engine, plain_engine = (OrtEngine(options.model, device=options.device, pipelined=each) for each in (True, False))
    if engine.signature.batch is None:
        raise InvalidArgument(f"{options.model} has no batch dimension, which must be called batch or N")
    lanes = [engine, *engine.more_lanes(options.lanes - 1)]
    columns = ("rows", "plain", "lanes", "plain, samples/s", "lanes, samples/s", "ratio")
    table = Table(*columns, title=f"{options.model}, {len(lanes)} in flight")
    with ThreadPoolExecutor(len(lanes)) as threads:
        for rows in map(int, options.batches.split(",")):
            inputs = repeat(engine.signature, zeros(engine.signature), rows)
            feeds = [placed(engine, inputs) for _ in lanes]
            for name, array in engine.run(feeds[0]).items():
                np.testing.assert_allclose(array, plain_engine.run(inputs)[name], rtol=1e-3, atol=1e-4)

            def call_lanes(feeds: list[dict[str, Array]] = feeds) -> None:
                wait([threads.submit(call, lane, feed) for lane, feed in zip(lanes, feeds, strict=True)])

            plain, together = time_in_turn([partial(plain_engine.run, inputs), call_lanes], options.seconds)
            each = together / len(lanes) / _CALLS
            rates = (f"{rows / plain:,.0f}", f"{rows / each:,.0f}", f"{plain / each:.2f}x")
            table.add_row(str(rows), f"{plain * 1e6:,.0f} us", f"{each * 1e6:,.0f} us", *rates)
    Console().print(table)
    print(", ".join(f"{name} {value}" for name, value in engine.settings.items()))


if __name__ == "__main__":
    main()
