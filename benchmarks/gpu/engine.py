"""The engine alone: a module at several batch sizes, with its inputs on the device already."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.gpu.models import Spec
from ingot.runtime.engines.pytorch.torch_arrays import to_torch, torch_dtype
from ingot.tensors import DType, TensorSpec


def timed(spec: Spec, dtype: DType, device: str, seconds: float, batches: tuple[int, ...]) -> dict[int, float]:
    """Return the median seconds of a call by batch size; sizes without enough memory are left out."""
    module = spec.module(torch_dtype(dtype)).to(device)
    found = {}
    for size in batches:
        sample = spec.sample(np.random.default_rng(3), dtype)
        batch = np.repeat(sample, size, 0)
        inputs = to_torch(TensorSpec("x", DType.of(batch), batch.shape), batch).to(device)
        try:
            with torch.no_grad():
                found[size] = _seconds(*_callable(module, inputs), seconds)
        except torch.OutOfMemoryError:
            break
    del module
    torch.cuda.empty_cache()  # a server is next
    return found


def _callable(module: nn.Module, inputs: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a function that runs the module, as a CUDA graph on a GPU, and one that waits for it."""
    if inputs.device.type != "cuda":
        return lambda: module(inputs), lambda: None
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        for _ in range(3):
            module(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(inputs)
    return graph.replay, torch.cuda.synchronize


def _seconds(run: Callable[[], object], wait: Callable[[], object], budget: float) -> float:
    """Return the median seconds of a call, over rounds of several, so that the wait does not count."""
    times: list[float] = []
    end = time.perf_counter() + budget
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        for _ in range(5):
            run()
        wait()
        times.append((time.perf_counter() - began) / 5)
    return median(times)
