"""ONNX Runtime, on the CPU or on CUDA."""

from __future__ import annotations

import ctypes
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ingot.errors import IngotError, InternalError, InvalidArgument, Unsupported, missing_package
from ingot.runtime import devices
from ingot.tensors import Array, DType, Shape, Signature, TensorSpec

log = logging.getLogger(__name__)

# Names that exporters give to the batch dimension of a bare .onnx file, which has no better way to say it.
_BATCH_NAMES = ("batch", "batch_size", "N", "n")
# Failures reach the caller as exceptions; printing them too would fill the log with clients' mistakes.
_LOG_FATAL_ONLY = 4


class OrtEngine:
    """An ``onnxruntime.InferenceSession``.

    Args:
        path: the graph; its external data lies beside it.
        device: ``cpu``, ``cuda`` or ``auto``.
        threads: CPU threads for one call; by default one a core.
        library: a library of custom operators, which is native code: its kernels replace functions of their names.
        optimized: the graph was written by :func:`save_prepacked`.
        packed: bring the weights into the order in which the processor reads them best. Without, the engine is there
            at once and takes no memory for weights, but takes some 2 to 4 times as long with batches.

    Raises:
        InvalidArgument: the file is not a model that ONNX Runtime can run, or ``library`` is no such library.
        Unsupported: the device is not there.
    """

    platform = "onnxruntime_onnx"

    def __init__(
        self,
        path: Path,
        *,
        device: str = "auto",
        threads: int | None = None,
        library: Path | None = None,
        optimized: bool = False,
        packed: bool = True,
    ):
        ort = _onnxruntime()
        options = _options(ort, path, library)
        options.intra_op_num_threads = threads or devices.cpu_count()
        # Spinning threads burn a core while the server waits: 103 % CPU at 200 requests/s, against 5 % without.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        if optimized:
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if not packed:
            options.add_session_config_entry("session.disable_prepacking", "1")
        self.packed = packed
        try:
            # enable_fallback: on a damaged file it prints to stdout and tries again.
            self._session = ort.InferenceSession(
                str(path), options, providers=_providers(ort, device), enable_fallback=0
            )
            self._inputs = tuple(_spec(node) for node in self._session.get_inputs())
            self._outputs = tuple(_spec(node) for node in self._session.get_outputs())
        except _ort_errors(ort) as error:
            raise InvalidArgument(f"ONNX Runtime cannot load {path.name}: {_reason(error)}") from error
        if self.device == "cpu" and devices.has_cuda() and device != "cpu":
            # ONNX Runtime falls back by itself, and in silence, when CUDA's or cuDNN's libraries cannot be loaded.
            why = "a GPU is here, but ONNX Runtime could not use it: it needs CUDA 13 and cuDNN 9, and ingot[gpu]"
            if device == "cuda":
                raise Unsupported(f"device 'cuda' is not available: {why}")
            log.warning("serving on the CPU: %s", why)
        self._errors = _ort_errors(ort)
        self._ort = ort
        # numpy has no bfloat16 that ONNX Runtime takes, so such models go through OrtValues.
        self._by_value = any(spec.dtype is DType.BF16 for spec in (*self._inputs, *self._outputs))

    @property
    def device(self) -> str:
        return "cuda" if "CUDAExecutionProvider" in self._session.get_providers() else "cpu"

    @property
    def signature(self) -> Signature:
        return Signature(self._inputs, self._outputs, _batch_symbol(self._inputs, self._outputs))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        feed = {spec.name: _to_ort(spec, inputs[spec.name]) for spec in self._inputs}
        try:
            outputs = self._run_values(feed) if self._by_value else self._session.run(None, feed)
        except self._errors as error:
            raise _run_error(self._ort, error) from error
        return {spec.name: _from_ort(spec, value) for spec, value in zip(self._outputs, outputs, strict=True)}

    def close(self) -> None:
        del self._session

    def _run_values(self, feed: Mapping[str, Array]) -> list[Array]:
        values = {
            spec.name: self._ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
                feed[spec.name].view(np.uint16), spec.dtype.onnx
            )
            if spec.dtype is DType.BF16
            else self._ort.OrtValue.ortvalue_from_numpy(feed[spec.name])
            for spec in self._inputs
        }
        results = self._session.run_with_ort_values(None, values)
        return [
            _copy_bfloat16(value) if spec.dtype is DType.BF16 else value.numpy()
            for spec, value in zip(self._outputs, results, strict=True)
        ]


def save_prepacked(path: Path, folder: Path, library: Path | None = None) -> Path:
    """Write a model as ONNX Runtime's CPU kernels want it: its graph optimized, its weights in the order they are read.

    It is for this version of ONNX Runtime on a processor like this one, and holds the weights twice: as they were, with
    which the kernels find the others, and as they are read.

    Args:
        path: the graph; its external data lies beside it.
        folder: where the files go.
        library: custom operators, as for :class:`OrtEngine`.

    Returns:
        The graph, ``model.onnx``, which :class:`OrtEngine` loads with ``optimized``.

    Raises:
        InvalidArgument: ONNX Runtime cannot write this model so, or the folder cannot be written.
    """
    ort = _onnxruntime()
    options = _options(ort, path, library)
    options.intra_op_num_threads = 1
    graph = folder / "model.onnx"
    options.optimized_model_filepath = str(graph)
    for name, value in (
        ("optimized_model_external_initializers_file_name", "weights"),
        ("optimized_model_external_initializers_min_size_in_bytes", str(1 << 16)),
        ("save_external_prepacked_constant_initializers", "1"),
    ):
        options.add_session_config_entry(f"session.{name}", value)
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except _ort_errors(ort) as error:
        raise InvalidArgument(f"ONNX Runtime cannot save {path.name} optimized: {_reason(error)}") from error
    return graph


