"""The protocol over HTTP, without a connection: the requests of a client, and what its responses mean."""

from __future__ import annotations

import email.utils
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote

import httpx
import orjson

from ingot import errors
from ingot.client.access import DOCUMENT_BYTES, parsing, unreachable
from ingot.client.bodies import Lines
from ingot.errors import IngotError, InvalidArgument
from ingot.protocol import json_codec, json_data
from ingot.protocol.documents import ModelMetadata, Statistics, TensorMetadata
from ingot.protocol.requests import InferRequest
from ingot.tensors import Array, DType

T = TypeVar("T")

_BY_STATUS = {status: errors.CLASSES[code] for code, status in json_codec.STATUS.items()}
_BY_STATUS[json_codec.TOO_SLOW] = errors.DeadlineExceeded
# Statuses of requests that were refused for now.
_LATER = (429, 503)


@dataclass(frozen=True, kw_only=True)
class HttpCall(Generic[T]):
    """A request, and how its response is read.

    Attributes:
        accept: the statuses of responses that are not errors.
        read: returns the result of a response.
        limit: bytes of the response.
    """

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    content: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    accept: tuple[int, ...] = (200,)
    limit: int = DOCUMENT_BYTES


class HttpProtocol:
    """Requests to one server; ``url`` is its address, ``limit`` the most bytes of a response of inference."""

    def __init__(self, url: str, limit: int):
        self.url, self.limit = url, limit

    def ready(self, model: str) -> HttpCall[bool]:
        """Ask whether a model, or the server, is ready."""
        if model:  # gRPC responds in the same way for a model that is not ready and one that does not exist
            return HttpCall(method="GET", path=f"{_path(model, '')}/ready", accept=(200, 404, 503), read=_is_ok)
        return HttpCall(method="GET", path="/v2/health/ready", accept=(200, 503), read=_is_ok)

    def metadata(self, model: str, version: str) -> HttpCall[ModelMetadata]:
        """Ask for a model's metadata."""

        def read(response: httpx.Response) -> ModelMetadata:
            with parsing(self.url):
                return _checked_metadata(orjson.loads(response.content))

        return HttpCall(method="GET", path=_path(model, version), read=read)

    def infer(self, request: InferRequest, *, binary: bool) -> HttpCall[dict[str, Array]]:
        """Ask for an answer."""
        body, length = json_codec.encode_request(request, binary=binary)
        headers = {"Content-Type": "application/json"}
        if length is not None:
            headers |= {"Content-Type": "application/octet-stream", json_codec.HEADER_LENGTH: str(length)}

        def read(response: httpx.Response) -> dict[str, Array]:
            header_length = response.headers.get(json_codec.HEADER_LENGTH)
            with parsing(self.url):
                return json_codec.decode_response(response.content, int(header_length) if header_length else None)

        path = f"{_path(request.template.model, request.template.version)}/infer"
        return HttpCall(method="POST", path=path, content=body, headers=headers, read=read, limit=self.limit)

    def stream(self, request: InferRequest, metadata: ModelMetadata) -> tuple[HttpCall[None], Events]:
        """Ask for all answers to a request; return how the lines of the response are read.

        Raises:
            InvalidArgument: an input has another datatype than the model's.
        """
        with parsing(self.url):
            wanted = {spec["name"]: DType(spec["datatype"]) for spec in metadata["inputs"]}
            specs = {spec["name"]: spec for spec in metadata["outputs"]}
            events = Events(self.url, specs, request.template.outputs, self.limit)
        content: dict[str, Any] = {"parameters": dict(request.template.parameters)}
        for name, array in request.inputs.items():
            dtype = DType.of(array)
            if wanted.get(name, dtype) is not dtype:
                raise InvalidArgument(f"input '{name}' is {dtype.value}, but the model takes {wanted[name].value}")
            content[name] = orjson.Fragment(_nested(json_data.to_json(name, dtype, array), array.shape))
        call = HttpCall(
            method="POST",
            path=f"{_path(request.template.model, request.template.version)}/generate_stream",
            content=orjson.dumps(content),
            headers={"Content-Type": "application/json"},
            read=lambda _: None,
        )
        return call, events

    def statistics(self, model: str, version: str) -> HttpCall[list[Statistics]]:
        """Ask for the statistics of a model."""

        def read(response: httpx.Response) -> list[Statistics]:
            with parsing(self.url):
                return _checked_statistics(orjson.loads(response.content)["model_stats"])

        return HttpCall(method="GET", path=f"{_path(model, version)}/stats", read=read)

    def metrics(self) -> HttpCall[str]:
        """Ask for the metrics."""
        return HttpCall(method="GET", path="/metrics", read=lambda response: response.text)

    def failure(self, response: httpx.Response) -> IngotError:
        """Return the error that a response is; its content is read."""
        kind = _BY_STATUS.get(response.status_code, errors.InternalError)
        text = f"the server answered {response.status_code}: {_error_text(response)}"
        base = self.url
        if response.status_code == 400 and "speaks gRPC" in text:
            return InvalidArgument(f"{base} is a server's gRPC port; write {base.replace('http', 'grpc', 1)}")
        if response.status_code == 404 and base.endswith("/v2"):  # a proxy may serve it under such a path
            text = f"{text}; the client adds /v2 itself: give the address as {base.removesuffix('/v2')}"
        error = kind(text)
        if response.status_code in _LATER:
            error.retry_after = _retry_after(response.headers.get("Retry-After", ""))
        return error

    def lost(self, error: httpx.HTTPError) -> IngotError:
        """Return the error for a request without a response."""
        if isinstance(error, httpx.TimeoutException):
            return errors.DeadlineExceeded(f"{self.url} did not answer in time")
        if isinstance(error, httpx.ConnectError):
            return unreachable(self.url, str(error))
        return errors.Unavailable(str(unreachable(self.url, str(error))))


