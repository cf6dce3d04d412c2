"""HTTP bodies to requests and responses to bodies, both ways: JSON, and JSON followed by raw tensors.

The binary tensor data extension puts raw buffers behind the JSON header; a tensor's ``binary_data_size`` parameter says
how many bytes of them are its own, in the order of the tensors. The client half is used by :class:`ingot.Client`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from ingot import arrays
from ingot.errors import Code, InvalidArgument
from ingot.server.dataplane import MAX_TENSORS, InferRequest, InferResponse, check_parameters
from ingot.tensors import Array, DType, Signature

STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.TOO_LARGE: 413,
    Code.INTERNAL: 500,
    Code.UNSUPPORTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class Layout:
    """Which outputs the client wants as raw buffers."""

    default: bool = False
    by_name: Mapping[str, bool] = field(default_factory=dict)

    def binary(self, name: str) -> bool:
        return self.by_name.get(name, self.default)


def decode_request(model: str, version: str, body: bytes, header_length: int | None) -> tuple[InferRequest, Layout]:
    """Parse an inference request.

    Args:
        model: from the path.
        version: from the path, or empty.
        body: the whole body.
        header_length: the JSON's length if raw buffers follow it, as the header says; None for plain JSON.

    Raises:
        InvalidArgument: the body is not of the protocol; the message names the tensor.
    """
    view = memoryview(body)
    if header_length is not None and not 0 <= header_length <= len(body):
        raise InvalidArgument(f"{HEADER_LENGTH} is {header_length}, but the body has {len(body)} bytes")
    header = _parse(view if header_length is None else view[:header_length])
    buffers = _Buffers(view[len(body) if header_length is None else header_length :])
    inputs = tuple(_input(item, buffers) for item in _list(header, "inputs"))
    buffers.check_empty()
    parameters = _dict(header, "parameters")
    wanted = _list(header, "outputs", required=False)
    outputs: dict[str, bool] = {}
    default = _flag(parameters, "binary_data_output", False)
    for item in wanted:
        name = _text(item, "name", "an output")
        check_parameters(f"output '{name}'", options := _dict(item, "parameters"))
        outputs[name] = _flag(options, "binary_data", default)
    if len(outputs) < len(wanted):
        raise InvalidArgument("an output is asked for twice")
    request = InferRequest(
        model, inputs, version, _text(header, "id", "the request", default=""), tuple(outputs), parameters
    )
    return request, Layout(default, outputs)


def decode_raw_request(model: str, version: str, body: bytes, signature: Signature) -> tuple[InferRequest, Layout]:
    """Return a request whose whole body is the one input's raw data, batch 1 (header length 0 says so).

    Raises:
        InvalidArgument: the model has several inputs, or its shape cannot be told from the data's size.
    """
    if len(signature.inputs) != 1:
        raise InvalidArgument(f"a raw body holds one input, the model takes {len(signature.inputs)}")
    spec = signature.inputs[0]
    shape = [1 if dim == signature.batch else dim for dim in spec.shape]
    free = [axis for axis, dim in enumerate(shape) if isinstance(dim, str)]
    if spec.dtype is DType.BYTES:
        raw = len(body).to_bytes(4, "little") + body
        shape = [1 if isinstance(dim, str) else dim for dim in shape]
    else:
        raw = body
        row = math.prod(dim for dim in shape if isinstance(dim, int)) * spec.dtype.numpy.itemsize
        if len(free) > 1 or (free and (not row or len(body) % row)):
            raise InvalidArgument(f"the shape of '{spec.name}' cannot be told from a raw body of {len(body)} bytes")
        shape = [len(body) // row if isinstance(dim, str) else dim for dim in shape]
    array = arrays.from_bytes(spec.name, spec.dtype, [int(dim) for dim in shape], raw)
    return InferRequest(model, ((spec.name, array),), version), Layout(default=True)


def encode_response(response: InferResponse, layout: Layout) -> tuple[bytes, int | None]:
    """Return the body, and the JSON's length if raw buffers follow it.

    Raises:
        InvalidArgument: an output that was asked for as JSON holds NaN or infinity, which JSON cannot carry.
    """
    header: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": []}
    if response.id:
        header["id"] = response.id
    buffers: list[bytes] = []
    for name, dtype, array in response.outputs:
        header["outputs"].append(_tensor(name, dtype, array, buffers if layout.binary(name) else None))
    return _assemble(header, buffers)


def encode_request(request: InferRequest, *, binary: bool) -> tuple[bytes, int | None]:
    """Return a request's body as a client sends it, and the JSON's length if raw buffers follow it."""
    buffers: list[bytes] = []
    header: dict[str, Any] = {
        "inputs": [
            _tensor(name, DType.of(array), array, buffers if binary else None) for name, array in request.inputs
        ],
        "parameters": {**request.parameters, "binary_data_output": binary},
    }
    if request.id:
        header["id"] = request.id
    if request.outputs:
        header["outputs"] = [{"name": name} for name in request.outputs]
    return _assemble(header, buffers)


def decode_response(body: bytes, header_length: int | None) -> dict[str, Array]:
    """Parse a response's outputs.

    Raises:
        InvalidArgument: the body is not of the protocol.
    """
    view = memoryview(body)
    header = _parse(view if header_length is None else view[:header_length])
    buffers = _Buffers(view[len(body) if header_length is None else header_length :])
    return dict(_input(item, buffers) for item in _list(header, "outputs"))


class _Buffers:
    """The raw data behind the header, handed out from the front."""

    def __init__(self, view: memoryview):
        self._view = view

    def take(self, name: str, size: Any) -> memoryview:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidArgument(f"binary_data_size of tensor '{name}' is {size!r}; it must be a number of bytes")
        if size > len(self._view):
            raise InvalidArgument(
                f"binary_data_size of tensor '{name}' is {size}, but only {len(self._view)} bytes are left in the body"
            )
        taken, self._view = self._view[:size], self._view[size:]
        return taken

    def check_empty(self) -> None:
        if len(self._view):
            raise InvalidArgument(
                f"the body has {len(self._view)} bytes that no tensor's binary_data_size accounts for"
            )


def _parse(raw: memoryview) -> dict[str, Any]:
    try:
        header = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(f"the request is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise InvalidArgument("the request is not a JSON object")
    return header


def _input(item: Any, buffers: _Buffers) -> tuple[str, Array]:
    name = _text(item, "name", "a tensor")
    dtype = _datatype(name, _text(item, "datatype", f"tensor '{name}'"))
    shape = arrays.check_shape(name, item.get("shape"))
    parameters = _dict(item, "parameters")
    check_parameters(f"tensor '{name}'", parameters)
    size = parameters.get("binary_data_size")
    if size is not None:
        if "data" in item:
            raise InvalidArgument(f"tensor '{name}' has both 'data' and binary_data_size")
        return name, arrays.from_bytes(name, dtype, shape, buffers.take(name, size))
    if "data" not in item:
        raise InvalidArgument(f"tensor '{name}' has neither 'data' nor binary_data_size")
    return name, _from_json(name, dtype, shape, item["data"])


def _datatype(name: str, text: str) -> DType:
    try:
        return DType(text)
    except ValueError:
        known = ", ".join(dtype.value for dtype in DType)
        raise InvalidArgument(f"tensor '{name}' has datatype '{text}'; known: {known}") from None


def _from_json(name: str, dtype: DType, shape: Sequence[int], data: Any) -> Array:
    """Return JSON ``data``, nested or flat, as an array; no value is rounded or wrapped to fit an integer type."""
    if not isinstance(data, list):
        raise InvalidArgument(f"the data of tensor '{name}' is not a list")
    values = _flat(name, data)
    if len(values) != math.prod(shape):
        raise InvalidArgument(
            f"tensor '{name}' has {len(values)} values, but shape {list(shape)} takes {math.prod(shape)}"
        )
    return _cast(name, dtype, values).reshape(shape)


def from_json(name: str, dtype: DType, data: Any) -> Array:
    """Return nested lists as an array of the shape that they have; a single value is a scalar.

    Raises:
        InvalidArgument: the lists are ragged, or a value does not fit the datatype.
    """
    shape: list[int] = []
    level = data
    while isinstance(level, list) and len(shape) <= arrays.MAX_RANK:
        shape.append(len(level))
        level = level[0] if level else None
    return _from_json(name, dtype, shape, data if isinstance(data, list) else [data])


def _flat(name: str, data: list[Any]) -> list[Any]:
    """Return nested lists of equal lengths as one list."""
    for _ in range(arrays.MAX_RANK):
        if not data or not isinstance(data[0], list):
            return data
        length = len(data[0])
        if not all(isinstance(item, list) and len(item) == length for item in data):
            raise InvalidArgument(f"the data of tensor '{name}' is ragged: its lists have different lengths")
        data = list(itertools.chain.from_iterable(data))
    raise InvalidArgument(f"the data of tensor '{name}' is nested over {arrays.MAX_RANK} deep")


def _cast(name: str, dtype: DType, values: list[Any]) -> Array:
    problem = f"tensor '{name}' is {dtype.value}, but its data"
    # Types are looked at before numpy is: of one long text among numbers it would make an array of such texts.
    kinds = set(map(type, values))
    if dtype is DType.BYTES:
        if not kinds <= {str}:
            raise InvalidArgument(f"{problem} holds something other than text")
        items = np.empty(len(values), dtype=object)
        items[:] = [item.encode() for item in values]
        return items
    if dtype is DType.BOOL:
        if not (kinds <= {bool} or (kinds <= {bool, int} and set(values) <= {0, 1})):
            raise InvalidArgument(f"{problem} holds something other than true, false, 1 and 0")
        return np.array(values, dtype=np.bool_)
    if not kinds <= {int, float}:
        raise InvalidArgument(f"{problem} holds {'booleans' if bool in kinds else 'something other than numbers'}")
    if dtype.is_float:
        with np.errstate(over="ignore"):
            result = np.array(values, dtype=np.float64).astype(dtype.numpy)
        if not np.isfinite(result).all():
            raise InvalidArgument(f"{problem} holds a number out of its range")
        return result
    if float in kinds:
        raise InvalidArgument(f"{problem} holds fractions, or integers of more than 64 bits")
    bounds = np.iinfo(dtype.numpy)
    try:
        return np.array(values, dtype=dtype.numpy)  # exact, or an error: never wrapped
    except OverflowError:
        text = f"{problem} holds a number out of its range, {bounds.min} to {bounds.max}"
        raise InvalidArgument(text) from None


def _tensor(name: str, dtype: DType, array: Array, buffers: list[bytes] | None) -> dict[str, Any]:
    """Return a tensor's JSON; its data goes to ``buffers`` if those are given."""
    entry: dict[str, Any] = {"name": name, "datatype": dtype.value, "shape": list(array.shape)}
    if buffers is not None:
        buffers.append(arrays.to_bytes(array))
        return {**entry, "parameters": {"binary_data_size": len(buffers[-1])}}
    return {**entry, "data": _to_json(name, dtype, array)}


