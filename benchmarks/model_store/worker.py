"""One way to load a model, in its own process: ``python -m benchmarks.model_store.worker WAY SOURCE WIDTH``.

``WAY`` is ``protobuf`` (ONNX Runtime on a file), ``plain`` (a store's archive, without the derived cache), ``ingot``
(with it) or ``early`` (the engine that serves such an archive until the packed weights do, and stays). Imports come
first, as all ways need most of them. One line of JSON then reports the seconds until the model is loaded, has answered
and has settled on its engine, the answers before and after that, and the state of the derived cache. Each line of input
is a number of rows, answered with the seconds of a call. The process ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime

from ingot.model_store import Store
from ingot.runtime import Settings
from ingot.runtime.loading.prepacked import Prepacked
from ingot.runtime.machine import devices
from ingot.serving import Repository
from ingot.tensors import Array

WAYS = ("protobuf", "plain", "ingot")
DEADLINE = 300.0
"""Seconds after which whatever is waited for counts as failed."""


@dataclass(frozen=True)
class Opened:
    """A model that answers; ``settle`` waits for its final engine and returns the state of the derived cache."""

    run: Callable[[Array], Array]
    settle: Callable[[], str | None] = lambda: None


def main() -> None:
    way, source, width = sys.argv[1], sys.argv[2], int(sys.argv[3])
    x = np.random.default_rng(1_000_000).standard_normal((32, width), np.float32)
    start = time.perf_counter()
    opened = OPEN[way](source)
    loaded = time.perf_counter()
    early = opened.run(x[:1])
    first = time.perf_counter()
    result = opened.settle()
    seconds = {"loaded": loaded - start, "first": first - start, "settled": time.perf_counter() - start}
    answers = [early.tolist(), opened.run(x[:1]).tolist()]
    print(json.dumps({"seconds": seconds, "answers": answers, "result": result}), flush=True)
    for line in sys.stdin:
        rows = x[: int(line)]
        start = time.perf_counter()
        opened.run(rows)
        print(time.perf_counter() - start, flush=True)


def _protobuf(source: str) -> Opened:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = devices.cpu_count()  # this and spinning as Ingot has them
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return Opened(lambda x: session.run(None, {"x": x})[0])


def _archive(source: str, *, cached: bool) -> Opened:
    repository = Repository(Store(Path(source)), Settings(device="cpu", derived_cache=cached))
    model = repository.add("layers:1")
    model.load()
    loop = asyncio.new_event_loop()

    def settle() -> str | None:
        if not model.settle(DEADLINE):
            raise SystemExit("the model did not settle")
        samples = [sample for metric in repository.metrics.derived_cache.collect() for sample in metric.samples]
        found = [sample.labels["result"] for sample in samples if sample.name.endswith("_total") and sample.value]
        return found[0] if found else None

    return Opened(lambda x: loop.run_until_complete(model.infer({"x": x}, DEADLINE))["y"], settle)


def _early(source: str) -> Opened:
    settings = Settings(device="cpu")
    prepacked = Prepacked.of_variant(Store(Path(source)).get("layers:1").variant(), settings)
    engine = prepacked and prepacked.open_early(devices.cpu_count(), lambda _: None)
    if not engine:
        raise SystemExit("this model is not served before its weights are packed")
    return Opened(lambda x: engine.run({"x": x})["y"])


OPEN: dict[str, Callable[[str], Opened]] = {
    "protobuf": _protobuf,
    "plain": lambda source: _archive(source, cached=False),
    "ingot": lambda source: _archive(source, cached=True),
    "early": _early,
}

if __name__ == "__main__":
    main()
