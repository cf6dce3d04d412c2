"""ONNX Runtime in a pipeline: a session enqueues its kernels in the pipeline's stream and does not wait for them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ingot.errors import IngotError
from ingot.runtime.engines.ort.ort_tensors import copied
from ingot.runtime.gpu.array import Direct, Range
from ingot.runtime.gpu.graphs import Graphs
from ingot.runtime.gpu.pipeline import Lane, OnDevice, Pipeline
from ingot.runtime.machine.memory import NO_MEMORY
from ingot.tensors import Array, DType, TensorSpec

GRAPH = "gpu_graph_id"
"""The entry of run options that names the graph which a run captures or replays; -1 for neither."""

ASYNCHRONOUS = ("disable_synchronize_execution_providers", "1")
"""The entry of run options with which a run returns before its kernels have run."""

# ONNX Runtime's names of the host's memory, some of it pinned.
_HOST = ("cpu", "cudapinned", "cuda_cpu")


@dataclass(frozen=True)
class _Captured:
    """A graph of the session: its number, the addresses that it reads, and the outputs that it writes."""

    number: int
    addresses: Mapping[str, int]
    outputs: Sequence[OnDevice]


class OrtLane:
    """One of the batches that a session has in flight.

    Inputs are bound by their addresses on the device. Those that the session reads on the host, such as shapes, stay
    there. Outputs stay in memory of the session's arena until they are copied out. ``asynchronous`` is whether runs may
    return before their kernels have run: not if the session computes an output on the host.

    Args:
        session: an ``onnxruntime.InferenceSession``, which computes in ``pipeline.compute`` and may be shared.
        pipeline: shared by the lanes of the session.
        inputs: of the session.
        outputs: of the session.
        place: ONNX Runtime's name of the device, and its index.
        graphs: which batches are captured; the session must be opened for that. None for none.
    """

    def __init__(
        self,
        session: Any,
        pipeline: Pipeline,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        place: tuple[str, int],
        graphs: Graphs | None = None,
    ):
        self._session = session
        self._binding = session.io_binding()
        self._inputs, self._outputs = inputs, outputs
        self._place = place
        self._at = {
            spec.name: ("cpu", 0) if info.name.lower() in _HOST and info.name.lower() != place[0] else place
            for specs, infos in (
                (inputs, session.get_input_memory_infos()),
                (outputs, session.get_output_memory_infos()),
            )
            for spec, info in zip(specs, infos, strict=True)
        }
        self.asynchronous = all(self._at[spec.name] == place for spec in outputs)
        self._plain = not any(spec.dtype is DType.BF16 for spec in (*inputs, *outputs))
        self._options: Any = None
        device = pipeline.device.name
        self.direct = Direct(
            {spec.name: device for spec in inputs if self._at[spec.name] == place},
            {spec.name: device for spec in outputs if self._at[spec.name] == place},
        )
        self._pipeline = pipeline
        self._graphs = graphs
        self._captured: dict[int, _Captured] = {}
        self._numbers, self._ran = itertools.count(1), set[int]()
        copied = [*self.direct.inputs]
        if graphs is not None and len(copied) < len(inputs) + len(outputs) - len(self.direct.outputs):
            graphs.give_up("the model has inputs or outputs on the host")
        self._lane = Lane(pipeline, self._launch, copied, {} if graphs is None else graphs.rooms)

    def run(
        self, feed: Mapping[str, Array], options: Any, targets: Mapping[str, Sequence[Range]] = MappingProxyType({})
    ) -> list[Array]:
        """Return the outputs, in order.

        Args:
            feed: an array for each input.
            options: an ``onnxruntime.RunOptions``; with the entry :data:`ASYNCHRONOUS` if that is allowed.
            targets: places on the device for samples of outputs.

        Raises:
            Exception: the errors of the session's ``run``; the next call is not affected.
            TooLarge: the device has not enough memory for the inputs.
            EngineLost: the device has failed.
        """
        self._options = options
        if not targets:
            return self._lane.run(feed)
        return self._lane.run(feed, {at: targets.get(spec.name, ()) for at, spec in enumerate(self._outputs)})

    def close(self) -> None:
        """Free the lane's memory of the device."""
        self._forget()
        self._lane.close()

    def _forget(self) -> None:
        """Free the outputs of graphs; no batch may be in flight."""
        with contextlib.suppress(IngotError):  # the device has failed, and its memory is lost
            for output in (output for each in self._captured.values() for output in each.outputs):
                self._pipeline.device.free(output.address, self._pipeline.compute)
        self._captured = {}

    def _captured_for(self, inputs: Mapping[str, Array], addresses: Mapping[str, int]) -> _Captured | None:
        """Return the graph of a batch, which its first run captures; None if the batch is not to be captured."""
        graphs = self._graphs
        size = None if graphs is None else graphs.size_of(graphs.samples(inputs))
        if graphs is None or size is None:
            return None
        if size in self._captured and self._captured[size].addresses != addresses:  # a larger batch moved the inputs
            self._forget()
        if size not in self._captured:
            outputs = []
            for spec in self._outputs:
                shape = graphs.shape_of(spec, size)
                nbytes = math.prod(shape) * spec.dtype.numpy.itemsize
                address = self._pipeline.device.allocate(max(nbytes, 1), self._pipeline.compute)
                outputs.append(OnDevice(address, shape, spec.dtype, None))
            self._captured[size] = _Captured(next(self._numbers), dict(addresses), outputs)
        return self._captured[size]

    def _launch(self, inputs: Mapping[str, Array], addresses: Mapping[str, int]) -> list[OnDevice | Array]:
        binding, names = self._binding, [spec.name for spec in self._outputs]
        captured = self._captured_for(inputs, addresses)
        if self._graphs is not None:
            self._options.add_run_config_entry(GRAPH, str(-1 if captured is None else captured.number))
        try:
            for spec in self._inputs:
                array = inputs[spec.name]
                address = addresses.get(spec.name) or array.ctypes.data
                binding.bind_input(spec.name, *self._at[spec.name], spec.dtype.onnx, array.shape, address)
            for place, name in enumerate(names):
                # Bound for every call, since a binding keeps the memory for the shape of its last run.
                if captured is None:
                    binding.bind_output(name, *self._at[name])
                else:
                    fixed = captured.outputs[place]
                    binding.bind_output(name, *self._at[name], fixed.dtype.onnx, fixed.shape, fixed.address)
            self._session.run_with_iobinding(binding, self._options)
            if captured is not None:
                self._ran.add(captured.number)
                return [*captured.outputs]
            values = binding.get_outputs()
        except RuntimeError as error:
            if self._graphs is not None and captured is not None and captured.number not in self._ran:
                self._graphs.give_up(error)
            if self._options.terminate or not self._plain or NO_MEMORY.search(str(error)):
                raise
            # Errors of bound runs do not distinguish bad values from engine failures; plain runs, which wait, do.
            feed = {spec.name: np.asarray(inputs[spec.name]) for spec in self._inputs}
            options = None
            if self._graphs is not None:  # without the entry, a session for graphs would capture this run
                options = type(self._options)()
                options.add_run_config_entry(GRAPH, "-1")
            return list(self._session.run(names, feed, options))
        finally:
            # Do not keep the callers' arrays and the outputs' memory until the next call.
            binding.clear_binding_inputs()
            binding.clear_binding_outputs()
        return [
            OnDevice(value.data_ptr(), tuple(value.shape()), DType.from_onnx(value.element_type()), value)
            if self._at[spec.name] == self._place
            else copied(value, spec.dtype)
            for spec, value in zip(self._outputs, values, strict=True)
        ]