def _to_json(name: str, dtype: DType, array: Array) -> Any:
    flat = np.ascontiguousarray(array).reshape(-1)
    if dtype is DType.BYTES:
        try:
            return [item if isinstance(item, str) else item.decode() for item in flat.tolist()]
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"tensor '{name}' holds bytes that are not UTF-8, which JSON cannot carry; ask for binary data"
            ) from error
    if dtype.is_float and not np.isfinite(flat).all():
        raise InvalidArgument(
            f"tensor '{name}' holds NaN or infinity, which JSON cannot carry; "
            "ask for it as binary data (parameters: binary_data true)"
        )
    return flat.astype(np.float32) if dtype is DType.BF16 else flat


def dumps(content: Mapping[str, Any]) -> bytes:
    """Return JSON bytes; arrays in it become lists."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _assemble(header: dict[str, Any], buffers: list[bytes]) -> tuple[bytes, int | None]:
    raw = dumps(header)
    return (b"".join((raw, *buffers)), len(raw)) if buffers else (raw, None)


def _list(item: Any, key: str, *, required: bool = True) -> list[Any]:
    value = item.get(key)
    if value is None and not required:
        return []
    if isinstance(value, list) and len(value) > MAX_TENSORS:
        raise InvalidArgument(f"the request has {len(value)} {key}; no model has over {MAX_TENSORS}")
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgument(f"the request has no '{key}' that is a list of objects")
    return value


def _dict(item: Any, key: str) -> dict[str, Any]:
    value = item.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"'{key}' is not an object")
    return value


def _text(item: Any, key: str, where: str, default: str | None = None) -> str:
    value = item.get(key, default)
    if not isinstance(value, str):
        raise InvalidArgument(f"{where} has no '{key}' that is text")
    return value


def _flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameter '{key}' is {value!r}; it must be true or false")
    return value
