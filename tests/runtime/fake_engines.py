"""Fake engines for tests of the runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from ingot.runtime import BaseEngine
from ingot.tensors import Array, DType, Signature, TensorSpec

DOUBLER = Signature((TensorSpec("x", DType.FP32, ("batch", 2)),), (TensorSpec("y", DType.FP32, ("batch", 2)),), "batch")


class FunctionEngine(BaseEngine):
    """Runs a Python function; ``gate``, if given, holds every call until it is set. Its calls cannot be ended."""

    platform = "test"
    device = "cpu"

    def __init__(
        self,
        function: Callable[[Mapping[str, Array]], dict[str, Array]] = lambda inputs: {"y": inputs["x"] * 2},
        signature: Signature = DOUBLER,
        gate: threading.Event | None = None,
    ):
        self.signature = signature
        self.settings: Mapping[str, str] = {}
        self.calls: list[int] = []
        self.closed = False
        self.terminations = 0
        self._function = function
        self._gate = gate

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.calls.append(len(next(iter(inputs.values()))))
        if self._gate is not None:
            self._gate.wait(30)
        return self._function(inputs)

    def terminate(self) -> None:
        self.terminations += 1

    def close(self) -> None:
        self.closed = True
