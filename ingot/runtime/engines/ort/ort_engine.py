"""ONNX Runtime, on the CPU or on CUDA."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ingot.errors import EngineLost, EngineTimeout, IngotError, InternalError, InvalidArgument, TooLarge, Unsupported
from ingot.runtime.engines.engine import Capabilities
from ingot.runtime.engines.ort import ort_arena, ort_session, ort_zipmap
from ingot.runtime.engines.ort.convolutions import (
    CANDIDATES,
    Convolutions,
    convolutions_of,
    fastest,
    measurable,
)
from ingot.runtime.engines.ort.ort_lane import ASYNCHRONOUS, OrtLane
from ingot.runtime.engines.ort.ort_tensors import batch_symbol, copied, from_ort, spec_of, to_ort
from ingot.runtime.engines.pipelined import PipelinedEngine, pipeline_of
from ingot.runtime.gpu.array import Direct, Range
from ingot.runtime.gpu.graphs import GraphOptions, described, graphs_of
from ingot.runtime.gpu.pipeline import Pipeline
from ingot.runtime.gpu.precision import use_precision
from ingot.runtime.machine import devices
from ingot.runtime.machine.memory import NO_MEMORY
from ingot.tensors import Array, DType, Signature, TensorSpec

log = logging.getLogger(__name__)

# Words in kernels' messages that blame the machine's resources.
_RESOURCE = re.compile(r"alloc|memory|cuda|cudnn|cublas", re.IGNORECASE)
# The libraries of NVIDIA that ONNX Runtime loads, some of them when a kernel first needs one.
_NO_LIBRARY = re.compile(r"cudnn is not available|lib(cu|nv)\w+\.so", re.IGNORECASE)
_NEEDED = "it needs CUDA 13 and cuDNN 9, and ingot-serve[gpu]"
_NO_GPU = f"ONNX Runtime could not use the GPU: {_NEEDED}"

# After so many runs of a lane, one waits for its kernels: only at the end of such a run does ONNX Runtime free the
# pinned memory from which kernels copy small arrays to the GPU (DeviceStreamCollection::CleanUp).
_WAITING = 256


class OrtEngine(PipelinedEngine):
    """An ``onnxruntime.InferenceSession``. ``loaded`` is how many seconds loading took.

    Args:
        path: the graph, with its external data in the same folder.
        device: ``cpu``, ``cuda``, ``cuda:1`` for the second GPU, ``auto``, or ``auto:1`` for the second GPU if it can
            be used.
        threads: CPU threads per call; by default one per core.
        library: a native library of custom operators, whose kernels replace functions of the same names.
        optimized: the graph was written by :func:`.ort_session.save_prepacked`.
        packed: pack weights into the order of the processor's kernels. Without it, the engine is ready at once and
            needs no memory for weights, but batches take 2 to 4 times as long.
        pipelined: on a GPU, copy inputs and outputs while other batches are computed; see :mod:`..gpu.pipeline`.
        precision: of products of 32-bit floats on a GPU: ``f32`` or ``tf32``.
        graphs: the batches that are to be captured as CUDA graphs on a GPU; there is then one lane.
        convolutions: options of convolutions on a GPU, of :data:`.convolutions.CANDIDATES`: ``default`` for none,
            ``auto`` for the fastest, which is measured with up to ``max_batch`` samples.
        gpu_arena: how the memory of a GPU grows: ``doubled``, or ``exact`` for as much as a call needs.

    Raises:
        InvalidArgument: ONNX Runtime cannot run the file, or ``library`` is not a library of custom operators.
        Unsupported: the device is not available.
    """

    platform = "onnxruntime_onnx"
    provider = ort_session.CUDA
    _lane: OrtLane | None
    _session: Any
    _inputs: tuple[TensorSpec, ...]
    _outputs: tuple[TensorSpec, ...]

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        library: Path | None = None,
        optimized: bool = False,
        packed: bool = True,
        pipelined: bool = True,
        precision: str = "f32",
        graphs: GraphOptions | None = None,
        convolutions: str = "default",
        gpu_arena: str = "doubled",
        max_batch: int = 64,
    ):
        ort = ort_session.package()
        options = ort_session.options_of(ort, path, library)
        options.intra_op_num_threads = self._threads = threads or devices.cpu_count()
        if optimized:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if not packed:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self.device = ort_session.pick_device(ort, device, self.provider)
        if self.device == "cpu" and precision != "f32":
            raise Unsupported(f"only a GPU computes in {precision}, and the device is 'cpu'")
        if self.device != "cpu":
            use_precision(precision)
        shared = self.device == "cpu" and ort_arena.use(options)
        self._arena = "shared" if shared else "on"
        self._packed = packed
        self._optimized = optimized
        self._custom = library is not None
        self._precision = precision
        self._convolutions = convolutions
        self._tensor_cores = precision == "tf32"
        self._more = {"arena_extend_strategy": "kSameAsRequested"} if gpu_arena == "exact" else {}
        self._pipeline = pipeline_of(self.device) if pipelined and self.device != "cpu" else None
        began = time.perf_counter()
        with contextlib.ExitStack() as on_error:
            if self._pipeline is not None:
                on_error.callback(self._pipeline.close)
                on_error.callback(self.__dict__.pop, "_session", None)  # first: its kernels are in the streams
            self._open(ort, path, options, graphs, max_batch)
            if self.device == "cpu" and (devices.kind_of(device) not in ("auto", "cpu") or precision != "f32"):
                raise Unsupported(f"device '{device}' is not available: {_NO_GPU}{ort_session.missing_libraries()}")
            on_error.pop_all()
        if self.device == "cpu" and self._pipeline is not None:  # the session fell back to the CPU
            self._pipeline.close()
            self._pipeline = None
        self._load_seconds = time.perf_counter() - began
        self._errors = ort_session.errors_of(ort)
        self._ort = ort
        self._terminated = False
        self._output_names = [spec.name for spec in self._outputs]
        # ONNX Runtime accepts no numpy bfloat16, so such models use OrtValues.
        kinds = {spec.dtype for spec in (*self._inputs, *self._outputs)}
        self._by_value = DType.BF16 in kinds
        self._users = [self]  # of the session and the pipeline
        self._shrinks = False
        self._runs = 0
        self._run_options = self._new_options()
        if self._pipeline is not None and self.device != "cpu" and DType.BYTES not in kinds:
            self._enter(self._pipeline)

    @property
    def signature(self) -> Signature:
        return Signature(self._inputs, self._outputs, batch_symbol(self._inputs, self._outputs))

    @property
    def settings(self) -> Mapping[str, str]:
        return {
            "threads": str(self._threads),
            "spinning": "off",
            "memory_arena": self._arena,
            "graph_optimization": "stored" if self._optimized else "all",
            "packed_weights": "on" if self._packed else "off",
            "pipeline": "off" if self._lane is None else "on",
            **({} if self.device == "cpu" else self._gpu_settings),
        }

    @property
    def _gpu_settings(self) -> dict[str, str]:
        own = {"precision": self._precision, "cuda_graphs": described(self._graphs)}
        return own if self._convolutions == "none" else {**own, "convolutions": self._convolutions}

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, load_seconds=self._load_seconds, packed=self._packed)

    def more_lanes(self, count: int) -> list[OrtEngine]:
        # While one thread captures, ONNX Runtime lets calls of the others fail; and it waits for each replayed batch.
        return [] if self.capabilities.captured else super().more_lanes(count)

    @property
    def direct(self) -> Direct:
        """The tensors that a call reads from a device or writes there: inputs that are there are not copied before."""
        return Direct() if self._lane is None else self._lane.direct

    def run(
        self, inputs: Mapping[str, Array], targets: Mapping[str, Sequence[Range]] = MappingProxyType({})
    ) -> dict[str, Array]:
        feed = {spec.name: to_ort(spec, inputs[spec.name]) for spec in self._inputs}
        if self._terminated:  # an earlier call: its options would end this one too
            self._terminated, self._run_options = False, self._new_options()
        options = self._run_options
        try:
            outputs = self._call(feed, options, targets)
        except self._errors as error:
            if options.terminate:
                raise EngineTimeout("the engine call was ended") from error
            if self.down:
                raise EngineLost(f"the device {self.device} failed: {self.down}") from error
            failure = _run_error(self._ort, error, own=not self._custom)
            if not isinstance(failure, TooLarge) or not self._give_back():
                raise failure from error
            # There may have been enough memory in regions of the arena that were too small.
            try:
                outputs = self._call(feed, options, targets)
            except self._errors:
                self._give_back()  # or the arena's next region, for a small tensor, would be as large as fits
                raise failure from error
        except TooLarge:  # for the inputs
            self._give_back()
            raise
        if self._lane is not None:
            self._runs += 1
            # They name a graph, or this run waited, or the next one does.
            if self._shrinks or self._graphs is not None or self._runs % _WAITING < 2:
                self._shrinks = False
                self._run_options = self._new_options()
        return {spec.name: from_ort(spec, value) for spec, value in zip(self._outputs, outputs, strict=True)}

    def deliver(self, inputs: Mapping[str, Array], targets: Mapping[str, Sequence[Range]]) -> dict[str, Array]:
        return self.run(inputs, targets)

    def terminate(self) -> None:
        """End the running call between two operators, or between two iterations of a loop."""
        # Read first: if a call begins after the next line, it has other options.
        options = self._run_options
        self._terminated = True
        options.terminate = True

    def _enter(self, pipeline: Pipeline) -> None:
        place = devices.kind_of(self.device), devices.index_of(self.device)
        self._lane = OrtLane(self._session, pipeline, self._inputs, self._outputs, place, self._graphs)
        self._run_options = self._new_options()

    def _release(self) -> None:
        del self._session

    def _give_back(self) -> bool:
        """Return unused memory of the arena; on a GPU, the next call does that. Return whether it is done."""
        if self._lane is None:
            return ort_arena.give_back()
        self._shrinks = self._graphs is None  # their memory is in the arena
        self._run_options = self._new_options()
        return False

    def _open(self, ort: Any, path: Path, options: Any, graphs: GraphOptions | None, max_batch: int) -> None:
        """Open the session, with CUDA graphs if they are wanted and the model allows them.

        Raises:
            InvalidArgument: ONNX Runtime cannot run the file.
        """
        found = convolutions_of(path) if self.device != "cpu" else Convolutions()
        # Convolutions of 16-bit floats need the option for tensor cores, and no product here is in 32 bits.
        self._tensor_cores |= found.half
        if not found.any:
            self._convolutions = "none"
        self._more |= CANDIDATES.get(self._convolutions, {})
        if graphs is not None and self._pipeline is not None:
            try:
                self._open_session(ort, path, options, graphs=True)
                self._graphs = graphs_of(self.signature, {**graphs, "padded": False})
                if self._graphs is None:
                    del self._session  # before the next one takes as much memory for its weights
            except InvalidArgument as error:  # such as for a node without a kernel for GPUs
                log.warning("batches run without CUDA graphs: %s", error)
        if self._graphs is None:
            self._open_session(ort, path, options)
        if self._convolutions == "auto":
            self._choose_convolutions(ort, path, options, max_batch)

    def _choose_convolutions(self, ort: Any, path: Path, options: Any, max_batch: int) -> None:
        """Keep the session of the options with which convolutions are fastest."""
        self._convolutions = "default"
        if self.device == "cpu" or self._graphs is not None or not measurable(self.signature):
            return
        more = self._more

        def sessions() -> Iterator[tuple[str, Any, Any]]:
            yield "default", self._session, partial(self._session.run, None)
            for name, candidate in CANDIDATES.items():
                self._more = more | candidate
                # Before the next one takes memory for its weights, the slower one of two is freed.
                self.__dict__.pop("_session", None)
                with contextlib.suppress(InvalidArgument):  # such as an option that this version lacks
                    self._open_session(ort, path, options)
                    yield name, self._session, partial(self._session.run, None)

        self._convolutions, self._session = fastest(self.signature, max_batch, sessions())
        self._more = more | CANDIDATES.get(self._convolutions, {})

    def _open_session(self, ort: Any, path: Path, options: Any, *, graphs: bool = False) -> None:
        try:
            providers = self._providers(ort, graphs=graphs)
            self._session = ort_session.create(ort, path, options, providers)
            if any("map(" in node.type for node in self._session.get_outputs()) and (cut := ort_zipmap.cut(path)):
                log.info("%s: %s", path.name, "; ".join(cut.notes))
                self._session = ort.InferenceSession(cut.graph, options, providers=providers, **ort_session.OPENED)
            self._inputs = tuple(spec_of(node) for node in self._session.get_inputs())
            self._outputs = tuple(spec_of(node) for node in self._session.get_outputs())
        except ort_session.errors_of(ort) as error:
            raise InvalidArgument(f"ONNX Runtime cannot load {path.name}: {ort_session.reason_of(error)}") from error
        if len(self._session.get_providers()) < len(providers):
            self._lacks_providers()

    def _providers(self, ort: Any, *, graphs: bool) -> list[ort_session.Provider]:
        """Return the session's execution providers, first choice first."""
        return ort_session.providers_of(
            ort, self.device, self._pipeline, tf32=self._tensor_cores, graphs=graphs, more=self._more
        )

    def _lacks_providers(self) -> None:
        # ONNX Runtime silently falls back to the CPU if the CUDA or cuDNN libraries cannot be loaded.
        log.warning("serving on the CPU: %s%s", _NO_GPU, ort_session.missing_libraries())
        self.device = "cpu"

    def _new_options(self) -> Any:
        """Return the options of a run; after one without memory, the arena then returns what it does not use."""
        options = self._ort.RunOptions()
        waits = self._shrinks or (self._runs > 0 and self._runs % _WAITING == 0)
        if self._lane is not None and self._lane.asynchronous and not waits:
            options.add_run_config_entry(*ASYNCHRONOUS)
        if self._lane is not None and self._shrinks:
            options.add_run_config_entry(ort_arena.SHRINK, f"gpu:{devices.index_of(self.device)}")
        return options

    def _call(self, feed: Mapping[str, Array], options: Any, targets: Mapping[str, Sequence[Range]]) -> Sequence[Array]:
        if self._lane is not None:
            return self._lane.run(feed, options, targets)
        if self._by_value:
            return self._run_values(feed, options)
        outputs: list[Array] = self._session.run(self._output_names, feed, options)
        return outputs

    def _run_values(self, feed: Mapping[str, Array], options: Any) -> list[Array]:
        values = {
            spec.name: self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                feed[spec.name].view(np.uint16), spec.dtype.onnx
            )
            if spec.dtype is DType.BF16
            else self._ort.OrtValue.ortvalue_from_numpy(feed[spec.name])
            for spec in self._inputs
        }
        results = self._session.run_with_ort_values(None, values, options)
        return [
            copied(value, spec.dtype) if spec.dtype is DType.BF16 else value.numpy()
            for spec, value in zip(self._outputs, results, strict=True)
        ]


def _run_error(ort: Any, error: Exception, *, own: bool) -> IngotError:
    """Return the error of a failed call; ``own`` is whether all operators are ONNX Runtime's own.

    Kernels use the same codes for unsuitable values, such as a divisor of zero, and for most other failures. The model
    reproduced its goldens, so the values are to blame, unless memory or a device is.
    """
    state = ort.capi.onnxruntime_pybind11_state
    reason = ort_session.reason_of(error)
    if isinstance(error, state.InvalidArgument):
        return InvalidArgument(f"the model rejects this input: {reason}")
    kernels = re.findall(r"while running (\w+) node", str(error))
    if NO_MEMORY.search(reason):
        where = f"{kernels[-1]}: " if kernels else ""
        return TooLarge(f"the model needs more memory for this input than there is: {where}{reason}")
    if own and kernels and isinstance(error, (state.Fail, state.RuntimeException)) and not _RESOURCE.search(reason):
        return InvalidArgument(f"the model rejects this input: {kernels[-1]}: {reason}")
    missing = f"; {_NEEDED}" if _NO_LIBRARY.search(reason) else ""
    return InternalError(f"the engine failed on this input: {reason}{missing}")
