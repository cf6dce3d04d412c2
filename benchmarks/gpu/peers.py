"""The same models behind other servers: the highest rate of Poisson arrivals within a limit, over HTTP."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.serving.contestants import PEERS, Peer, contestants
from benchmarks.serving.processes import NoAnswer, Process, free_ports
from benchmarks.serving.wires import Request
from ingot.bench.measurement import Bench, Objective, Rule
from ingot.bench.plan import Plan
from ingot.bench.target import Target
from ingot.runtime.machine import devices
from ingot.tensors import Array

# Seconds in which 99 of 100 requests are to be answered.
LIMIT = 0.025
# Of a search: enough for two of the largest batches.
CONNECTIONS = 512
# Where the servers that can run a PyTorch program take requests.
_PATHS = {"litserve": "/predict", "mosec": "/inference"}


def pythons(names: Sequence[str], build: Path, chosen: Path | None) -> dict[str, Path]:
    """Return the Python of each peer: a chosen one, or that of ``benchmarks.serving.install``.

    Raises:
        SystemExit: there is no such peer, or it or PyTorch is not installed there.
    """
    found = {}
    for name in names:
        peer = contestants().get(name)
        if name not in _PATHS or not isinstance(peer, Peer):
            raise SystemExit(f"unknown peer '{name}'; there are {', '.join(_PATHS)}")
        if chosen is None and (why := peer.missing(build)):
            raise SystemExit(f"{name} cannot take part: {why}")
        found[name] = chosen or peer.python(build)
        command = [str(found[name]), "-c", f"import torch, {name}"]
        try:
            tried = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise SystemExit(f"{name} cannot take part: {error}") from error
        if tried.returncode:
            raise SystemExit(f"{name} cannot take part: {found[name]}: {tried.stderr.strip().splitlines()[-1]}")
    return found


def goodput(bench: Bench, limit: float, connections: int | None = None) -> float:
    """Return the highest rate of Poisson arrivals of which 99 of 100 are answered within a limit in seconds."""
    points = bench.search(Objective(quantile=0.99, seconds=limit), connections)
    return max((point.offered for point, held in points if held), default=0.0)


def goodput_of(
    peer: str,
    program: Path,
    requests: Sequence[Mapping[str, Array]],
    answer: Array,
    most: int,
    options: argparse.Namespace,
) -> float:
    """Return a peer's goodput with the best of ``options.peer_waits``.

    Args:
        peer: its name.
        program: the model, as a PyTorch program.
        requests: of one sample.
        answer: to the first request, from this server.
        most: samples of its largest batch.
        options: of the command.

    Raises:
        SystemExit: it does not start, or answers the first request otherwise.
    """
    header = {"Content-Type": "application/octet-stream"}
    sent = tuple(Request(_PATHS[peer], header, request["x"].tobytes()).http() for request in requests)
    rule, rates = Rule(window=options.seconds, windows=options.windows), []
    for wait in options.peer_waits.split(","):
        (port,) = free_ports(1)
        given = {"model": program, "port": port, "format": "binary", "batch": most, "delay": wait}
        command = [str(options.pythons[peer]), str(PEERS / peer / "server.py")]
        command += [part for key, value in given.items() for part in (f"--{key}", str(value))]
        variables = {"PYTHONPATH": PEERS, "BENCHMARK_MODEL": program, "BENCHMARK_DEVICE": options.device}
        if devices.kind_of(options.device) == "cpu":
            variables["OMP_NUM_THREADS"] = 1  # more threads than free cores wait for each other
        log = options.build / f"{program.parent.name}-{peer}.log"
        server = Process(command, {key: str(value) for key, value in variables.items()}, log, core=None)
        try:
            _, body = server.wait(port, sent[0])
            _compare(peer, np.frombuffer(body, answer.dtype), answer.ravel())
            plan = Plan(host="127.0.0.1", port=port, tls=None, wire="http", requests=sent)
            with Target(f"http://127.0.0.1:{port}", peer, protocol="torchserve") as target:
                bench = Bench(target, plan, 1, rule, processes=options.processes)
                rates.append(goodput(bench, LIMIT, CONNECTIONS))
        except NoAnswer as error:
            raise SystemExit(f"{peer}: {error}") from error
        finally:
            server.close()
    return max(rates)


def _compare(peer: str, theirs: Array, ours: Array) -> None:
    """Raise SystemExit if answers differ by more than kernels for bfloat16 round differently."""
    theirs, ours = theirs.astype(np.float32), ours.astype(np.float32)
    if theirs.shape != ours.shape or np.abs(theirs - ours).max() > 0.1 * np.abs(ours).max():
        raise SystemExit(f"{peer} answers {theirs[:4]}..., and this server {ours[:4]}...")
