"""HTTP bodies to requests and responses, and back, as JSON and raw tensors; and the status of each error code.

The binary tensor data extension puts raw buffers behind the JSON header, in the order of the tensors; a tensor's
``binary_data_size`` parameter is its number of bytes. The client half is used by :class:`ingot.Client`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from ingot.errors import Code, InvalidArgument, quoted
from ingot.protocol import json_data, json_large
from ingot.protocol.regions import EXTRA, Delivery, Place, Read, refuse
from ingot.protocol.requests import (
    MAX_PARAMETERS,
    MAX_TENSORS,
    InferRequest,
    InferResponse,
    Route,
    Template,
    check_parameters,
    named,
)
from ingot.tensors import Array, DType, Signature, TensorSpec, arrays

# The status of an error; responses.py looks it up, and replaces it where HTTP has a more exact one.
STATUS = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.TOO_LARGE: 413,
    Code.TOO_MANY_REQUESTS: 429,
    Code.INTERNAL: 500,
    Code.UNSUPPORTED: 501,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
    Code.STORAGE_FULL: 507,
}
# For a client that was too slow to send its body.
TOO_SLOW = 408

HEADER_LENGTH = "Inference-Header-Content-Length"

Headers = tuple[tuple[str, str], ...]

_TENSOR = '{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2]}'
_EXAMPLES = {"inputs": _TENSOR, "outputs": '{"name": "y"}'}


@dataclass(frozen=True)
class ResponseFormat:
    """The outputs that the client wants as raw buffers."""

    default: bool = False
    by_name: Mapping[str, bool] = field(default_factory=dict)

    def binary(self, name: str) -> bool:
        return self.by_name.get(name, self.default)


_JSON = ResponseFormat()


def decode_request(
    model: str,
    version: str,
    body: bytes,
    header_length: int | None,
    loads: Callable[[Any], Any] = orjson.loads,
    read: Read = refuse,
) -> tuple[InferRequest, ResponseFormat, dict[str, Any]]:
    """Parse an inference request.

    Args:
        model: from the path.
        version: from the path, or empty.
        body: the whole body.
        header_length: the JSON's length if raw buffers follow it, as the header says; None for plain JSON.
        loads: parses JSON; :func:`ingot.protocol.json_large.loads` if it is large.
        read: returns the inputs in shared memory.

    Returns:
        The request, the format of its response, and its JSON.

    Raises:
        InvalidArgument: the body is not of the protocol; the message names the tensor.
    """
    if header_length is None:
        header, buffers = _parse(body, _unannounced, loads), _Buffers(memoryview(b""))
    elif header_length <= len(body):
        header = _parse(body[:header_length], _announced, loads)
        buffers = _Buffers(memoryview(body)[header_length:])
    else:
        raise InvalidArgument(f"{HEADER_LENGTH} is {header_length}, but the body has {len(body)} bytes")
    given, wanted = _list(header, "inputs"), _list(header, "outputs", required=False)
    if (header_length or len(body)) > MAX_PARAMETERS:  # a shorter text cannot hold more
        check_parameters(sum(len(_dict(item, "parameters")) for item in (header, *given, *wanted)))
    inputs = named([_input(item, buffers, read) for item in given])
    buffers.check_empty()
    parameters = _dict(header, "parameters")
    default = _flag(parameters, "binary_data_output", False) if parameters else False
    outputs: dict[str, bool] = {}
    deliveries: dict[str, Delivery] = {}
    for item in wanted:
        name = _text(item, "name", "an output")
        if name in outputs:
            raise InvalidArgument(f"output '{name}' already exists in request; name each output once")
        options = _dict(item, "parameters")
        outputs[name] = _flag(options, "binary_data", default)
        if EXTRA.isdisjoint(options):
            continue
        delivery = Delivery.of(f"output '{name}'", options)
        if delivery is not None:
            deliveries[name] = delivery
            outputs[name] = outputs[name] and delivery.place is None
    layout = ResponseFormat(default, outputs) if default or outputs else _JSON
    identifier = _text(header, "id", "the request", default="")
    template = Template(model, version, tuple(outputs), parameters, None, deliveries)
    return InferRequest(template, inputs, identifier), layout, header


def decode_raw_request(
    model: str, version: str, body: bytes, signature: Signature
) -> tuple[InferRequest, ResponseFormat]:
    """Return a request whose whole body is the one input's raw data, batch 1 (header length 0 says so).

    Raises:
        InvalidArgument: the model has several inputs, or the size of the data does not determine its shape.
    """
    if len(signature.inputs) != 1:
        raise InvalidArgument(
            f"Raw request must only have 1 input (found 1) to be deduced but got {len(signature.inputs)} inputs in "
            f"'{model}' model configuration"
        )
    spec = signature.inputs[0]
    shape = [1 if dim == signature.batch else dim for dim in spec.shape]
    free = [axis for axis, dim in enumerate(shape) if isinstance(dim, str)]
    if spec.dtype is DType.BYTES:
        raw = len(body).to_bytes(4, "little") + body
        if free or math.prod(dim for dim in shape if isinstance(dim, int)) != 1:
            sizes = ", ".join(str(dim) for dim in spec.shape)
            raise InvalidArgument(
                f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]; it has [{sizes}], "
                "and a body without a JSON header is one element"
            )
    else:
        raw = body
        row = math.prod(dim for dim in shape if isinstance(dim, int)) * spec.dtype.numpy.itemsize
        if len(free) > 1:
            raise InvalidArgument(
                f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
                "variable-sized dimension"
            )
        if free and (not row or len(body) % row):
            raise InvalidArgument(f"the shape of '{spec.name}' does not follow from a raw body of {len(body)} bytes")
        shape = [len(body) // row if isinstance(dim, str) else dim for dim in shape]
    array = arrays.from_bytes(spec.name, spec.dtype, [int(dim) for dim in shape], raw)
    return InferRequest(Template(model, version), {spec.name: array}), ResponseFormat(default=True)


def decode_object(body: bytes) -> dict[str, Any]:
    """Parse a body that is a JSON object; an empty body is an empty one.

    Raises:
        InvalidArgument: it is not one.
    """
    return _parse(body) if body else {}


def region_of(content: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the key, offset and size of a region of shared memory, both in bytes.

    Raises:
        InvalidArgument: they are missing, or not of the right types.
    """
    numbers = [content.get("offset", 0), content.get("byte_size")]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise InvalidArgument("'offset' and 'byte_size' must be numbers of bytes")
    return _text(content, "key", "the request"), *numbers


