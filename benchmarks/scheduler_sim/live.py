"""Compare the live scheduler with the simulated one on one trace: ``python -m benchmarks.scheduler_sim.live``.

A model is served in this process, by :class:`ingot.runtime.model.Model`, its event loop and its engine's thread; each
request of a trace is submitted at its time. The simulator runs the same scheduler on the same trace, with an engine
whose calls have the mean duration, the variance and the gaps of those of the live run. The remaining difference is the
cost of the event loop and the threads: the comparison shows whether the simulator can be trusted, not whether the
policy is good. An engine that sleeps for the durations of a profile measures the scheduler alone.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, quantiles, stdev

import numpy as np
import onnx

from benchmarks.scheduler_sim import contest, profiles
from benchmarks.scheduler_sim.profiles import Profile
from benchmarks.serving.graphs import perceptron
from ingot.deploy.capacity import traces
from ingot.deploy.capacity.simulation import Result, Simulation
from ingot.errors import IngotError
from ingot.runtime.engines.engine import BaseEngine, Engine
from ingot.runtime.engines.loader import load_engine
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.loading import warmup
from ingot.runtime.loading.choice import single_variant
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.loading.source import ModelSource
from ingot.runtime.loading.trust_check import ServingTerms
from ingot.runtime.model import Model
from ingot.runtime.scheduling.entry import Outcome, Request
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Array, DType, Signature, TensorSpec

_WIDTH = 256
_BUDGET = 3.0
# The least number of calls of about one size to estimate their duration, and the largest deviation assumed.
_ENOUGH = 5
_MOST_NOISE = 0.5


class Sleeper(BaseEngine):
    """An engine that takes as long as a profile says, and computes nothing."""

    platform = "sleeper"
    device = "cpu"
    settings: Mapping[str, str] = {}
    signature = Signature(
        (TensorSpec("x", DType.FP32, ("batch", _WIDTH)),), (TensorSpec("y", DType.FP32, ("batch", _WIDTH)),), "batch"
    )

    def __init__(self, seconds: Mapping[int, float]):
        self._latency = Latency(seconds)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        array = inputs["x"]
        time.sleep(self._latency(len(array)))
        return {"y": array.copy()}

    def terminate(self) -> None: ...

    def close(self) -> None: ...


async def replay(model: Model, arrivals: Sequence[traces.Arrival]) -> Result:
    """Submit each request of a trace at its time; return their outcomes."""
    loop = asyncio.get_running_loop()
    name = model.signature.inputs[0].name
    inputs = {name: np.zeros((1, _WIDTH), np.float32)}
    result = Result(span=traces.span(arrivals))
    left = len(arrivals)
    over = asyncio.Event()

    def send(arrival: traces.Arrival, due: float) -> None:
        def reply(outcome: Outcome) -> None:
            if not isinstance(outcome, IngotError):
                taken = loop.time() - due
                result.latencies.append(taken)
                result.on_time += taken <= arrival.timeout
            end()

        result.offered += 1
        try:
            model.submit(Request(inputs, reply, due + arrival.timeout - loop.time()))
        except IngotError:
            end()

    def end() -> None:
        nonlocal left
        left -= 1
        if not left:
            over.set()

    start = loop.time() + 0.1
    for arrival in arrivals:
        loop.call_at(start + arrival.time, send, arrival, start + arrival.time)
    await asyncio.wait_for(over.wait(), 2 * arrivals[-1].time + 60)
    return result


@dataclass(frozen=True)
class Call:
    """One call of an engine: its rows, and the times of its beginning and end."""

    rows: int
    began: float
    ended: float


class Watched(BaseEngine):
    """An engine that notes its calls."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.calls: list[Call] = []
        self.signature, self.platform, self.device = engine.signature, engine.platform, engine.device
        self.settings = engine.settings

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        began = time.perf_counter()
        outputs = self.engine.run(inputs)
        self.calls.append(Call(len(next(iter(inputs.values()))), began, time.perf_counter()))
        return outputs

    def terminate(self) -> None:
        self.engine.terminate()

    def close(self) -> None:
        self.engine.close()


