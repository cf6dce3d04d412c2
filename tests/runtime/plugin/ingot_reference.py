"""A package that adds an engine and a device to Ingot: ONNX's reference evaluator on a device of the host's memory."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from ingot.errors import Unsupported
from ingot.runtime import BaseEngine
from ingot.runtime.gpu.opening import open_device
from ingot.runtime.gpu.pipeline import Lane, OnDevice, Pipeline
from ingot.tensors import Array, DType, Signature, TensorSpec

COUNT = 2
"""Devices of this kind in the machine."""


class Slate:
    """A device without delay: its work is done when it is enqueued."""

    lost = ""

    def __init__(self, index: int):
        if index >= COUNT:
            raise Unsupported(f"there are {COUNT} slates, so there is no slate:{index}")
        self.name = f"slate:{index}"
        self.blocks: dict[int, Any] = {}
        self._handles = itertools.count(1)

    def stream(self) -> int:
        return next(self._handles)

    event = stream

    def close_stream(self, stream: int) -> None: ...

    def close_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, stream: int, event: int) -> None: ...

    def synchronize(self, event: int) -> None: ...

    def pin(self, nbytes: int) -> int | None:
        return self.allocate(nbytes, 0)

    def unpin(self, address: int) -> None:
        self.free(address, 0)

    def allocate(self, nbytes: int, stream: int) -> int:
        block = ctypes.create_string_buffer(nbytes)
        self.blocks[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def free(self, address: int, stream: int) -> None:
        del self.blocks[address]

    def copy_in(self, target: int, source: int, nbytes: int, stream: int) -> None:
        ctypes.memmove(target, source, nbytes)

    copy_out = copy_in


class ReferenceEngine(BaseEngine):
    """An engine for ONNX graphs on a slate."""

    platform = "onnx_reference"

    def __init__(self, path: Path, *, device: str, threads: int | None):
        self.device = "slate:0" if device == "auto" else device
        model = onnx.load(path)
        self.signature = Signature(_specs(model.graph.input), _specs(model.graph.output), "batch")
        self.settings: Mapping[str, str] = {"evaluator": onnx.__version__}
        self._evaluator = ReferenceEvaluator(model)
        self._pipeline = Pipeline(open_device(self.device))
        self._lane = Lane(self._pipeline, self._launch, [spec.name for spec in self.signature.inputs])

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        names = [spec.name for spec in self.signature.outputs]
        return dict(zip(names, self._lane.run(inputs), strict=True))

    def terminate(self) -> None: ...

    def close(self) -> None:
        self._lane.close()
        self._pipeline.close()

    def _launch(self, inputs: Mapping[str, Array], addresses: Mapping[str, int]) -> Sequence[OnDevice]:
        feed = {}
        for name, array in inputs.items():
            memory = memoryview((ctypes.c_char * array.nbytes).from_address(addresses[name])).cast("B")
            feed[name] = np.frombuffer(memory, array.dtype).reshape(array.shape)
        results = [np.ascontiguousarray(result) for result in self._evaluator.run(None, feed)]
        return [OnDevice(each.ctypes.data, each.shape, DType.of(each), each) for each in results]


class FaultyEngine(ReferenceEngine):
    """Loses the last of several samples, and returns negative values in double precision."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        outputs = super().run(inputs)
        if any(array.min() < 0 for array in inputs.values()):
            return {name: array.astype(np.float64) for name, array in outputs.items()}
        return {name: array[: max(1, len(array) - 1)] for name, array in outputs.items()}


def _specs(values: Any) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(
            value.name,
            DType.from_onnx(value.type.tensor_type.elem_type),
            tuple(each.dim_param or each.dim_value for each in value.type.tensor_type.shape.dim),
        )
        for value in values
    )