def encode_response(response: InferResponse, layout: ResponseFormat) -> tuple[bytes, Headers]:
    """Return the body, and the header with the length of its JSON if raw buffers follow it.

    Raises:
        InvalidArgument: an output in JSON holds NaN or infinity, which JSON cannot carry.
    """
    raws, shapes = _raws(response, layout)
    known = response.route.answers.get(shapes)
    if known is None:
        known = _learn(response.route, layout, shapes)
        response.route.answers.keep(shapes, known)
    if known.texts or response.id:
        return _with_texts(response, known, raws)
    return b"".join((known.end, *raws)), known.headers


def encode_large(response: InferResponse, layout: ResponseFormat) -> tuple[bytes, Headers]:
    """Encode as :func:`encode_response` does, but for a thread: nothing is shared with the event loop."""
    raws, shapes = _raws(response, layout)
    return _with_texts(response, _learn(response.route, layout, shapes), raws)


def _raws(response: InferResponse, layout: ResponseFormat) -> tuple[list[bytes], tuple[Any, ...]]:
    """Return the raw outputs, and the shape of each output and the bytes of those that are raw."""
    found = response.arrays
    raws: list[bytes] = []
    shapes: list[Any] = []
    for spec in response.route.outputs:
        array = found[spec.name]
        shapes.append(array.shape)
        if layout.binary(spec.name) if layout.by_name else layout.default:
            raws.append(raw := arrays.to_bytes(array))
            shapes.append(len(raw))
    return raws, tuple(shapes)


def _with_texts(response: InferResponse, known: _Layout, raws: list[bytes]) -> tuple[bytes, Headers]:
    """Return a response with an id, or with outputs in JSON."""
    parts: list[bytes] = []
    for before, spec in known.texts:
        parts += (before, json_data.to_json(spec.name, spec.dtype, response.arrays[spec.name]))
    parts.append(b'%b,"id":%b}' % (known.end[:-1], orjson.dumps(response.id)) if response.id else known.end)
    headers = _length(sum(map(len, parts))) if raws else ()
    return b"".join(parts + raws), headers


@dataclass(frozen=True)
class _Layout:
    """The bytes that all responses with the same shapes have in common.

    Attributes:
        texts: the JSON before the values of each output in JSON, with its spec.
        end: the JSON behind them.
        headers: of responses without id and texts.
    """

    texts: tuple[tuple[bytes, TensorSpec], ...]
    end: bytes
    headers: Headers


def _learn(route: Route, layout: ResponseFormat, shapes: tuple[Any, ...]) -> _Layout:
    """Return the JSON of responses without their values.

    Args:
        route: of the responses.
        layout: which outputs are raw.
        shapes: the shape of each output, and the bytes of those that are raw.
    """
    left = iter(shapes)
    text = dumps({"model_name": route.name, "model_version": route.version})[:-1] + b',"outputs":['
    texts = []
    for spec in route.outputs:
        text += dumps({"name": spec.name, "datatype": spec.dtype.value, "shape": list(next(left))})[:-1]
        if spec.name in route.placed:
            text += b',"parameters":%b},' % dumps(route.placed[spec.name])
        elif layout.binary(spec.name):
            text += b',"parameters":{"binary_data_size":%d}},' % next(left)
        else:
            texts.append((text + b',"data":', spec))
            text = b"},"
    end = text.rstrip(b",") + b"]}"
    return _Layout(tuple(texts), end, _length(len(end)))


def _length(json: int) -> Headers:
    return ((HEADER_LENGTH, str(json)),)


