"""Serving on a GPU against the engine alone: ``python -m benchmarks.gpu``.

For each model: the highest rate of the engine alone (CUDA graphs, inputs on the GPU already); the server's under a
closed loop over HTTP and gRPC; the highest rate of Poisson arrivals within the model's limit, how busy the GPU then is,
and what one request takes beyond its computation; with ``--peers``, the highest rate within 25 ms over HTTP against the
same model behind other servers. The load generator runs on the same machine. The table is printed, and with ``--write``
written to docs/concepts/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.gpu.engine import timed
from benchmarks.gpu.models import Spec, requests_of, specs, store_of
from benchmarks.gpu.peers import CONNECTIONS, LIMIT, goodput, goodput_of, pythons
from benchmarks.serving.docs import PAGE, updated
from benchmarks.serving.processes import NoAnswer, started
from ingot._version import __version__
from ingot.bench.measurement import Bench, Rule
from ingot.bench.payload import Payload
from ingot.bench.target import Target
from ingot.runtime.engines.pytorch.torch_engine import use_torch_precision
from ingot.runtime.machine import devices, nvml
from ingot.tensors import Array, DType

COLUMNS = (
    "model",
    "engine alone, samples/s",
    "at batch",
    "gRPC, share of it",
    "HTTP, share of it",
    "Poisson within the limit, share of it",
    "GPU busy then",
    "one request beyond its computation",
    "bf16 against fp32 in TF32",
    "Poisson within 25 ms over HTTP, against peers",
)


@dataclass
class Figures:
    """The measurements of a model; None where one is not possible or has no goal."""

    rate: float
    batch: int
    alone: float
    shares: dict[str, float] = field(default_factory=dict)
    poisson: float | None = None
    limit: float | None = None
    busy: float | None = None
    beyond: float = 0.0
    gain: float | None = None
    within: float = 0.0
    answer: Array | None = None
    peers: dict[str, float] = field(default_factory=dict)

    def row(self, name: str) -> list[str]:
        held = "-" if self.poisson is None else f"{self.poisson:.2g} (p99 ≤ {1e3 * (self.limit or 0):g} ms)"
        return [
            name,
            f"{self.rate:,.0f}",
            str(self.batch),
            *(f"{self.shares[wire]:.2g}" for wire in ("grpc", "http")),
            held,
            "-" if self.busy is None else f"{self.busy:.0%}",
            f"{1e3 * self.beyond:.2f} ms",
            "-" if self.gain is None else f"{self.gain:.2f}x",
            ", ".join(
                f"{peer} {self.within / rate:.2f}x" if rate else f"{peer} holds no rate"
                for peer, rate in self.peers.items()
            )
            or "-",
        ]


def measure(name: str, spec: Spec, options: argparse.Namespace) -> Figures:
    """Measure one model."""
    batches = tuple(size for size in spec.batches if size <= options.max_batch)
    times = timed(spec, DType.BF16, options.device, options.seconds, batches)
    size = max(times, key=lambda size: size / times[size])
    found = Figures(size / times[size], size, times[1], limit=spec.limit)
    plain = timed(spec, DType.FP32, options.device, options.seconds, (size,))
    found.gain = plain[size] / times[size] if plain else None
    store = store_of(name, spec, options.build / f"{name}{'-small' if options.small else ''}", DType.BF16)
    with serving(name, store, batches[-1], options) as urls:
        for wire in ("grpc", "http"):
            _over(wire, urls[wire], name, spec, found, options)
    if found.answer is not None:
        requests, program = requests_of(spec, DType.BF16), store.with_name("model.pt2")
        for peer in options.peers:
            found.peers[peer] = goodput_of(peer, program, requests, found.answer, batches[-1], options)
    return found


def _over(wire: str, url: str, name: str, spec: Spec, found: Figures, options: argparse.Namespace) -> None:
    """Measure a model's server over one protocol; over gRPC all figures, over HTTP its rate alone."""
    rule = Rule(window=options.seconds, windows=options.windows)
    requests = requests_of(spec, DType.BF16)
    payload = Payload(requests=requests, samples=1, text="random")
    with Target(url, name) as target:
        target.check(payload)
        bench = Bench(target, target.plan(payload), 1, rule, processes=options.processes)
        if wire == "grpc":
            found.beyond = bench.closed(1).quantile(0.5) - found.alone
        # Several batches of requests in flight, so that every lane has a full one.
        found.shares[wire] = bench.closed(options.clients or 4 * spec.batches[-1]).total.rate / found.rate
        if wire == "grpc" and spec.limit is not None:
            found.poisson = goodput(bench, spec.limit) / found.rate
            if found.poisson:
                with busy(options.device) as shares:
                    bench.opened(found.poisson * found.rate)
                found.busy = mean(shares) if shares else None
        if wire == "http" and options.peers:
            found.answer = target.client.infer(name, requests[0])["y"]
            found.within = goodput(bench, LIMIT, CONNECTIONS)


