"""One way to load a model, in a process of its own: ``python -m benchmarks.model_store.worker WAY SOURCE WIDTH``.

``WAY`` is ``protobuf`` (ONNX Runtime on a file), ``plain`` (a store's archive, without the derived cache) or ``ingot``
(with it). Imports are done first, as both ways need most of them. One line of JSON then tells the seconds until the
first answer; each line of input is a number of rows, answered with the seconds of a call. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime

from ingot.model_store import Store
from ingot.runtime import Repository, Settings
from ingot.tensors import Array

WAYS = ("protobuf", "plain", "ingot")
THREADS = 2

Run = Callable[[Array], object]
# What opens a model, and what waits until it serves as it will for good.
Opened = tuple[Run, Callable[[], object]]


def main() -> None:
    way, source, width = sys.argv[1], sys.argv[2], int(sys.argv[3])
    x = np.random.default_rng(1_000_000).standard_normal((32, width), np.float32)
    start = time.perf_counter()
    run, settle = _protobuf(source) if way == "protobuf" else _archive(Path(source), cached=way == "ingot")
    loaded = time.perf_counter()
    run(x[:1])
    first = time.perf_counter()
    settle()
    seconds = {"loaded": loaded - start, "first": first - start, "settled": time.perf_counter() - start}
    run(x[:1])
    print(json.dumps(seconds), flush=True)
    for line in sys.stdin:
        rows = x[: int(line)]
        start = time.perf_counter()
        run(rows)
        print(time.perf_counter() - start, flush=True)


def _protobuf(path: str) -> Opened:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # as Ingot has it
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(None, {"x": x}), lambda: None


def _archive(store: Path, *, cached: bool) -> Opened:
    model = Repository(Store(store), Settings(device="cpu", derived_cache=cached)).add("layers:1")
    model.load()
    loop = asyncio.new_event_loop()
    return lambda x: loop.run_until_complete(model.infer({"x": x})), model.settle


if __name__ == "__main__":
    main()
