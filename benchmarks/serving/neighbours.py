"""How much a model slows another one of the same server.

``python -m benchmarks.serving.neighbours`` serves a light model (an MLP) and a heavy one (some 10 ms for a batch), and
measures the light one's requests, 50 in a second, first alone and then while 16 clients keep the heavy one busy. It
does so for a server in one process and with engine processes, on one core and on all. The load comes from the last
core, which it shares with a server on all. The heavy model's throughput is compared with that without the light one.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import ingot
from benchmarks.serving.processes import LOAD_CORE, SERVER_CORE, served

_RATE = 50.0
_CLIENTS = 16
_SERVERS = {"one process": (), "engine processes": ("--isolate", "all")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _mlp(Path(folder) / "light.onnx", 64, 2)
        _mlp(Path(folder) / "heavy.onnx", 2048, 4)
        sources = [str(Path(folder) / f"{name}.onnx") for name in ("light", "heavy")]
        for cores in ((SERVER_CORE,), tuple(os.sched_getaffinity(0))):
            for name, options in _SERVERS.items():
                found = measure([*sources, *options], cores, arguments.seconds)
                print(json.dumps({"server": name, "cores": len(cores), **found}), flush=True)


def _mlp(path: Path, width: int, layers: int) -> None:
    random = np.random.default_rng(0)
    nodes, constants, value = [], [], "x"
    for layer in range(layers):
        constants.append(numpy_helper.from_array(random.random((width, width), np.float32) / width, f"W{layer}"))
        nodes.append(helper.make_node("MatMul", [value, f"W{layer}"], [f"h{layer}"]))
        value = "y" if layer == layers - 1 else f"r{layer}"
        nodes.append(helper.make_node("Relu", [f"h{layer}"], [value]))
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, path.stem, tensors[:1], tensors[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def measure(arguments: Sequence[str], cores: Sequence[int], seconds: float) -> dict[str, Any]:
    """Return the figures of one server."""
    with _served(arguments, cores) as url:
        _light(url, 1.0)
        alone = _light(url, seconds)
        undisturbed = _heavy(url, seconds, lambda: time.sleep(seconds))
        spent: list[float] = []
        disturbed = _heavy(url, seconds, lambda: spent.extend(_light(url, seconds)))
    figures = {share: (float(np.quantile(alone, share)), float(np.quantile(spent, share))) for share in (0.5, 0.99)}
    return {
        "light_alone_ms": {f"p{share * 100:g}": round(1e3 * before, 2) for share, (before, _) in figures.items()},
        "light_ratio": {f"p{share * 100:g}": round(after / before, 2) for share, (before, after) in figures.items()},
        "light_later_by_batches": round((figures[0.99][1] - figures[0.99][0]) / undisturbed[1], 2),
        "heavy_batch_ms": round(1e3 * undisturbed[1], 1),
        "heavy_throughput_ratio": round(disturbed[0] / undisturbed[0], 2),
    }


def _light(url: str, seconds: float) -> list[float]:
    """Send requests at a constant rate, and return their times, counted from when each was due."""
    x, spent = np.zeros((1, 64), np.float32), []
    with ingot.Client(url) as client:
        begin = time.perf_counter()
        for number in range(int(seconds * _RATE)):
            due = begin + number / _RATE
            time.sleep(max(0.0, due - time.perf_counter()))
            client.infer("light", {"x": x})
            spent.append(time.perf_counter() - due)
    return spent


def _heavy(url: str, seconds: float, during: Any) -> tuple[float, float]:
    """Keep the heavy model busy during a call; return its answers in a second, and the seconds of a batch."""
    x, ended = np.zeros((4, 2048), np.float32), threading.Event()
    counts = [0] * _CLIENTS

    def ask(place: int) -> None:
        with ingot.Client(url) as client:
            while not ended.is_set():
                client.infer("heavy", {"x": x})
                counts[place] += 1

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    before, calls, began = sum(counts), _calls(url), time.perf_counter()
    during()
    took = time.perf_counter() - began
    answered, called = sum(counts) - before, _calls(url)
    ended.set()
    for thread in threads:
        thread.join()
    return answered / took, (called[1] - calls[1]) / max(1.0, called[0] - calls[0])


def _calls(url: str) -> tuple[float, float]:
    """Return the number and the seconds of the heavy model's engine calls."""
    with ingot.Client(url) as client:
        lines = client.metrics().splitlines()
    found = {
        name: next(
            float(line.split()[-1]) for line in lines if line.startswith(f'ingot_engine_seconds_{name}{{model="heavy"')
        )
        for name in ("count", "sum")
    }
    return found["count"], found["sum"]


@contextmanager
def _served(arguments: Sequence[str], cores: Sequence[int]) -> Iterator[str]:
    with served(arguments, cores) as (addresses, _):
        os.sched_setaffinity(0, {LOAD_CORE})
        try:
            yield addresses["http"]
        finally:
            os.sched_setaffinity(0, range(os.cpu_count() or 1))


if __name__ == "__main__":
    main()
