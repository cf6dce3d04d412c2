"""Measures on this machine what a plan needs: the engine's calls by batch size, and the server's time around them."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ingot.bench.measurement import Bench, Rule
from ingot.bench.target import Protocol, Target
from ingot.deploy.capacity.recorded import sample
from ingot.deploy.capacity.server import Server, Traffic
from ingot.deploy.capacity.simulation import Overhead
from ingot.errors import InvalidArgument, Unavailable, Unsupported
from ingot.model_store import Variant
from ingot.report.units import counted
from ingot.runtime.loading.load_spec import LoadSpec
from ingot.runtime.profiling import profile
from ingot.runtime.scheduling.latency_model import Latency
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Array, check_inputs

# Clients of the closed loops: calls of one sample, of some, and of many.
_CLIENTS = (1, 8, 64)
# Seconds of a closed loop that count, and of the calls of one batch size.
_SECONDS = 3
_BUDGET = 0.2
# The most of the event loop's time that engine calls in it can take.
_MOST_INSIDE = 0.9
# The most that a request can spend outside the server's process on one machine; more is a disturbance.
_MOST_WIRE = 200e-6
# The load at a rate, as a share of the highest: where the loop takes more of its requests at once than below.
_OPEN = 0.8
# The share of requests below which wakeups during calls do not count, and the most that one can take.
_FEW_WAKEUPS = 0.1
_MOST_WAKEUP = 200e-6
_STAGES = ("compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True, kw_only=True)
class Site:
    """Where a replica is measured.

    Attributes:
        cores: CPU cores of the replica.
        device: ``cpu`` or ``cuda``.
        protocol: of the requests.
        allow_code: whether formats that can run their author's code are loaded.
        store: of the model, if it is not the usual one.
        shapes: of inputs by name; those of the archive's first golden case by default, with one sample.
    """

    cores: int = 1
    device: str = "cpu"
    protocol: Protocol = "binary"
    allow_code: bool = False
    store: Path | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InvalidArgument if this machine has too few cores, and Unsupported if it cannot be measured."""
        if not hasattr(os, "sched_getaffinity") or not Path("/proc/self/schedstat").exists():
            raise Unsupported("--measure needs Linux, whose kernel reports the CPU time of threads")
        if self.cores > (most := len(os.sched_getaffinity(0))):
            raise InvalidArgument(f"--cores {self.cores} cannot be measured here: this machine has {most}")

    def notes(self) -> list[str]:
        """Return notes on what limits a measurement on this machine."""
        own, others = self.split()
        if own != others:
            return []
        return [
            f"the load generator ran on the cores of the replica, as this machine has only {len(own)}, so the overhead "
            "contains its effect; --cores measures a replica with fewer"
        ]

    def split(self) -> tuple[set[int], set[int]]:
        """Return the cores of the replica, and those of the load, which are the same if there are no others."""
        every = sorted(os.sched_getaffinity(0))
        own = set(every[: self.cores])
        return own, set(every) - own or own


def measure(model: str, variant: Variant, site: Site, step: Callable[[str], None] = lambda _: None) -> Server:
    """Measure a replica on this machine, in some twenty-five seconds.

    The engine is timed alone at each batch size. Then a server is started and loaded by 1, 8 and 64 clients: the
    kernel's count of its CPU time shows what a request and a call cost outside the engine, and its statistics by how
    much its calls are slower than those of the engine alone. A load at a rate shows what wakeups during calls cost.

    Args:
        model: how the variant is served: a file or reference with ``#variant``.
        variant: of an unpacked archive.
        site: the cores, the device and the protocol.
        step: called with a line of text before each step.

    Raises:
        InvalidArgument: this machine has too few cores, or the model does not take the shapes.
        Unsupported: it does not run Linux.
        Unavailable: the server does not start.
    """
    site.check()
    own, others = site.split()
    inputs = example(variant, site.shapes)
    site = replace(site, shapes={name: array.shape for name, array in inputs.items()})
    step("Timing the engine at each batch size")
    with pinned(own):
        seconds, threads = _profile(variant, site, inputs)
    with serving(model, site, own) as (process, url), pinned(others):
        found = []
        for clients in _CLIENTS:
            step(f"Loading a server with {counted(clients, 'client')}")
            found.append(_load(process.pid, url, site, clients, Latency(seconds)))
        server = Server(
            seconds=_corrected(seconds, found),
            overhead=_overhead(found),
            cores=site.cores,
            threads=threads,
            batching=variant.signature.batch is not None,
            max_batch=variant.signature.max_samples(64),
            device=site.device,
        )
        rate = _OPEN * server.ceiling
        step(f"Loading a server with {rate:,.0f} requests per second")
        live = _load(process.pid, url, site, 0, Latency(seconds), rate)
    return replace(server, overhead=replace(server.overhead, wakeup=_wakeup(server, rate, live)))


