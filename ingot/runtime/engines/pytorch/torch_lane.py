"""PyTorch in a pipeline: operators enqueue their kernels in the pipeline's stream, one by one or as a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ingot import foreign
from ingot.errors import Unsupported
from ingot.runtime.engines.pytorch.torch_arrays import from_torch, torch_dtype
from ingot.runtime.gpu.graphs import Graphs
from ingot.runtime.gpu.pipeline import Lane, OnDevice, Pipeline
from ingot.tensors import Array, DType, Signature

Call = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


class Backend(Protocol):
    """PyTorch on one device: its memory by address, its streams, and graphs of its work."""

    def tensor(self, address: int, shape: Sequence[int], dtype: DType) -> torch.Tensor:
        """Return memory of the device as a tensor, which does not own it."""
        ...

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Let the operators of this thread run in a stream."""
        ...

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record the work of a function in the current stream without running it; return what runs it there.

        Its intermediate results are in memory that all graphs share, since only one runs at a time.

        Raises:
            Exception: the work cannot be captured.
        """
        ...

    def alike(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
        """Wait for the work of the current stream, and return whether tensors are equal except for rounding."""
        ...

    def close(self) -> None:
        """Return memory to the device that no tensor uses."""
        ...


@dataclass(frozen=True)
class _Captured:
    """A graph: the addresses that it reads, with the tensors there, and the tensors that it writes."""

    addresses: Mapping[str, int]
    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]
    replay: Callable[[], None]


class TorchLane:
    """One of the batches that a model has in flight.

    Outputs that operators allocate are kept until they are copied out. A graph writes its outputs to memory of this
    lane, and the lane's next batch starts when they have been copied out.

    Args:
        call: the model.
        pipeline: shared by the lanes of the model.
        backend: of the pipeline's device.
        signature: the model's signature.
        graphs: which batches are captured; None for none.
    """

    def __init__(
        self, call: Call, pipeline: Pipeline, backend: Backend, signature: Signature, graphs: Graphs | None = None
    ):
        self._call = call
        self._stream = pipeline.compute
        self._backend = backend
        self._signature = signature if graphs is None else graphs.signature
        self._graphs = graphs
        self._captured: dict[int, _Captured] = {}
        rooms = {} if graphs is None else graphs.rooms
        self._lane = Lane(pipeline, self._launch, [spec.name for spec in signature.inputs], rooms)

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Return the outputs, in order; the errors are those of :meth:`.Lane.start` and of the model."""
        return self._lane.run(inputs)

    def close(self) -> None:
        """Free the lane's memory of the device."""
        self._captured = {}
        self._lane.close()

    def _launch(self, inputs: Mapping[str, Array], addresses: Mapping[str, int]) -> list[OnDevice | Array]:
        with self._backend.current(self._stream):
            graphs = self._graphs
            samples = 0 if graphs is None else graphs.samples(inputs)
            size = None if graphs is None else graphs.size_of(samples)
            if graphs is None or size is None:
                shapes = {name: array.shape for name, array in inputs.items()}
                return [self._placed(output) for output in self._call(self._tensors(addresses, shapes))]
            outputs = self._run_captured(graphs, size, samples, addresses)
            if samples == size:
                return [self._placed(output) for output in outputs]
            axes = self._signature.batch_axes(self._signature.outputs)
            return [
                self._placed(output.narrow(axes[spec.name], 0, samples))
                for spec, output in zip(self._signature.outputs, outputs, strict=True)
            ]

    def _run_captured(
        self, graphs: Graphs, size: int, samples: int, addresses: Mapping[str, int]
    ) -> Sequence[torch.Tensor]:
        """Replay the graph of a size; the first batch of a size runs without one, and is then captured."""
        found = self._captured.get(size)
        if found is not None and found.addresses != addresses:  # a larger batch has moved the inputs
            self._captured, found = {}, None
        if found is not None:
            self._fill(found.inputs, samples, size)
            found.replay()
            return found.outputs
        shapes = {spec.name: graphs.shape_of(spec, size) for spec in self._signature.inputs}
        values = self._tensors(addresses, shapes)
        self._fill(values, samples, size)
        # Libraries choose kernels and allocate workspaces in the first call, which a graph could not contain.
        outputs = self._call([*values])
        if not all(map(self._backend.has, outputs)):
            graphs.give_up("the model computes an output on the host")
            return outputs
        captured = foreign.outcome(functools.partial(self._capture, values, outputs, addresses))
        if isinstance(captured, Exception):
            graphs.give_up(captured)
        else:
            self._captured[size] = captured
        return outputs

    def _capture(
        self, values: Sequence[torch.Tensor], like: Sequence[torch.Tensor], addresses: Mapping[str, int]
    ) -> _Captured:
        # Not in the memory that graphs share: another lane's graph may run while these are copied out.
        outputs = [torch.empty(output.shape, dtype=output.dtype, device=output.device) for output in like]

        def work() -> None:
            for target, output in zip(outputs, self._call([*values]), strict=True):
                target.copy_(output)

        replay = self._backend.capture(work)
        replay()
        if not self._backend.alike(outputs, like):  # such as of a model that changes its inputs, or is random
            raise Unsupported("a replayed batch has other outputs than one without a graph")
        return _Captured(dict(addresses), values, outputs, replay)

    def _tensors(self, addresses: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> list[torch.Tensor]:
        return [
            self._backend.tensor(addresses[spec.name], shapes[spec.name], spec.dtype) for spec in self._signature.inputs
        ]

    def _fill(self, values: Sequence[torch.Tensor], samples: int, size: int) -> None:
        """Enlarge a batch by copies of its last sample, whose values are known to be valid."""
        if samples == size:
            return
        for spec, value in zip(self._signature.inputs, values, strict=True):
            if spec.axis(self._signature.batch) is not None:
                value[samples:].copy_(value[samples - 1 : samples])

    def _placed(self, output: torch.Tensor) -> OnDevice | Array:
        dtype = DType.parse(str(output.dtype).removeprefix("torch."))
        if not self._backend.has(output):
            return from_torch(output.clone())
        output = output.contiguous()
        return OnDevice(output.data_ptr(), tuple(output.shape), dtype, output)


# Graphs whose capture failed: PyTorch's allocator of pinned memory keeps pointers to them, and nothing removes those.
_abandoned: list[Any] = []
_backends: weakref.WeakSet[CudaBackend] = weakref.WeakSet()


class _Memory:
    """Memory of a GPU, as the protocol of CUDA arrays describes it."""

    def __init__(self, address: int, shape: Sequence[int], typestr: str):
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "typestr": typestr,
            "strides": None,
            "version": 3,
        }


