"""Substitutes for clocks, and models whose calls advance them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ingot.runtime import Engine
from ingot.runtime.profiling import profile
from ingot.tensors import Array, DType, Signature, TensorSpec

SIGNATURE = Signature(
    (TensorSpec("x", DType.FP32, ("batch", 1)),), (TensorSpec("y", DType.FP32, ("batch", 1)),), "batch"
)
EXAMPLE = {"x": np.zeros((1, 1), np.float32)}


@dataclass
class Machine:
    """A machine whose clocks advance only by the calls of its models.

    Other programs ``delay`` a call, and by emptying the caches add ``jitter`` to its CPU time.
    """

    delay: Callable[[], float] = lambda: 0.0
    jitter: Callable[[], float] = lambda: 0.0
    wall: float = 0.0
    cpu: float = 0.0
    calls: int = 0

    def perf_counter(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.cpu


@dataclass
class Model:
    """A model whose calls take so many seconds."""

    machine: Machine
    seconds: float
    device: str = "cpu"
    sizes: list[int] = field(default_factory=list)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        self.sizes.append(len(inputs["x"]))
        self.machine.calls += 1
        seconds = self.seconds + self.machine.jitter()
        self.machine.cpu += seconds
        self.machine.wall += seconds + self.machine.delay()
        return inputs


def bursts(mean: float, seed: int = 0) -> Callable[[], float]:
    """Return delays that other programs cause: exponential, so that most are short and some are long."""
    rng = np.random.default_rng(seed)
    return lambda: float(rng.exponential(mean))


def race(*models: Model, **options: Any) -> list[profile.Latencies]:
    engines = [cast(Engine, model) for model in models]
    return profile.measure_together(engines, SIGNATURE, EXAMPLE, **options)