@contextlib.contextmanager
def serving(name: str, store: Path, most: int, options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Serve a model; yield the addresses by protocol."""
    command = [sys.executable, "-m", "ingot", "serve", f"{name}:1", "--store", str(store), "--device", options.device]
    command += ["--allow-code", "--isolate", "none", "--max-batch", str(most), *shlex.split(options.serve)]
    log = options.build / f"{name}.log"
    logged = ["sh", "-c", 'exec "$@" 2> "$0"', str(log), *command, "--http-port", "0", "--grpc-port", "0", "--json"]
    try:
        with started(logged) as (line, _):
            listening: dict[str, Any] = json.loads(line)
            yield {"grpc": listening["grpc"], "http": listening["http"]}
    except NoAnswer as error:
        raise SystemExit(f"{error}\n{log.read_text()[-2000:]}") from error


@contextlib.contextmanager
def busy(device: str) -> Iterator[list[float]]:
    """Collect how busy a GPU is while the block runs, as NVIDIA's management library has it; nothing without one."""
    shares: list[float] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.2):
            if (share := nvml.utilization_of(devices.index_of(device))) is not None:
                shares.append(share)

    watcher = threading.Thread(target=watch)
    if devices.kind_of(device) == "cuda":
        watcher.start()
    try:
        yield shares
    finally:
        ended.set()
        if watcher.ident is not None:
            watcher.join()


def section(rows: list[list[str]], command: str, options: argparse.Namespace) -> list[str]:
    """Return the lines of the table and of what it was measured on."""
    gpu = devices.kind_of(options.device) == "cuda"
    place = torch.cuda.get_device_name(options.device) if gpu else f"{devices.describe()}: not a GPU"
    about = f"{place}; ingot {__version__}; torch {torch.__version__}, CUDA {torch.version.cuda}; "
    about += f"Python {platform.python_version()}; {time.strftime('%Y-%m-%d')}; `{command}`"
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), "", about]


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--models", default="mlp,resnet50,bert,decoder", help="comma-separated")
    parser.add_argument("--device", default="cuda:0", help="cpu shows that the benchmark works, and no more")
    parser.add_argument("--small", action="store_true", help="tiny models, for the same")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each window and each batch size")
    parser.add_argument("--windows", type=int, default=5, help="measured under each load")
    parser.add_argument("--max-batch", type=int, default=256)
    parser.add_argument(
        "--clients", type=int, default=0, help="of the closed loop; by default four of the largest batch"
    )
    parser.add_argument("--processes", type=int, default=4, help="of the load generator")
    parser.add_argument("--serve", default="", help="further options of ingot serve, such as '--cuda-graphs off'")
    parser.add_argument("--build", type=Path, default=Path("build/gpu"), help="for the models")
    parser.add_argument("--peers", default="", help="litserve,mosec: other servers to compare with")
    parser.add_argument("--peer-python", type=Path, help="a Python that has the peers and PyTorch for the device")
    parser.add_argument("--peer-build", type=Path, default=Path("build/serving"), help="of benchmarks.serving.install")
    parser.add_argument("--peer-waits", default="1,4,10", help="of peers for a batch, in ms; the best counts")
    parser.add_argument("--write", action="store_true", help="write the table to docs/concepts/benchmarks.md")
    options = parser.parse_args()
    known = specs(small=options.small)
    names = options.models.split(",")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"unknown model '{unknown[0]}'; there are {', '.join(known)}")
    if devices.kind_of(options.device) == "cuda":
        use_torch_precision("tf32")  # of the fp32 that bf16 is compared with; bf16 itself is not affected
    options.build = options.build.absolute()
    options.peers = [peer for peer in options.peers.split(",") if peer]
    options.pythons = pythons(options.peers, options.peer_build.absolute(), options.peer_python)
    rows = []
    for name in names:
        rows.append(measure(name, known[name], options).row(name))
        print(" | ".join(rows[-1]), flush=True)
    lines = section(rows, shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]), options)
    print("\n".join(lines))
    if options.write:
        PAGE.write_text(updated(PAGE.read_text(), lines, "gpu"))


if __name__ == "__main__":
    main()
