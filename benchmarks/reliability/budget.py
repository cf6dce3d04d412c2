"""Serve far more models than the memory budget holds, and load and unload one model many times.

``python -m benchmarks.reliability.budget`` writes 50 models of 100 MB (5 GB in a temporary folder), serves them under
``--memory-budget 500MB``, and asks them for two minutes: two clients over HTTP and two over gRPC, models by Zipf's law.
Each answer is compared. It prints the share of requests whose model was in memory, that of an ideal cache of as many
models that sees the same requests one by one, the times of requests, and the highest memory of the server above its
level before the first request of a model: PSS, read every 50 ms.

``python -m benchmarks.reliability.budget --cycles 50`` loads, asks and unloads one of them as often through the
management listener, and prints the server's PSS after each tenth unload.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import ingot
from benchmarks.serving.processes import LOAD_CORE, SERVER_CORE, served

_ROWS = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", type=int, default=50)
    parser.add_argument("--megabytes", type=int, default=100, help="weights of a model")
    parser.add_argument("--budget", default="500MB")
    parser.add_argument("--exponent", type=float, default=1.1, help="of Zipf's law")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--cycles", type=int, default=0, help="load and unload one model so often instead")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {LOAD_CORE})
    with tempfile.TemporaryDirectory() as folder:
        result = cycles(Path(folder), arguments) if arguments.cycles else traffic(Path(folder), arguments)
    print(json.dumps(result))
    sys.exit(bool(result.get("wrong") or result.get("failed")))


def write(path: Path, megabytes: int, seed: int) -> np.ndarray[Any, Any]:
    """Write a model of y = x W with random W, and return the first rows of W."""
    columns = megabytes * 10**6 // 4 // _ROWS
    weights = np.random.default_rng(seed).random((_ROWS, columns), np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["y"])],
        path.stem,
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", _ROWS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", columns])],
        [numpy_helper.from_array(weights, "W")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return weights[:4].copy()


def traffic(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of requests under a budget."""
    known = [write(folder / f"m{number}.onnx", arguments.megabytes, number) for number in range(arguments.models)]
    sources = [str(folder / f"m{number}.onnx") for number in range(arguments.models)]
    with served([*sources, "--memory-budget", arguments.budget], [SERVER_CORE]) as (addresses, process):
        level = pss(process.pid) - _sum(addresses["http"], "ingot_model_memory_bytes")
        memory = Memory(process.pid)
        clients = [
            Client(addresses[protocol], known, arguments.exponent, seed)
            for seed, protocol in enumerate(("http", "http", "grpc", "grpc"))
        ]
        end = time.monotonic() + arguments.seconds
        for client in clients:
            client.until = end
            client.start()
        for client in clients:
            client.join()
        memory.ended.set()
        waits = _sum(addresses["http"], "ingot_demand_waits_total")
        resident = _count(addresses["http"], "ingot_model_memory_bytes")
    asked = sorted((began, model) for client in clients for began, _, model in client.spent)
    spent = [seconds for client in clients for _, seconds, _ in client.spent]
    return {
        "answered": len(spent),
        "wrong": sum(client.wrong for client in clients),
        "failed": [str(client.failure) for client in clients if client.failure],
        "in_memory": resident,
        "hit_rate": round(1 - waits / len(spent), 3),
        "hit_rate_ideal_lru": round(_lru([model for _, model in asked], resident), 3),
        "p50_ms": round(1e3 * float(np.quantile(spent, 0.5)), 1),
        "p99_ms": round(1e3 * float(np.quantile(spent, 0.99)), 1),
        "peak_mb": round((memory.highest - level) / 1e6),
        "budget": arguments.budget,
    }


def cycles(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the server's memory while one model is loaded and unloaded."""
    [first, *_] = write(folder / "big.onnx", arguments.megabytes, 0)
    write(folder / "small.onnx", 1, 1)
    socket = folder / "ctl"
    found: list[float] = []
    with served([str(folder / "small.onnx"), "--management", str(socket)], [SERVER_CORE]) as (addresses, process):
        management = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://localhost", timeout=60
        )
        wrong = 0
        for number in range(arguments.cycles + 1):
            body = {"parameters": {"source": str(folder / "big.onnx")}} if number == 0 else {}
            management.post("/v2/repository/models/big/load", json=body).raise_for_status()
            with ingot.Client(addresses["http"]) as client:
                wrong += not np.allclose(client.infer("big", {"x": np.eye(1, _ROWS, dtype=np.float32)})["y"][0], first)
            management.post("/v2/repository/models/big/unload", json={}).raise_for_status()
            found.append(pss(process.pid) / 1e6)
    early, late = float(np.median(found[5:11])), float(np.median(found[-6:]))
    return {
        "wrong": wrong,
        "pss_mb": {number: round(found[number]) for number in range(0, len(found), 10)},
        "growth_percent": round(100 * (late / early - 1), 2),
    }


class Client(threading.Thread):
    """Asks models by Zipf's law; ``spent`` has when each request began, its seconds, and its model."""

    def __init__(self, url: str, known: Sequence[np.ndarray[Any, Any]], exponent: float, seed: int):
        super().__init__(daemon=True)
        self._url = url
        self._known = known
        self._random = np.random.default_rng(seed)
        weights = 1 / np.arange(1, len(known) + 1) ** exponent
        self._shares = weights / weights.sum()
        self.until = 0.0
        self.wrong = 0
        self.failure: Exception | None = None
        self.spent: list[tuple[float, float, int]] = []

    def run(self) -> None:
        try:
            with ingot.Client(self._url) as client:
                while time.monotonic() < self.until:
                    model, row = int(self._random.choice(len(self._known), p=self._shares)), len(self.spent) % 4
                    x = np.zeros((1, _ROWS), np.float32)
                    x[0, row] = 1
                    began = time.perf_counter()
                    answer = client.infer(f"m{model}", {"x": x})["y"][0]
                    self.spent.append((began, time.perf_counter() - began, model))
                    self.wrong += not np.allclose(answer, self._known[model][row])
        except Exception as error:  # noqa: BLE001 - printed with the figures
            self.failure = error


class Memory(threading.Thread):
    """Records the highest PSS of a process."""

    def __init__(self, process: int):
        super().__init__(daemon=True)
        self._process = process
        self.highest = 0
        self.ended = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.ended.wait(0.05):
            self.highest = max(self.highest, pss(self._process))


def pss(process: int) -> int:
    """Return a process's proportional set size in bytes."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Pss:")).split()[1]) << 10


def _values(url: str, metric: str) -> list[float]:
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return [float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric}{{")]


def _sum(url: str, metric: str) -> int:
    return int(sum(_values(url, metric)))


def _count(url: str, metric: str) -> int:
    return sum(value > 0 for value in _values(url, metric))


def _lru(asked: Sequence[int], size: int) -> float:
    """Return the hit rate of a cache of the models used last."""
    cache: collections.OrderedDict[int, None] = collections.OrderedDict()
    hits = 0
    for model in asked:
        hits += model in cache
        cache[model] = None
        cache.move_to_end(model)
        if len(cache) > size:
            cache.popitem(last=False)
    return hits / len(asked)


if __name__ == "__main__":
    main()
