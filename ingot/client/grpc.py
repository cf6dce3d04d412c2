"""The protocol over gRPC, without a channel: the messages of a client, and what their answers mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.json_format import MessageToDict

from ingot import errors
from ingot.client.access import parsing, too_large, unreachable
from ingot.errors import IngotError
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.documents import ModelMetadata, Statistics, TensorMetadata
from ingot.protocol.requests import InferRequest
from ingot.tensors import Array

T = TypeVar("T")

STREAM = f"/{proto_codec.SERVICE}/ModelStreamInfer"

_BY_STATUS = {status: errors.CLASSES[code] for code, status in proto_codec.STATUS.items()}
_LARGEST_MESSAGE = (1 << 31) - 1
_PUSHBACK = "grpc-retry-pushback-ms"  # with RESOURCE_EXHAUSTED: the client may retry


@dataclass(frozen=True, kw_only=True)
class GrpcCall(Generic[T]):
    """A unary call: its method's name, the request, the type of the answer, and how that is read."""

    method: str
    request: Any
    answer: Any
    read: Callable[[Any], T]

    @property
    def path(self) -> str:
        return f"/{proto_codec.SERVICE}/{self.method}"


class GrpcProtocol:
    """Calls of one server; ``url`` is its address, ``limit`` the most bytes of a response."""

    def __init__(self, url: str, limit: int):
        self.url, self.limit = url, min(limit, _LARGEST_MESSAGE)

    @property
    def options(self) -> tuple[tuple[str, int], ...]:
        """The options of a channel."""
        return ("grpc.max_receive_message_length", self.limit), ("grpc.max_send_message_length", -1)

    def ready(self, model: str) -> GrpcCall[bool]:
        """Ask whether a model, or the server, is ready."""
        if model:
            request = pb.ModelReadyRequest(name=model)
            return GrpcCall(method="ModelReady", request=request, answer=pb.ModelReadyResponse, read=_is_ready)
        return GrpcCall(
            method="ServerReady", request=pb.ServerReadyRequest(), answer=pb.ServerReadyResponse, read=_is_ready
        )

    def metadata(self, model: str, version: str) -> GrpcCall[ModelMetadata]:
        """Ask for a model's metadata."""
        request = pb.ModelMetadataRequest(name=model, version=version)
        return GrpcCall(method="ModelMetadata", request=request, answer=pb.ModelMetadataResponse, read=_metadata)

    def infer(self, request: InferRequest, *, binary: bool) -> GrpcCall[dict[str, Array]]:
        """Ask for an answer, which is always raw."""
        message = proto_codec.encode_request(request)
        return GrpcCall(method="ModelInfer", request=message, answer=pb.ModelInferResponse, read=self._outputs)

    def read_event(self, message: pb.ModelStreamInferResponse) -> dict[str, Array] | None:
        """Return the outputs of a message of a stream; None if it has none, as the last one may.

        Raises:
            IngotError: the server reports an error.
        """
        if message.error_message:
            raise IngotError(f"the server answered: {message.error_message}")
        return self._outputs(message.infer_response) if message.infer_response.outputs else None

    def _outputs(self, answer: pb.ModelInferResponse) -> dict[str, Array]:
        with parsing(self.url):
            return proto_codec.decode_response(answer)

    def statistics(self, model: str, version: str) -> GrpcCall[list[Statistics]]:
        """Ask for the statistics of a model."""
        return GrpcCall(
            method="ModelStatistics",
            request=pb.ModelStatisticsRequest(name=model, version=version),
            answer=pb.ModelStatisticsResponse,
            read=_statistics,
        )

    def metrics(self) -> GrpcCall[str]:
        raise errors.Unsupported("metrics are served over HTTP; use the server's http:// address")

    def failure(self, status: grpc.StatusCode, details: str | None, trailers: Any) -> IngotError:
        """Return the error that a call ended with."""
        if status is grpc.StatusCode.UNAVAILABLE and re.search("connect|resolving", str(details), re.IGNORECASE):
            return unreachable(self.url, str(details).rpartition("last error: ")[2])
        if "CLIENT: Received message larger than max" in str(details):
            return too_large(self.url, self.limit)
        kind = _BY_STATUS.get(status.value[0], errors.InternalError)
        pushback = next((str(value) for name, value in trailers or () if name == _PUSHBACK), "")
        if kind is errors.TooLarge and pushback:
            kind = errors.TooManyRequests
        error = kind(f"the server answered {status.name}: {details}")
        if pushback.isdecimal() or kind is errors.Unavailable:
            error.retry_after = int(pushback) / 1e3 if pushback.isdecimal() else 0.0
        return error


def _is_ready(answer: Any) -> bool:
    return bool(answer.ready)


def _statistics(answer: pb.ModelStatisticsResponse) -> list[Statistics]:
    """Return the statistics as they are over HTTP: numbers of 64 bits are not text there."""
    found = MessageToDict(answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    entries: list[Statistics] = _numbers(found.get("model_stats", []))
    return entries


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if key in ("name", "version") else _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value)


def _metadata(answer: pb.ModelMetadataResponse) -> ModelMetadata:
    def tensors(specs: Any) -> list[TensorMetadata]:
        return [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]

    found: ModelMetadata = {
        "name": answer.name,
        "versions": list(answer.versions),
        "platform": answer.platform,
        "inputs": tensors(answer.inputs),
        "outputs": tensors(answer.outputs),
    }
    if answer.properties:
        found["properties"] = dict(answer.properties)
    return found
