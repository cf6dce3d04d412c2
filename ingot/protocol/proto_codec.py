"""Protobuf messages to requests and responses to messages, both ways: raw contents and typed contents.

The client half is used by :class:`ingot.Client`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from ingot.errors import Code, InvalidArgument
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.regions import Delivery, Place, Read, refuse
from ingot.protocol.requests import MAX_TENSORS, InferRequest, InferResponse, Template, check_parameters, named
from ingot.tensors import Array, DType, arrays

M = TypeVar("M", bound=Message)

SERVICE = "inference.GRPCInferenceService"

# https://grpc.github.io/grpc/core/md_doc_statuscodes.html; grpcio's own enumeration would take 0.1 s to import.
STATUS = {
    Code.INVALID_ARGUMENT: 3,
    Code.DEADLINE_EXCEEDED: 4,
    Code.NOT_FOUND: 5,
    Code.ALREADY_EXISTS: 6,
    Code.PERMISSION_DENIED: 7,
    Code.TOO_MANY_REQUESTS: 8,
    Code.TOO_LARGE: 8,
    Code.STORAGE_FULL: 9,
    Code.UNSUPPORTED: 12,
    Code.INTERNAL: 13,
    Code.UNAVAILABLE: 14,
    Code.UNAUTHENTICATED: 16,
}

# FP16 and BF16 have no typed field: they must be raw.
_FIELDS = {
    DType.BOOL: "bool_contents",
    DType.INT8: "int_contents",
    DType.INT16: "int_contents",
    DType.INT32: "int_contents",
    DType.INT64: "int64_contents",
    DType.UINT8: "uint_contents",
    DType.UINT16: "uint_contents",
    DType.UINT32: "uint_contents",
    DType.UINT64: "uint64_contents",
    DType.FP32: "fp32_contents",
    DType.FP64: "fp64_contents",
    DType.BYTES: "bytes_contents",
}

# Values of typed contents that are converted at once.
_STEP = 1 << 14
# Bytes of requests that are converted in the event loop, for up to some milliseconds.
_AT_ONCE = 64 << 10


def is_slow(message: pb.ModelInferRequest) -> bool:
    """Return whether a request is to be decoded in a thread: it has many values that are converted one by one."""
    if len(message.inputs) > MAX_TENSORS:  # it is refused
        return False
    size = sum(map(len, message.raw_input_contents)) if message.raw_input_contents else message.ByteSize()
    return any(
        (tensor.datatype == "BYTES" and bool(tensor.parameters)) or (size > _AT_ONCE and _is_converted(tensor))
        for tensor in message.inputs
    )


def _is_converted(tensor: pb.ModelInferRequest.InferInputTensor) -> bool:
    return tensor.datatype == "BYTES" or tensor.HasField("contents")


def decode_request(
    message: pb.ModelInferRequest, find: Callable[[str, str], object], read: Read = refuse
) -> InferRequest:
    """Parse an inference request.

    Args:
        message: the request.
        find: called with the model's name and version before anything else is checked.
        read: returns the inputs in shared memory.

    Raises:
        NotFound: from ``find``: there is no such model.
        InvalidArgument: the message contradicts itself; the text names the tensor.
    """
    find(message.model_name, message.model_version)
    if max(len(message.inputs), len(message.outputs)) > MAX_TENSORS:
        raise InvalidArgument(f"the request has over {MAX_TENSORS} inputs or outputs; no model has so many")
    of_tensors = [len(each.parameters) for each in message.inputs], [len(each.parameters) for each in message.outputs]
    check_parameters(len(message.parameters) + sum(map(sum, of_tensors)))
    raw = message.raw_input_contents
    places = [
        Place.of(f"tensor '{tensor.name}'", decode_parameters(tensor.parameters)) if tensor.parameters else None
        for tensor in message.inputs
    ]
    if raw:
        _check_untyped(message)
    if raw and len(raw) != places.count(None):
        raise InvalidArgument(
            f"the request has {places.count(None)} inputs but {len(raw)} raw_input_contents; "
            "raw and typed contents cannot be mixed"
        )
    deliveries: dict[str, Delivery] = {}
    for output in message.outputs:
        if output.parameters:
            delivery = Delivery.of(f"output '{output.name}'", decode_parameters(output.parameters))
            if delivery is not None:
                deliveries[output.name] = delivery
    outputs = tuple(output.name for output in message.outputs)
    parameters = decode_parameters(message.parameters)
    template = Template(message.model_name, message.model_version, outputs, parameters, None, deliveries)
    contents = iter(raw)
    found = []
    for tensor, place in zip(message.inputs, places, strict=True):
        if place is None:
            found.append(_tensor(tensor, next(contents, None)))
        else:
            found.append((tensor.name, read(tensor.name, place, *_kind(tensor))))
    return InferRequest(template, named(found), message.id)


def _check_untyped(message: pb.ModelInferRequest) -> None:
    """Refuse typed contents in addition to raw ones, with Triton's text; some clients set them to nothing."""
    for tensor in message.inputs:
        if tensor.HasField("contents") and tensor.contents.ByteSize():
            where = f"'{tensor.name}' for model '{message.model_name}'"
            raise InvalidArgument(f"contents field must not be specified when using raw_input_contents for {where}")


def wants_typed(request: InferRequest) -> bool:
    """Return whether the response shall have typed contents; by default they are raw, as Triton's always are."""
    return request.template.parameters.get("binary_data_output") is False