class CudaBackend:
    """PyTorch on an NVIDIA GPU: a :class:`Backend`."""

    def __init__(self, index: int):
        self._device = torch.device("cuda", index)
        self._pool: Any = None
        _backends.add(self)
        torch.cuda.default_stream(self._device).synchronize()  # in which the weights were loaded

    def tensor(self, address: int, shape: Sequence[int], dtype: DType) -> torch.Tensor:
        if not math.prod(shape):
            return torch.empty(shape, dtype=torch_dtype(dtype), device=self._device)
        bits = DType.INT16 if dtype is DType.BF16 else dtype  # which the protocol lacks
        found = torch.as_tensor(_Memory(address, shape, bits.numpy.str), device=self._device)
        return found.view(torch.bfloat16) if dtype is DType.BF16 else found

    def current(self, stream: int) -> AbstractContextManager[Any]:
        external: Any = torch.cuda.ExternalStream  # PyTorch annotates neither of the two
        found: AbstractContextManager[Any] = torch.cuda.stream(external(stream, device=self._device))
        return found

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._abandon, graph)
            # Unlike the context manager torch.cuda.graph, this does not wait for all work of the GPU; and calls of
            # other threads, such as for pinned memory, do not end the capture.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            work()
            graph.capture_end()
            on_error.pop_all()
        return graph.replay

    def _abandon(self, graph: Any) -> None:
        """End a capture that failed, so that neither its stream nor PyTorch's allocators keep recording."""
        try:
            graph.capture_end()
        except RuntimeError:  # the capture is invalid, and capture_end returns before it reaches the allocators
            graph.reset()
            _abandoned.append(graph)
            # As capture_end would: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/cuda/CUDAGraph.cpp
            with contextlib.suppress(RuntimeError):  # the capture failed before it reached the allocators
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
                torch._C._cuda_releasePool(self._device.index, self._pool)

    def alike(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
        return alike(first, second)

    def close(self) -> None:
        self._pool = None
        _backends.discard(self)
        if not _backends:  # whose graphs use the workspaces
            # One for each stream that multiplied matrices, which PyTorch keeps when the stream is gone:
            # https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/cuda/CublasHandlePool.cpp
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def alike(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors are equal except for rounding; on a GPU, this waits for the current stream."""
    return all(
        torch.allclose(one.double(), other.double(), rtol=1e-2, atol=1e-3, equal_nan=True)
        for one, other in zip(first, second, strict=True)
    )
