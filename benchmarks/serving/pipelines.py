"""A pipeline of three nodes against the same models called one after the other in this process.

``python -m benchmarks.serving.pipelines`` prints, for interleaved rounds, the median time of a request of one client,
and the requests of 32 clients per second of CPU time: by the pipeline, by a coroutine that calls the models' own
schedulers in turn, and by one that runs the graphs in ONNX Runtime itself, without batches.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import onnxruntime

import ingot
from ingot import RunningServer
from ingot.protocol.requests import InferRequest, Template
from ingot.tensors import Array
from tests import onnx_models

_WIDTH, _PRODUCTS = 512, 4
_ROUNDS, _CLIENTS, _REQUESTS = 5, 32, 640

Ask = Callable[[Array], Awaitable[Array]]


def config() -> str:
    """Return a pipeline of the models a, b and c, each of which reads the one before it."""
    lines = ["[pipelines.chain]", 'inputs = ["x"]', 'outputs = { y = "third.y" }']
    sources = {"first": ("a", "x"), "second": ("b", "first.y"), "third": ("c", "second.y")}
    for node, (model, source) in sources.items():
        lines += [f"[pipelines.chain.nodes.{node}]", f'model = "{model}"', f'inputs = {{ x = "{source}" }}']
    return "\n".join(lines)


async def median(ask: Ask, x: Array, count: int = 100) -> float:
    """Return the median seconds of requests one after the other."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        await ask(x)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


async def rate(ask: Ask, x: Array) -> float:
    """Return the requests per second of CPU time of several clients, which other work on the machine changes less."""

    async def client() -> None:
        for _ in range(_REQUESTS // _CLIENTS):
            await ask(x)

    began = time.process_time()
    await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return _REQUESTS / (time.process_time() - began)


def asking(server: RunningServer, path: Path) -> dict[str, Ask]:
    """Return the three ways to run the chain."""
    plane, template = server._server.plane, Template("chain")
    models = [server._server.repository.model(name) for name in "abc"]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    async def pipeline(x: Array) -> Array:
        return (await plane.infer(InferRequest(template, {"x": x}), "python")).arrays["y"]

    async def in_turn(x: Array) -> Array:
        for model in models:
            x = (await model.infer({"x": x}))["y"]
        return x

    async def alone(x: Array) -> Array:
        for _ in models:
            [x] = session.run(None, {"x": x})
        return x

    return {"pipeline": pipeline, "in turn": in_turn, "no server": alone}


async def measured(ways: dict[str, Ask], x: Array) -> None:
    """Print the medians of the rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, ask in ways.items():
            times[name].append(await median(ask, x))
            rates[name].append(await rate(ask, x))
    found = {name: (statistics.median(times[name]), statistics.median(rates[name])) for name in ways}
    for name, (seconds, requests) in found.items():
        rated = f"{_CLIENTS} clients {requests:8.0f} requests per second of CPU time"
        print(f"{name:10} p50 of one client {1e3 * seconds:7.3f} ms, {rated}")
    for name in ("in turn", "no server"):
        differences = [mine - other for mine, other in zip(times["pipeline"], times[name], strict=True)]
        ratios = [mine / other for mine, other in zip(rates["pipeline"], rates[name], strict=True)]
        print(
            f"pipeline - {name}: {1e3 * statistics.median(differences):.3f} ms at p50; throughput ratio "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    """Run all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.onnx")
        onnx_models.matmuls(path, _WIDTH, _PRODUCTS)
        Path(folder, "ingot.toml").write_text(config())
        sources = [f"{name}={path}" for name in "abc"]
        options = {"http_port": 0, "grpc_port": 0, "device": "cpu", "threads": 1}
        with ingot.serve(*sources, config=Path(folder, "ingot.toml"), **options) as server:  # type: ignore[arg-type]
            x = np.ones((1, _WIDTH), np.float32)
            done = asyncio.run_coroutine_threadsafe(measured(asking(server, path), x), server.loop)
            done.result()


if __name__ == "__main__":
    main()