def encode_response(response: InferResponse, *, typed: bool) -> pb.ModelInferResponse:
    """Return the message; with typed contents if that is wanted, and each datatype has a typed form."""
    route = response.route
    message = pb.ModelInferResponse(model_name=route.name, model_version=route.version, id=response.id)
    typed = typed and all(spec.dtype in _FIELDS for spec in route.outputs)
    for name, dtype, array in response.outputs:
        tensor = message.outputs.add(name=name, datatype=dtype.value, shape=array.shape)
        if name in route.placed:
            for parameter, value in route.placed[name].items():
                encode_parameter(tensor.parameters[parameter], value)
            if not typed:
                message.raw_output_contents.append(b"")  # clients count one for each output
        elif typed:
            field, values = getattr(tensor.contents, _FIELDS[dtype]), array.reshape(-1)
            for start in range(0, len(values), _STEP):  # a list of Python's numbers takes many times their bytes
                field.extend(values[start : start + _STEP].tolist())
        else:
            message.raw_output_contents.append(arrays.to_bytes(array))
    return message


def timed(response: InferResponse, typed: bool) -> tuple[pb.ModelInferResponse, float]:
    """Encode as :func:`encode_response` does; also return the seconds that it took."""
    began = time.perf_counter()
    message = encode_response(response, typed=typed)
    return message, time.perf_counter() - began


def encode_request(request: InferRequest) -> pb.ModelInferRequest:
    """Return a request as a client sends it, with raw contents."""
    template = request.template
    message = pb.ModelInferRequest(model_name=template.model, model_version=template.version, id=request.id)
    for name, value in template.parameters.items():
        encode_parameter(message.parameters[name], value)
    for name, array in request.inputs.items():
        message.inputs.add(name=name, datatype=DType.of(array).value, shape=array.shape)
        message.raw_input_contents.append(arrays.to_bytes(array))
    for name in template.outputs:
        message.outputs.add(name=name)
    return message


def decode_response(message: pb.ModelInferResponse) -> dict[str, Array]:
    """Parse a response's outputs."""
    raw = message.raw_output_contents
    return dict(_tensor(tensor, raw[index] if raw else None) for index, tensor in enumerate(message.outputs))


def decode_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return protobuf parameters as Python values.

    Raises:
        InvalidArgument: there are too many.
    """
    check_parameters(len(parameters))
    chosen = {name: (value, value.WhichOneof("parameter_choice")) for name, value in parameters.items()}
    return {name: getattr(value, kind) if kind else None for name, (value, kind) in chosen.items()}


def encode_parameter(parameter: pb.InferParameter, value: object) -> None:
    """Set a protobuf parameter from a Python value."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    if type(value) not in kinds:
        raise InvalidArgument(f"parameter value {value!r} is not a flag, a number or text")
    setattr(parameter, kinds[type(value)], value)


def _tensor(
    tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferResponse.InferOutputTensor, raw: bytes | None
) -> tuple[str, Array]:
    dtype, shape = _kind(tensor)
    if raw is None:
        return tensor.name, _typed(tensor.name, dtype, shape, tensor.contents)
    return tensor.name, arrays.from_bytes(tensor.name, dtype, shape, raw)


def _kind(
    tensor: pb.ModelInferRequest.InferInputTensor | pb.ModelInferResponse.InferOutputTensor,
) -> tuple[DType, tuple[int, ...]]:
    """Return a tensor's datatype and shape."""
    try:
        dtype = DType(tensor.datatype)
    except ValueError:
        known = ", ".join(dtype.value for dtype in DType)
        raise InvalidArgument(f"tensor '{tensor.name}' has datatype '{tensor.datatype}'; known: {known}") from None
    return dtype, arrays.check_shape(tensor.name, list(tensor.shape))


def _typed(name: str, dtype: DType, shape: Sequence[int], contents: pb.InferTensorContents) -> Array:
    if dtype not in _FIELDS:
        raise InvalidArgument(f"tensor '{name}' is {dtype.value}, which has no typed contents; send it raw")
    values = getattr(contents, _FIELDS[dtype])
    filled = [field.name for field, _ in contents.ListFields()]
    if any(field != _FIELDS[dtype] for field in filled):
        raise InvalidArgument(f"tensor '{name}' is {dtype.value} and belongs in {_FIELDS[dtype]}, not in {filled[0]}")
    if len(values) != math.prod(shape):
        raise InvalidArgument(
            f"tensor '{name}' has {len(values)} values, but shape {list(shape)} takes {math.prod(shape)}"
        )
    if dtype is DType.BYTES:
        items = np.empty(len(values), dtype=object)
        for start in range(0, len(values), _STEP):
            items[start : start + _STEP] = values[start : start + _STEP]
        return items.reshape(shape)
    kind = {"int_contents": np.int32, "uint_contents": np.uint32}.get(_FIELDS[dtype], dtype.numpy)
    array = np.empty(len(values), kind)
    for start in range(0, len(values), _STEP):
        array[start : start + _STEP] = values[start : start + _STEP]
    if dtype.is_integer and array.size:
        bounds = np.iinfo(dtype.numpy)
        if array.min() < bounds.min or array.max() > bounds.max:
            raise InvalidArgument(f"tensor '{name}' is {dtype.value}, but holds a number out of its range")
    return array.astype(dtype.numpy).reshape(shape)


def parse(kind: type[M], raw: bytes) -> M:
    """Parse a message.

    Raises:
        InvalidArgument: it is not valid protobuf.
    """
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument(f"the message is not a {kind.DESCRIPTOR.name}: it is not valid protobuf") from error