def encode_request(request: InferRequest, *, binary: bool) -> tuple[bytes, int | None]:
    """Return a request's body, and the JSON's length if raw buffers follow it."""
    template = request.template
    buffers: list[bytes] = []
    inputs: list[dict[str, Any]] = []
    for name, array in request.inputs.items():
        dtype = DType.of(array)
        entry: dict[str, Any] = {"name": name, "datatype": dtype.value, "shape": list(array.shape)}
        if binary:
            buffers.append(arrays.to_bytes(array))
            entry["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            entry["data"] = orjson.Fragment(json_data.to_json(name, dtype, array))
        inputs.append(entry)
    header: dict[str, Any] = {"inputs": inputs, "parameters": {**template.parameters, "binary_data_output": binary}}
    if request.id:
        header["id"] = request.id
    if template.outputs:
        header["outputs"] = [{"name": name} for name in template.outputs]
    raw = dumps(header)
    return (b"".join((raw, *buffers)), len(raw)) if binary else (raw, None)


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
    """The raw data behind the JSON, read from the front."""

    def __init__(self, view: memoryview):
        self._view = view

    def take(self, name: str, size: object) -> memoryview:
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidArgument(
                f"binary_data_size of tensor '{name}' is {quoted(size)}; it must be a number of bytes"
            )
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


def _parse(
    raw: Any, remedy: Callable[[bytes, str], str] = lambda _, __: "", loads: Callable[[Any], Any] = orjson.loads
) -> dict[str, Any]:
    """Return a JSON object; ``remedy`` returns one for bytes that are not JSON and the parser's error."""
    try:
        header = loads(raw)
    except orjson.JSONDecodeError as error:
        problem, hint = json_data.problem(error, bytes(raw[:12])), remedy(bytes(raw), str(error))
        raise InvalidArgument(f"the request is not valid JSON: {problem}{hint and f'; {hint}'}") from error
    if not isinstance(header, dict):
        raise InvalidArgument("the request is not a JSON object")
    return header


def _announced(raw: bytes, problem: str) -> str:
    return f"{HEADER_LENGTH} says that the first {len(raw)} bytes of the body are the JSON, and raw tensors follow"


def _unannounced(body: bytes, problem: str) -> str:
    """Return the remedy for a body that seems to hold raw tensors without a header that says so."""
    is_raw = "UTF-8" in problem or "after document" in problem or b"\0" in body
    if not is_raw and (not body or body.lstrip().startswith((b"{", b"["))):
        return ""
    return (
        f"if raw tensors follow the JSON, the header {HEADER_LENGTH} must be the JSON's length in bytes, and 0 if "
        "the body is the data of one input alone"
    )


def _input(item: Any, buffers: _Buffers, read: Read = refuse) -> tuple[str, Array]:
    name = _text(item, "name", "a tensor")
    dtype = _datatype(name, _text(item, "datatype", f"tensor '{name}'"))
    shape = arrays.check_shape(name, item.get("shape"))
    parameters = _dict(item, "parameters")
    size = parameters.get("binary_data_size")
    if not EXTRA.isdisjoint(parameters):
        place = Place.of(f"tensor '{name}'", parameters)
        if place is not None and (size is not None or "data" in item):
            raise InvalidArgument(f"tensor '{name}' is in shared memory, and has 'data' or binary_data_size too")
        if place is not None:
            return name, read(name, place, dtype, shape)
    if size is not None:
        if "data" in item:
            raise InvalidArgument(f"tensor '{name}' has both 'data' and binary_data_size")
        return name, arrays.from_bytes(name, dtype, shape, buffers.take(name, size))
    if "data" not in item:
        raise InvalidArgument(f"tensor '{name}' has neither 'data' nor binary_data_size")
    values = item["data"]
    if isinstance(values, json_large.Numbers):
        return name, values.to_array(name, dtype, shape)
    return name, json_data.to_array(name, dtype, shape, values)


_DTYPES = {dtype.value: dtype for dtype in DType}


def _datatype(name: str, text: str) -> DType:
    found = _DTYPES.get(text)
    if found is None:
        raise InvalidArgument(f"tensor '{name}' has datatype '{text}'; known: {', '.join(_DTYPES)}")
    return found


def dumps(content: Mapping[str, Any] | list[Any]) -> bytes:
    """Return JSON bytes; arrays in it become lists."""
    return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)


def _list(item: Any, key: str, *, required: bool = True) -> list[Any]:
    value = item.get(key)
    if value is None and not required:
        return []
    if isinstance(value, list) and len(value) > MAX_TENSORS:
        raise InvalidArgument(f"the request has {len(value)} {key}; no model has over {MAX_TENSORS}")
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgument(f"'{key}' is not a list of objects such as {_EXAMPLES[key]}")
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
    if value is None:
        raise InvalidArgument(f"{where} has no '{key}'")
    if not isinstance(value, str):
        raise InvalidArgument(f"'{key}' of {where} is {quoted(value)}; it must be text")
    return value


def _flag(parameters: Mapping[str, Any], key: str, default: bool) -> bool:
    value = parameters.get(key, default)
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameter '{key}' is {quoted(value)}; it must be true or false")
    return value