def version() -> str:
    """Return what tells one build of ONNX Runtime from another."""
    ort = _onnxruntime()
    return f"{ort.__version__} {ort.get_build_info()}"


def _options(ort: Any, path: Path, library: Path | None) -> Any:
    if not path.is_file():
        raise InvalidArgument(f"there is no model file {path}")
    options = ort.SessionOptions()
    options.log_severity_level = _LOG_FATAL_ONLY
    options.inter_op_num_threads = 1
    if library is not None:
        _register(ort, options, library)
    return options


def _onnxruntime() -> Any:
    try:
        import onnxruntime
    except ModuleNotFoundError as error:
        raise missing_package(
            "onnxruntime", "running ONNX models", "cpu' or, with an NVIDIA GPU, 'ingot[gpu]"
        ) from error
    return onnxruntime


def _register(ort: Any, options: Any, library: Path) -> None:
    try:
        options.register_custom_ops_library(str(library.resolve()))
    except _ort_errors(ort) as error:
        raise InvalidArgument(f"{library} is no library of custom operators: {_reason(error)}") from error


def _ort_errors(ort: Any) -> tuple[type[Exception], ...]:
    # ONNX Runtime's exceptions share no base of their own.
    state = ort.capi.onnxruntime_pybind11_state
    names = (
        "Fail",
        "InvalidArgument",
        "NoSuchFile",
        "NoModel",
        "EngineError",
        "RuntimeException",
        "InvalidProtobuf",
        "ModelLoaded",
        "NotImplemented",
        "InvalidGraph",
        "EPFail",
    )
    return (RuntimeError, ValueError, *(getattr(state, name) for name in names if hasattr(state, name)))


def _providers(ort: Any, device: str) -> list[str | tuple[str, dict[str, str]]]:
    if device not in ("auto", "cpu", "cuda"):
        raise InvalidArgument(f"unknown device '{device}'; use auto, cpu or cuda")
    built = "CUDAExecutionProvider" in ort.get_available_providers()
    usable = built and devices.has_cuda()
    if device == "cuda" and not usable:
        lacking = "no NVIDIA driver or GPU is here" if built else "this onnxruntime has no CUDA; ingot[gpu] has"
        raise Unsupported(f"device 'cuda' is not available: {lacking}")
    if device == "cpu" or not usable:
        return ["CPUExecutionProvider"]
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # finds the CUDA and cuDNN libraries that torch's or NVIDIA's packages brought
    # TF32 would round every product to 10 bits: faster, but no longer the answers that the export was proved with.
    return [("CUDAExecutionProvider", {"use_tf32": "0"}), "CPUExecutionProvider"]


def _spec(node: Any) -> TensorSpec:
    match = re.fullmatch(r"tensor\((\w+)\)", node.type)
    if match is None:
        raise InvalidArgument(f"'{node.name}' is of type {node.type}; only tensors can be served")
    # A dimension without a name is dynamic too; give it one of its own.
    shape: Shape = tuple(
        dim if isinstance(dim, int) and dim >= 0 else str(dim or f"{node.name}_{axis}")
        for axis, dim in enumerate(node.shape)
    )
    return TensorSpec(node.name, DType.parse(match[1]), shape)


def _batch_symbol(inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> str | None:
    """Return the first dimension's name if it is a well-known one and every input and output starts with it."""
    leading = {spec.shape[0] if spec.shape else None for spec in (*inputs, *outputs)}
    only = leading.pop() if len(leading) == 1 else None
    if not isinstance(only, str) or only not in _BATCH_NAMES:
        return None
    # A second axis of that name, as in a matrix of similarities, compares rows of one batch with each other.
    return only if all(spec.shape.count(only) == 1 for spec in (*inputs, *outputs)) else None


def _to_ort(spec: TensorSpec, array: Array) -> Array:
    if spec.dtype is not DType.BYTES:
        # A tensor that lies behind a JSON header may start at any byte; kernels expect aligned memory.
        return np.require(array, requirements=("C", "A"))
    try:
        items = [item.decode() if isinstance(item, bytes) else str(item) for item in array.reshape(-1)]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"input '{spec.name}' holds text that is not UTF-8, which ONNX strings must be"
        ) from error
    return np.array(items, dtype=object).reshape(array.shape)


def _from_ort(spec: TensorSpec, value: Array) -> Array:
    if spec.dtype is not DType.BYTES:
        return value
    items = np.empty(value.size, dtype=object)
    items[:] = [str(item).encode() for item in value.reshape(-1)]
    return items.reshape(value.shape)


def _copy_bfloat16(value: Any) -> Array:
    shape = tuple(value.shape())
    count = int(np.prod(shape))
    pointer = ctypes.cast(value.data_ptr(), ctypes.POINTER(ctypes.c_uint16))
    raw = np.ctypeslib.as_array(pointer, (count,)) if count else np.empty(0, np.uint16)
    return raw.copy().view(DType.BF16.numpy).reshape(shape)


def _run_error(ort: Any, error: Exception) -> IngotError:
    if isinstance(error, ort.capi.onnxruntime_pybind11_state.InvalidArgument):
        return InvalidArgument(f"the model rejects this input: {_reason(error)}")
    log.error("ONNX Runtime failed: %s", error)
    return InternalError("the engine failed on this input")


def _reason(error: Exception) -> str:
    """Return the part of ONNX Runtime's message that means something to a user, without paths of its build."""
    text = str(error)
    text = text.rpartition("Status Message: ")[2] or text
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)
    text = re.sub(r"^Load model from .*? failed: ?", "", text)  # the caller names the file
    return re.sub(r"/\S+/(\S+\.(cc|h)):\d+ \S+ ?", "", text).strip()
