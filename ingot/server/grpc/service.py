"""The gRPC service: handlers convert, the data plane decides."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import DESCRIPTOR as REFLECTION_FILE

from ingot.errors import IngotError, InternalError, InvalidArgument, public_text
from ingot.server.dataplane import DataPlane
from ingot.server.grpc import codec
from ingot.server.grpc import open_inference_pb2 as pb
from ingot.tensors import TensorSpec

log = logging.getLogger(__name__)


class Service:
    """The six calls of the Open Inference Protocol's core."""

    def __init__(self, plane: DataPlane):
        self._plane = plane

    async def server_live(self, request: pb.ServerLiveRequest) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, request: pb.ServerReadyRequest) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._plane.ready)

    async def model_ready(self, request: pb.ModelReadyRequest) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._plane.model_ready(request.name, request.version))

    async def server_metadata(self, request: pb.ServerMetadataRequest) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**self._plane.server_metadata())

    async def model_metadata(self, request: pb.ModelMetadataRequest) -> pb.ModelMetadataResponse:
        metadata = self._plane.model_metadata(request.name, request.version)
        return pb.ModelMetadataResponse(
            name=metadata.name,
            versions=metadata.versions,
            platform=metadata.platform,
            inputs=[_tensor(spec) for spec in metadata.inputs],
            outputs=[_tensor(spec) for spec in metadata.outputs],
            properties=metadata.properties,
        )

    async def model_infer(self, request: pb.ModelInferRequest) -> pb.ModelInferResponse:
        decoded = codec.decode_request(request)
        response = await self._plane.infer(decoded, "grpc")
        return codec.encode_response(response, typed=not request.raw_input_contents)


def _tensor(spec: TensorSpec) -> pb.ModelMetadataResponse.TensorMetadata:
    return pb.ModelMetadataResponse.TensorMetadata(name=spec.name, datatype=spec.dtype.value, shape=spec.wire_shape)


def create_server(
    plane: DataPlane, max_body_bytes: int, *, shared: bool = False
) -> tuple[grpc.aio.Server, HealthServicer]:
    """Return a server without a port, and its health service, which starts as not serving.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest message that is taken; answers are not limited.
        shared: whether other processes listen on the same port.
    """
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.max_send_message_length", -1),
            # Without these gRPC cancels calls by itself under load; the models' own queues say no in a better way.
            ("grpc.server.max_pending_requests", 100_000),
            ("grpc.server.max_pending_requests_hard_limit", 200_000),
            # 0: else a second server on the same port would start, and take half the requests.
            ("grpc.so_reuseport", int(shared)),
        )
    )
    service = Service(plane)
    calls: dict[str, tuple[Callable[[Any], Awaitable[Message]], type[Message]]] = {
        "ServerLive": (service.server_live, pb.ServerLiveRequest),
        "ServerReady": (service.server_ready, pb.ServerReadyRequest),
        "ModelReady": (service.model_ready, pb.ModelReadyRequest),
        "ServerMetadata": (service.server_metadata, pb.ServerMetadataRequest),
        "ModelMetadata": (service.model_metadata, pb.ModelMetadataRequest),
        "ModelInfer": (service.model_infer, pb.ModelInferRequest),
    }
    handlers = {name: _unary(plane, function, kind) for name, (function, kind) in calls.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(codec.SERVICE, handlers),))
    health_service = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection(
        (codec.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server, pool=_reflected()
    )
    return server, health_service


def _unary(
    plane: DataPlane, function: Callable[[Any], Awaitable[Message]], kind: type[Message]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Wrap a call so that its errors become statuses, and internal text never leaves."""

    @functools.wraps(function)
    async def handle(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        try:
            return await function(_parse(kind, raw))
        except IngotError as error:
            failure = error
        except Exception as error:
            log.exception("%s failed", function.__name__)
            failure = InternalError(f"{type(error).__name__}: {error}")
        plane.count_error("grpc", failure)
        return await context.abort(codec.STATUS[failure.code], public_text(failure))  # which raises

    return grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=None, response_serializer=lambda message: message.SerializeToString()
    )


def _parse(kind: type[Message], raw: bytes) -> Message:
    """Parse here, not in gRPC's library, which would tell the client of a Python exception and count nothing."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise InvalidArgument(f"the message is not a {kind.DESCRIPTOR.name}: it is no valid protobuf") from error


def _reflected() -> Any:
    """Return our private pool with the health and reflection services added, for reflection to find all three."""
    pool = pb.DESCRIPTOR.pool
    for file in (health_pb2.DESCRIPTOR, REFLECTION_FILE):
        pool.AddSerializedFile(file.serialized_pb)
    return pool
