"""OpenVINO on the CPU: an optional engine for ONNX graphs, faster than ONNX Runtime with int8 matrix units."""

from __future__ import annotations

import importlib
import mmap
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import numpy as np

from ingot.bounds import protobuf
from ingot.errors import EngineTimeout, InternalError, InvalidArgument, Unsupported, missing_package
from ingot.runtime.engines.engine import BaseEngine, Capabilities
from ingot.runtime.machine import devices
from ingot.tensors import Array, DType, Signature, TensorSpec

# OpenVINO's names of element types that differ from ours.
_DTYPES = {
    "boolean": DType.BOOL,
    "u8": DType.UINT8,
    "u16": DType.UINT16,
    "u32": DType.UINT32,
    "u64": DType.UINT64,
    "i8": DType.INT8,
    "i16": DType.INT16,
    "i32": DType.INT32,
    "i64": DType.INT64,
    "f16": DType.FP16,
    "f32": DType.FP32,
    "bf16": DType.BF16,
}
# The CPU plugin computes these as signed 32-bit integers; larger values would wrap around silently.
_NARROWED = (DType.UINT32, DType.UINT64, DType.INT64)
_INT32 = np.iinfo(np.int32)
# The number of the field of a ``ModelProto``.
_FUNCTIONS = 25
_TELEMETRY = "openvino_telemetry"
_importing = Lock()
# Seconds from which on a call can be cancelled.
_LONG = 1e-3


class OpenVinoEngine(BaseEngine):
    """A compiled OpenVINO model. It computes 64-bit integers in 32 bits; an index out of range reads zeros.

    ``compiled`` is the ``openvino.CompiledModel``, which reports how each layer runs.

    Args:
        path: the graph, with its external data in the same folder.
        threads: CPU threads per call; by default one per core.
        precision: floating-point precision, ``f32`` or, if the processor supports it, ``bf16``.

    Raises:
        InvalidArgument: OpenVINO cannot run the file.
        Unsupported: it is not installed, or lacks a datatype or the precision of the model; or the file has functions,
            and the package that inlines them is not installed.
    """

    platform = "openvino_onnx"
    device = "cpu"
    capabilities = Capabilities(compiles=True, compiles_shapes=True)  # so that padding rounds shapes

    def __init__(self, path: Path, *, threads: int | None = None, precision: str = "f32"):
        self._ov = package()
        if precision == "bf16" and not devices.has_bf16():
            raise Unsupported("this processor lacks bfloat16 instructions, with which the model was measured")
        if not path.is_file():
            raise InvalidArgument(f"there is no model file {path}")
        self._errors = _errors(self._ov)
        try:
            # Not Core.read_model: it tries all formats that OpenVINO knows, and prints errors for each.
            frontend = self._ov.frontend.FrontEndManager().load_by_framework("onnx")
            with _inlined(path) as readable:
                places = frontend.load(str(readable))
                # The converted model keeps the file's order of inputs and outputs, but one may have several names.
                sides = (places.get_inputs(), places.get_outputs())
                names = [[place.get_names()[0] for place in side] for side in sides]
                model = frontend.convert(places)
            self._inputs = tuple(map(_spec, names[0], model.inputs))
            self._outputs = tuple(map(_spec, names[1], model.outputs))
            self._options = _options(threads or devices.cpu_count(), precision)
            self.compiled = self._ov.Core().compile_model(model, "CPU", self._options)
            self._request = self.compiled.create_infer_request()
            self._terminated = False
            self._long = True
        except self._errors as error:
            raise InvalidArgument(f"OpenVINO cannot load {path.name}: {_reason(error)}") from error

    @property
    def signature(self) -> Signature:
        """OpenVINO drops the names of dimensions: dynamic ones get generated names, and none is the batch."""
        return Signature(self._inputs, self._outputs, None)

    @property
    def settings(self) -> Mapping[str, str]:
        return {name.lower(): str(value) for name, value in self._options.items()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tensors = [self._tensor(spec, inputs[spec.name]) for spec in self._inputs]
        self._terminated = False
        try:
            for index, tensor in enumerate(tensors):
                self._request.set_input_tensor(index, tensor)
            self._infer()
            # Copies, since the next call overwrites the memory.
            return {
                spec.name: self._request.get_output_tensor(index).data.view(spec.dtype.numpy).copy()
                for index, spec in enumerate(self._outputs)
            }
        except self._errors as error:
            if self._terminated:
                raise EngineTimeout("the engine call was ended") from error
            raise InternalError(f"the engine failed on this input: OpenVINO: {error}") from error

    def terminate(self) -> None:
        """End the running call between two operators, if the one before took over a millisecond.

        A loop of the graph runs to its end.
        """
        self._terminated = True
        self._request.cancel()

    def _infer(self) -> None:
        # Only asynchronous calls can be cancelled. They need two wakeups of threads, a third of the smallest calls.
        began = time.perf_counter()
        if self._long:
            self._request.start_async()
            self._request.wait()
        else:
            self._request.infer()
        self._long = time.perf_counter() - began > _LONG

    def close(self) -> None:
        del self._request, self.compiled

    def _tensor(self, spec: TensorSpec, array: Array) -> Any:
        if spec.dtype in _NARROWED and array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            raise InvalidArgument(
                f"input '{spec.name}' holds values beyond 32 bits, which OpenVINO does not support; serve a "
                "variant that ONNX Runtime runs"
            )
        tensor = self._ov.Tensor(getattr(self._ov.Type, _name(spec.dtype)), list(array.shape))
        tensor.data.view(spec.dtype.numpy)[...] = array
        return tensor


def package() -> Any:
    """Return OpenVINO's package, imported without its usage reports.

    Raises:
        Unsupported: it is not installed.
    """
    # It reports its use while it is imported (https://github.com/openvinotoolkit/openvino/pull/23832), which no setting
    # prevents, but only if it finds the package that does so. A server must not call out; users who want the reports
    # import openvino before.
    with _importing:
        reporting = sys.modules.pop(_TELEMETRY, None)
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # Python's marker of a missing module
        try:
            return importlib.import_module("openvino")
        except ModuleNotFoundError as error:
            if error.name != "openvino":
                raise
            raise missing_package("openvino", "running this variant", "openvino") from error
        finally:
            del sys.modules[_TELEMETRY]
            if reporting is not None:
                sys.modules[_TELEMETRY] = reporting


@contextmanager
def _inlined(path: Path) -> Iterator[Path]:
    """Yield a file of the same graph without functions, as custom operators are, which OpenVINO does not know."""
    if not _has_functions(path):
        yield path
        return
    try:
        import onnx_ir as ir

        from ingot.model_store.format import onnx_graph
    except ModuleNotFoundError as error:
        raise missing_package("onnx-ir", "running a model with custom operators in OpenVINO", None) from error
    model = onnx_graph.load(path)
    onnx_graph.inline(model)
    with TemporaryDirectory(prefix="ingot-") as folder:
        inlined = Path(folder, "model.onnx")
        ir.save(model, inlined, external_data="weights")  # the large ones stay out of protobuf, which ends at 2 GiB
        yield inlined


def _has_functions(path: Path) -> bool:
    if not path.stat().st_size:
        return False
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            return any(number == _FUNCTIONS for number, _ in protobuf.fields(content, (0, len(content))))
        except protobuf.DamagedError:  # OpenVINO reports it
            return False


def _options(threads: int, precision: str) -> dict[str, Any]:
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        # Several instances would be pinned to the same cores.
        "ENABLE_CPU_PINNING": False,
        # By default it computes in bfloat16 if the processor can, and rounds the inputs of products with compressed
        # weights to int8. A variant runs as it was proved.
        "INFERENCE_PRECISION_HINT": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        # It keeps code for every input shape, up to 5000 pieces by default
        # (https://github.com/openvinotoolkit/openvino/issues/20633): 1.3 GB and growing after 400 shapes of a 23 MB
        # model. With 1000 it stayed at 0.6 GB, and was as fast.
        "CPU_RUNTIME_CACHE_CAPACITY": 1000,
    }