def service(calls: Sequence[Call], known: Mapping[int, float]) -> tuple[dict[int, float], float]:
    """Return the duration of calls, and its deviation.

    Args:
        calls: in order.
        known: seconds by rows, for sizes that did not occur.

    Returns:
        Seconds by rows, with what passes between two calls that follow at once, and the standard deviation of their
        logarithm.
    """
    gaps = [after.began - before.ended for before, after in pairwise(calls)]
    between = quantiles(gaps, n=20)[0]
    by_size: dict[int, list[Call]] = {}
    for call in calls:
        by_size.setdefault(call.rows.bit_length(), []).append(call)
    off = [(call.ended - call.began) / Latency(known)(call.rows) for call in calls]
    found = {rows: between + median(off) * taken for rows, taken in known.items()}
    for some in by_size.values():
        if len(some) >= _ENOUGH:
            rows = round(mean(call.rows for call in some))
            found[rows] = between + mean(call.ended - call.began for call in some)
    expected = Latency(found)
    logs = [math.log((between + call.ended - call.began) / expected(call.rows)) for call in calls]
    return found, min(stdev(logs), _MOST_NOISE)


def compare(name: str, engine: Engine, slo: float, loads: Sequence[float], seconds: float) -> list[str]:
    """Return rows of the table: live figures as ratios of the simulated ones."""
    watched = Watched(engine)
    known = warmup.measure(watched, engine.signature, [], 64, _BUDGET).known
    profile = Profile(name, known, slo, "this machine, now")
    source = ModelSource(single_variant(LoadSpec(lambda device, threads: watched)))
    model = Model(name, "1", source, ServingTerms(Settings(warm_time=_BUDGET)))
    model.load()
    rows = []
    for load in loads:
        rate = load * profile.capacity
        arrivals = traces.poisson(rate, max(50, int(rate * seconds)), slo)
        watched.calls.clear()
        live = asyncio.run(replay(model, arrivals))
        live.batches = [call.rows for call in watched.calls]
        taken, noise = service(watched.calls, known)
        told = Simulation(contest.ours(profile), taken, noise=noise).replay(arrivals)
        told.span = live.span
        pairs = [
            (live.throughput, told.throughput),
            (live.goodput, told.goodput),
            (live.batch, told.batch),
            (live.percentile(0.5), told.percentile(0.5)),
        ]
        cells = [f"{mine / other:.2f}" if other else "-" for mine, other in pairs]
        rows.append(f"| {name} | {load:g} | {' | '.join(cells)} | {told.goodput / profile.capacity:.2f} |")
    model.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scheduler_sim.live", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each trace is")
    parser.add_argument("--loads", default="0.5,1,2,3", help="shares of capacity, apart by commas")
    parser.add_argument("--slow", type=float, default=1.0, help="by how much sleeping engines and their SLO are slowed")
    parser.add_argument("--models", default="sleeping wide,sleeping gpu,wide", help="names, apart by commas")
    options = parser.parse_args()
    loads = [float(load) for load in options.loads.split(",")]
    print("Live, as a ratio of what the simulator says of the same trace.\n")
    print("| model | load | throughput | goodput | mean batch | p50 | simulated goodput of capacity |")
    print("|---" * 7 + "|")
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            known = next(item for item in profiles.PROFILES if item.name == name.split()[-1])
            slo = known.slo
            if name.startswith("sleeping"):
                slo *= options.slow
                engine: Engine = Sleeper({rows: options.slow * taken for rows, taken in known.seconds.items()})
            else:
                path = Path(folder) / f"{name}.onnx"
                onnx.save(perceptron(name, (_WIDTH, 3072, 3072, 3072, 10)), path)
                engine = load_engine(EngineSpec(path, device="cpu", threads=1))
            print("\n".join(compare(name, engine, slo, loads, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