class Events:
    """The answers in a stream of server-sent events.

    Args:
        url: of the server, for messages.
        specs: the outputs of the model, as its metadata has them.
        outputs: the names of those that are wanted; empty for all.
        limit: bytes of one answer.
    """

    def __init__(self, url: str, specs: Mapping[str, TensorMetadata], outputs: tuple[str, ...], limit: int):
        self._url = url
        self._lines = Lines(url, limit)
        self._specs = specs
        self._outputs = outputs or tuple(specs)

    def read(self, part: bytes) -> Iterator[dict[str, Array]]:
        """Yield the outputs of each answer that a part of the stream ends.

        Raises:
            IngotError: the server reports an error, or a line is not of the protocol, or too long.
        """
        for line in self._lines.add(part):
            if line.startswith("data:"):
                yield self._answer(line)

    def _answer(self, line: str) -> dict[str, Array]:
        with parsing(self._url):
            content = orjson.loads(line.removeprefix("data:"))
            failed = content.get("error")
        if failed is not None:
            raise IngotError(f"the server answered: {failed}")
        with parsing(self._url):
            return {name: self._array(name, content[name]) for name in self._outputs}

    def _array(self, name: str, value: object) -> Array:
        """Return an output; its shape is that of the metadata if that leaves no choice, otherwise it is flat."""
        spec = self._specs[name]
        array = json_data.from_json(name, DType(spec["datatype"]), value if isinstance(value, list) else [value])
        shape = tuple(spec["shape"])
        known = math.prod(size for size in shape if size != -1)
        fits = shape.count(-1) <= 1 and known and array.size % known == 0 and (-1 in shape or array.size == known)
        return array.reshape(shape) if fits else array


def _checked_metadata(metadata: Any) -> ModelMetadata:
    """Return a model's metadata as JSON, of which all is read that callers read.

    Raises:
        ValueError: it has another form.
    """
    specs = [spec for part in ("inputs", "outputs") for spec in _listed(metadata.get(part, []), part)]
    for spec in specs:
        if not all(isinstance(spec.get(field), str) for field in ("name", "datatype")):
            raise ValueError("a tensor of the metadata has no name or datatype")
        _listed(spec.get("shape"), f"the shape of '{spec['name']}'", int)
    if not all(isinstance(value, str) for value in metadata.get("properties", {}).values()):
        raise ValueError("a property of the metadata is not text")
    found: ModelMetadata = metadata
    return found


def _checked_statistics(entries: Any) -> list[Statistics]:
    """Return entries of the statistics extension, of which all is read that callers read.

    Raises:
        ValueError: they have another form.
    """
    found: list[dict[str, Any]] = _listed(entries, "model_stats")
    for entry in found:
        for part in entry.get("inference_stats", {}).values():
            if not all(type(value) in (int, float) for value in part.values()):
                raise ValueError("a count of the statistics is not a number")
        for name in ("inference_count", "execution_count"):
            if type(entry.get(name, 0)) is not int:
                raise ValueError(f"{name} is not a number")
    return cast(list[Statistics], found)


def _listed(value: Any, what: str, kind: type = dict) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise ValueError(f"{what} is not a list of {'numbers' if kind is int else 'objects'}")
    return value


def _nested(flat: bytes, shape: tuple[int, ...]) -> bytes:
    """Return a flat JSON list as nested ones."""
    values = orjson.loads(flat)
    for size in reversed(shape[1:]):
        values = [values[start : start + size] for start in range(0, len(values), size)] if size else []
    return orjson.dumps(values if shape else values[0])


def _is_ok(response: httpx.Response) -> bool:
    return response.status_code == 200


def _retry_after(text: str) -> float:
    """Return the seconds of a ``Retry-After``, which may be a date; 0 without one."""
    if text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    except (TypeError, ValueError):
        return 0.0


def _path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _error_text(response: httpx.Response) -> str:
    try:
        return str(orjson.loads(response.content)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        if "html" in response.headers.get("content-type", ""):
            return "a web page; this is not an Open Inference Protocol server, or a proxy answers in its place"
        return response.text[:200]