def example(variant: Variant, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Return the inputs of one sample: golden values, repeated or cut to the shapes that are given.

    Raises:
        InvalidArgument: the model does not have such an input, or does not take these shapes.
    """
    inputs = sample(variant)
    if unknown := sorted(set(shapes) - set(inputs)):
        raise InvalidArgument(f"--shape names '{unknown[0]}'; the model's inputs are {', '.join(inputs)}")
    resized = {name: np.resize(array, shapes.get(name, array.shape)) for name, array in inputs.items()}
    sizes, batch = check_inputs(variant.signature, resized), variant.signature.batch
    if batch is not None and sizes.get(batch, 1) != 1:
        raise InvalidArgument(
            f"--shape sets '{batch}' to {sizes[batch]}; a plan is for requests of one sample, set it to 1"
        )
    return resized


@contextlib.contextmanager
def pinned(cores: set[int]) -> Iterator[None]:
    """Run on these cores, with all threads and processes that are started."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _profile(variant: Variant, site: Site, inputs: Mapping[str, Array]) -> tuple[dict[int, float], int]:
    """Return the seconds of an engine call by samples, and the number of threads, chosen as a server chooses it."""
    settings = Settings(device=site.device, allow_code=site.allow_code)
    spec = LoadSpec.of_variant(variant, settings)
    signature = variant.signature
    tuned = spec.tune(spec.open(site.device, settings.threads), settings, signature)
    with contextlib.closing(tuned.engine) as engine:
        batches = [1 << power for power in range(7)] if signature.batch is not None else [1]
        found = profile.measure(engine, signature, inputs, batches, _BUDGET)
    return {item.rows: item.seconds for item in found}, tuned.threads


@contextlib.contextmanager
def serving(model: str, site: Site, cores: set[int]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run a server on these cores; yield its process and the URL of the protocol's port. The model is ``model``."""
    command = [sys.executable, "-m", "ingot", "serve", f"model={model}", "--json", "--device", site.device]
    command += ["--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--isolate", "none"]
    command += ["--allow-code"] if site.allow_code else []
    command += [] if site.store is None else ["--store", str(site.store)]
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    with pinned(cores):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        line = process.stdout.readline() if process.stdout is not None else b""
        if not line:
            log.seek(0)
            said = log.read().decode(errors="replace").strip()
            raise Unavailable(f"the server to be measured did not start: {said}")
        yield process, json.loads(line)["grpc" if site.protocol.startswith("grpc") else "http"]
    finally:
        process.terminate()
        process.communicate()
        log.close()


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """A closed loop: its counts, its CPU seconds by thread, the engine's seconds, and the client's median latency."""

    requests: int
    calls: int
    loop: float
    engine: float
    latency: float

    @property
    def samples(self) -> float:
        """Per call."""
        return self.requests / self.calls


def _load(process: int, url: str, site: Site, clients: int, timed: Latency, rate: float = 0.0) -> _Measured:
    """Load a server, by clients or at a rate; ``timed`` is the duration of the calls of the engine alone."""
    with Target(url, "model", protocol=site.protocol) as target:
        payload = target.payload(None, site.shapes, 1, 1)
        plan, rule = target.plan(payload), Rule(warmup=1, windows=_SECONDS)
        # The server learns its batch sizes first.
        if clients:
            Bench(target, plan, payload.samples, Rule(warmup=0, windows=1)).closed(clients)
        bench = Bench(target, plan, payload.samples, rule)
        counts, spent = _counts(target), _cpu(process)
        point = bench.closed(clients) if clients else bench.opened(rate)
        after, busy = _counts(target), _cpu(process)
    calls, engine = after[0] - counts[0], after[1] - counts[1]
    requests = after[2] - counts[2]
    if not requests:
        raise Unavailable("the server that was measured answered no request")
    loop, rest = busy[0] - spent[0], busy[1] - spent[1]
    if site.device == "cpu":
        loop, engine = _parts(loop, rest, engine, calls * timed(max(1, round(requests / calls))))
    return _Measured(requests=requests, calls=calls, loop=loop, engine=engine, latency=point.quantile(0.5))


def _parts(loop: float, rest: float, engine: float, expected: float) -> tuple[float, float]:
    """Return the seconds of the event loop and those of the engine, from CPU times, which other programs disturb less.

    Args:
        loop: CPU seconds of the event loop's thread.
        rest: CPU seconds of all other threads.
        engine: seconds of the engine's calls by the clock.
        expected: the same, of the engine alone.
    """
    if rest > engine / 2:  # calls in threads, which the loop interrupts on a shared core
        return loop, min(engine, rest)
    inside = min(engine, expected, _MOST_INSIDE * loop)
    return loop - inside, inside


def _counts(target: Target) -> tuple[int, float, int]:
    """Return the number of engine calls so far, their seconds in total, and the number of requests."""
    [entry] = target.client.statistics("model")
    batches: Sequence[Mapping[str, Any]] = entry["batch_stats"]
    seconds = sum(int(item[stage]["ns"]) for item in batches for stage in _STAGES) / 1e9
    return int(entry["execution_count"]), seconds, int(entry["inference_stats"]["success"]["count"])


def _cpu(process: int) -> tuple[float, float]:
    """Return the CPU seconds of a process: of its main thread, which runs the event loop, and of the others."""
    times = {}
    for task in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            times[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    main = times.pop(process)
    return main, sum(times.values())


def _overhead(found: Sequence[_Measured]) -> Overhead:
    """Return the loop's CPU time per request and per call, from loads that differ in requests per call."""
    per_request = np.array([each.loop / each.requests for each in found])
    # Errors are relative: those of the least load must not hide the rest.
    terms = np.array([[1.0, 1 / each.samples] for each in found]) / per_request[:, None]
    call = max(0.0, float(np.linalg.lstsq(terms, np.ones(len(found)), rcond=None)[0][1]))
    # Among many requests of a call, its own part is the smaller one, whatever a disturbed measurement shows.
    few, many = found[0], found[-1]
    call = min(call, many.samples * per_request[-1] / 2)
    request = per_request[-1] - call / many.samples
    wire = few.latency - request - call - few.engine / few.calls
    return Overhead(request=float(request), call=call, wire=min(max(wire, 0.0), _MOST_WIRE))


def _wakeup(server: Server, rate: float, live: _Measured) -> float:
    """Return the loop's CPU time per wakeup: the excess over a simulation without wakeups, at a given rate."""
    simulated = server.run(Traffic().at(rate, _SECONDS))
    if simulated.wakeups < _FEW_WAKEUPS * simulated.offered:
        return 0.0
    more = live.loop / live.requests - simulated.loop / simulated.offered
    return min(max(0.0, more * simulated.offered / simulated.wakeups), _MOST_WAKEUP)


def _corrected(seconds: Mapping[int, float], found: Sequence[_Measured]) -> dict[int, float]:
    """Return the seconds of calls in the server, which has other work for the caches than the engine alone."""
    sizes, times = [math.log(rows) for rows in seconds], list(seconds.values())
    places = [math.log(each.samples) for each in found]
    factors = [
        each.engine / each.calls / float(np.interp(place, sizes, times))
        for place, each in zip(places, found, strict=True)
    ]
    return {rows: taken * float(np.interp(math.log(rows), places, factors)) for rows, taken in seconds.items()}
