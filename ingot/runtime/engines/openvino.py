"""OpenVINO, on the CPU: an optional engine for ONNX graphs, faster than ONNX Runtime where int8 has matrix units."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ingot.errors import InternalError, InvalidArgument, Unsupported, missing_package
from ingot.runtime import devices
from ingot.tensors import Array, DType, Signature, TensorSpec

# OpenVINO's own names of element types, where they are not ours.
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
# The CPU plugin computes these in 32 bits with a sign; larger values would wrap around in silence.
_NARROWED = (DType.UINT32, DType.UINT64, DType.INT64)
_INT32 = np.iinfo(np.int32)
_TELEMETRY = "openvino_telemetry"
_importing = Lock()


class OpenVinoEngine:
    """A compiled OpenVINO model. It computes integers of 64 bits in 32; an index out of range reads zeros.

    ``compiled`` is the ``openvino.CompiledModel``, which tells what became of each layer. ``compiles`` tells that the
    first call with inputs of a new shape is slow, since code is compiled for it.

    Args:
        path: the graph; its external data lies beside it.
        threads: CPU threads for one call; by default one a core.
        precision: what floats are computed in, ``f32`` or ``bf16``; the second where the processor has it only.

    Raises:
        InvalidArgument: the file is not a model that OpenVINO can run.
        Unsupported: it is not installed, or cannot compute with a datatype of the model as precisely as is asked.
    """

    platform = "openvino_onnx"
    device = "cpu"
    compiles = True
    compiles_shapes = True  # so that shapes are rounded where they may be

    def __init__(self, path: Path, *, threads: int | None = None, precision: str = "f32"):
        self._ov = package()
        if precision == "bf16" and not devices.has_bf16():
            raise Unsupported("this processor has no instructions for bfloat16, in which the model was measured")
        if not path.is_file():
            raise InvalidArgument(f"there is no model file {path}")
        self._errors = _errors(self._ov)
        try:
            # Not Core.read_model: that tries all formats that OpenVINO knows, and prints what each thinks of the file.
            frontend = self._ov.frontend.FrontEndManager().load_by_framework("onnx")
            places = frontend.load(str(path))
            # The converted model's inputs and outputs are in the file's order, but one may have several names.
            names = [[place.get_names()[0] for place in side] for side in (places.get_inputs(), places.get_outputs())]
            model = frontend.convert(places)
            self._inputs = tuple(map(_spec, names[0], model.inputs))
            self._outputs = tuple(map(_spec, names[1], model.outputs))
            self._options = _options(threads or devices.cpu_count(), precision)
            self.compiled = self._ov.Core().compile_model(model, "CPU", self._options)
            self._request = self.compiled.create_infer_request()
        except self._errors as error:
            raise InvalidArgument(f"OpenVINO cannot load {path.name}: {_reason(error)}") from error

    @property
    def signature(self) -> Signature:
        """OpenVINO keeps no names of dimensions: dynamic ones get names of their own, and none is the batch."""
        return Signature(self._inputs, self._outputs, None)

    @property
    def settings(self) -> Mapping[str, str]:
        return {name.lower(): str(value) for name, value in self._options.items()}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tensors = [self._tensor(spec, inputs[spec.name]) for spec in self._inputs]
        try:
            for index, tensor in enumerate(tensors):
                self._request.set_input_tensor(index, tensor)
            self._request.infer()
            # Copies, since the next call writes into the same memory.
            return {
                spec.name: self._request.get_output_tensor(index).data.view(spec.dtype.numpy).copy()
                for index, spec in enumerate(self._outputs)
            }
        except self._errors as error:
            raise InternalError(f"the engine failed on this input: OpenVINO: {error}") from error

    def close(self) -> None:
        del self._request, self.compiled

    def _tensor(self, spec: TensorSpec, array: Array) -> Any:
        if spec.dtype in _NARROWED and array.size and (array.min() < _INT32.min or array.max() > _INT32.max):
            raise InvalidArgument(
                f"input '{spec.name}' holds values beyond 32 bits, which OpenVINO does not compute with; serve a "
                "variant that ONNX Runtime runs"
            )
        tensor = self._ov.Tensor(getattr(self._ov.Type, _name(spec.dtype)), list(array.shape))
        tensor.data.view(spec.dtype.numpy)[...] = array
        return tensor


def package() -> Any:
    """Return OpenVINO's package, imported so that it does not report its use to its maker.

    Raises:
        Unsupported: it is not installed.
    """
    # It reports while it is imported, unasked, and no setting prevents that; but only if it finds the package that
    # does. A server must not call out; whoever wants the reports imports openvino himself before.
    with _importing:
        reporting = sys.modules.pop(_TELEMETRY, None)
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # Python's own way to say: this is not there
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


def _options(threads: int, precision: str) -> dict[str, Any]:
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "INFERENCE_NUM_THREADS": threads,
        # Instances would all be pinned to the same cores.
        "ENABLE_CPU_PINNING": False,
        # By default it computes in bfloat16 where the processor can, and rounds the inputs of products with compressed
        # weights to int8. A variant is run as it was proved.
        "INFERENCE_PRECISION_HINT": precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        # It keeps code for every shape of input that it meets: up to 5000 pieces by default, which was 1.3 GB and
        # growing after 400 shapes of a model of 23 MB. With 1000 it stayed at 0.6 GB, and was no slower.
        "CPU_RUNTIME_CACHE_CAPACITY": 1000,
    }


def _errors(ov: Any) -> tuple[type[Exception], ...]:
    # The exceptions of its readers of formats share no base of their own.
    names = ("GeneralFailure", "InitializationFailure", "NotImplementedFailure", "OpConversionFailure")
    known = (getattr(ov.frontend, name, None) for name in (*names, "OpValidationFailure"))
    return (RuntimeError, ValueError, TypeError, *(error for error in known if error is not None))


def _spec(name: str, port: Any) -> TensorSpec:
    kind = port.element_type.to_string()
    if kind not in _DTYPES:
        why = "it computes them in single precision" if kind == "f64" else "Ingot gives it numbers only"
        raise Unsupported(f"'{name}' holds values of type {kind}, which OpenVINO cannot be used for: {why}")
    if port.partial_shape.rank.is_dynamic:
        raise InvalidArgument(f"how many dimensions '{name}' has is not known before the model runs")
    shape = tuple(
        f"{name}_{axis}" if dim.is_dynamic else dim.get_length() for axis, dim in enumerate(port.partial_shape)
    )
    return TensorSpec(name, _DTYPES[kind], shape)


def _name(dtype: DType) -> str:
    return next(name for name, item in _DTYPES.items() if item is dtype)


def _reason(error: Exception) -> str:
    """Return the part of OpenVINO's message that means something to a user, without places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    told = [
        line for line in lines if line and not re.match(r"(Check '.*' failed at|Exception from) |FrontEnd API", line)
    ]
    return " ".join(told)[:500] or type(error).__name__