def _errors(ov: Any) -> tuple[type[Exception], ...]:
    # The exceptions of its frontends have no common base class.
    names = ("GeneralFailure", "InitializationFailure", "NotImplementedFailure", "OpConversionFailure")
    known = (getattr(ov.frontend, name, None) for name in (*names, "OpValidationFailure"))
    return (RuntimeError, ValueError, TypeError, *(error for error in known if error is not None))


def _spec(name: str, port: Any) -> TensorSpec:
    kind = port.element_type.to_string()
    if kind not in _DTYPES:
        why = "it computes them in single precision" if kind == "f64" else "Ingot passes it numbers only"
        raise Unsupported(f"'{name}' holds values of type {kind}, for which OpenVINO cannot be used: {why}")
    if port.partial_shape.rank.is_dynamic:
        raise InvalidArgument(f"the rank of '{name}' is not known before the model runs")
    shape = tuple(
        f"{name}_{axis}" if dim.is_dynamic else dim.get_length() for axis, dim in enumerate(port.partial_shape)
    )
    return TensorSpec(name, _DTYPES[kind], shape)


def _name(dtype: DType) -> str:
    return next(name for name, item in _DTYPES.items() if item is dtype)


def _reason(error: Exception) -> str:
    """Return the meaningful part of an OpenVINO message, without source locations."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [
        line for line in lines if line and not re.match(r"(Check '.*' failed at|Exception from) |FrontEnd API", line)
    ]
    return " ".join(kept)[:500] or type(error).__name__
