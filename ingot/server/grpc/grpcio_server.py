"""The gRPC server on grpcio, complete and slow: the reference for the fast one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from ingot.errors import IngotError, InvalidArgument, public_text
from ingot.faults import attempt_async
from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol import proto_codec
from ingot.protocol.context import CONTEXT, GRPC, RequestContext, identity_of
from ingot.protocol.requests import CLIENT
from ingot.server.access.gate import Gate
from ingot.server.grpc.grpcio_access import AccessInterceptor
from ingot.server.grpc.reflection import pool
from ingot.server.grpc.service import Service
from ingot.server.net.limits import SMALL_BYTES, check_size
from ingot.server.net.listening import bracketed
from ingot.server.net.tls import Content, Tls
from ingot.server.plane.dataplane import DataPlane

# gRPC has numbers, grpcio an enumeration.
_CANCELLED = 1
STATUS = {status.value[0]: status for status in grpc.StatusCode}
"""The statuses by number."""


class GrpcioListener:
    """A gRPC server without a port; its health service starts as not serving.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest message accepted; answers are not limited.
        tls: the certificate, or None.
        gate: the rules of access; None if all calls are served.
        share_port: let other servers of this user listen on the same port.
    """

    def __init__(
        self,
        plane: DataPlane,
        max_body_bytes: int,
        tls: Tls | None = None,
        gate: Gate | None = None,
        *,
        share_port: bool = False,
    ):
        self._credentials = _credentials(tls) if tls is not None else None
        interceptors = () if gate is None else (AccessInterceptor(plane, gate),)
        self._server, self._health = _create_server(plane, max_body_bytes, interceptors, share_port=share_port)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port; 0 chooses a free one.

        Raises:
            OSError: the port is taken, or the address cannot be bound.
        """
        address = f"{bracketed(host)}:{port}"
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise OSError("in use or not allowed") from error
        await self._server.start()
        await self.set_serving(False)
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of the health service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", proto_codec.SERVICE):
            await self._health.set(service, status)

    async def stop(self, drain: float) -> None:
        """Refuse new calls, wait up to ``drain`` seconds for those in flight, and close."""
        await self._server.stop(drain)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return credentials that follow the certificate."""
    used = tls.content

    def configuration(content: Content) -> Any:
        return grpc.ssl_server_certificate_configuration([(content.key, content.cert)], content.authorities)

    def latest() -> Any:
        """Return the configuration for a new connection; None if it has not changed. Called in gRPC's threads."""
        nonlocal used
        content = tls.content
        if content is used:
            return None
        used = content
        return configuration(content)

    return grpc.dynamic_ssl_server_credentials(
        configuration(used), latest, require_client_authentication=used.authorities is not None
    )


def _create_server(
    plane: DataPlane, max_body_bytes: int, interceptors: Sequence[grpc.aio.ServerInterceptor], *, share_port: bool
) -> tuple[grpc.aio.Server, HealthServicer]:
    """Return a server without a port, and its health service, which starts as not serving.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest message accepted; answers are not limited.
        interceptors: called for every call.
        share_port: let other servers of this user listen on the same port.
    """
    server = grpc.aio.server(
        interceptors=interceptors,
        options=(
            ("grpc.max_receive_message_length", max_body_bytes),
            ("grpc.max_send_message_length", -1),
            # Without these gRPC cancels calls under load; the models' queues refuse them with a reason.
            ("grpc.server.max_pending_requests", 100_000),
            ("grpc.server.max_pending_requests_hard_limit", 200_000),
            # On by default: a second server would start on the same port and receive half of the requests.
            ("grpc.so_reuseport", int(share_port)),
        ),
    )
    service = Service(plane)
    handlers = {name: _unary(plane, name, *method) for name, method in service.unary().items()}
    handlers["ModelStreamInfer"] = _infer_stream(plane, service)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(proto_codec.SERVICE, handlers),))
    health_service = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    reflection.enable_server_reflection(
        (proto_codec.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server, pool=pool()
    )
    return server, health_service


def _unary(
    plane: DataPlane, name: str, function: Callable[[Any], Awaitable[Message]], kind: type[Message]
) -> grpc.RpcMethodHandler[Any, Any]:
    """Wrap a method so that its errors become statuses without internal text."""

    async def call(raw: bytes) -> Message:
        if name != "ModelInfer":  # whose limit grpcio checks
            check_size(len(raw), SMALL_BYTES)
        return await function(proto_codec.parse(kind, raw))

    async def handle(raw: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Message:
        CLIENT.set(CLIENT.get() or hash(context.peer()))  # a number, since clients with keys are named by text
        request = _begin(plane, context, _path(name))
        outcome = await attempt_async(f"{name} failed", call(raw))
        request.finish(0 if not isinstance(outcome, IngotError) else proto_codec.STATUS[outcome.code])
        if not isinstance(outcome, IngotError):
            return outcome
        plane.count_error("grpc", outcome)
        status, text = STATUS[proto_codec.STATUS[outcome.code]], public_text(outcome)
        del outcome  # grpcio keeps this frame for a while, and so all that the error's traceback refers to
        return await context.abort(status, text)  # raises

    return grpc.unary_unary_rpc_method_handler(
        handle, request_deserializer=None, response_serializer=lambda message: message.SerializeToString()
    )


def _begin(plane: DataPlane, context: grpc.aio.ServicerContext[Any, Any], path: str) -> RequestContext:
    """Return a call's identity, which its trailers name; observe it if requests are observed."""
    pairs = ((name, value) for name, value in context.invocation_metadata() or () if isinstance(value, str))
    request = RequestContext(*identity_of((name.encode(), value.encode()) for name, value in pairs))
    if plane.observer is not None:
        plane.observer.begin(request, GRPC, path.encode())
    named = [("x-request-id", request.id.decode())]
    if request.traceparent:
        named.append(("traceparent", request.traceparent.decode()))
    context.set_trailing_metadata(tuple(named))
    CONTEXT.set(request)
    return request


def _path(method: str) -> str:
    return f"/{proto_codec.SERVICE}/{method}"


def _infer_stream(plane: DataPlane, service: Service) -> grpc.RpcMethodHandler[Any, Any]:
    async def handle(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        CLIENT.set(CLIENT.get() or hash(context.peer()))  # a number, since clients with keys are named by text
        request = _begin(plane, context, _path("ModelStreamInfer"))
        requests = (proto_codec.parse(pb.ModelInferRequest, data) async for data in messages)
        try:
            async with contextlib.aclosing(service.model_stream_infer(requests)) as answers:
                async for answer in answers:
                    yield answer.SerializeToString()
            request.finish(0)
        except InvalidArgument as error:
            request.finish(proto_codec.STATUS[error.code])
            await context.abort(STATUS[proto_codec.STATUS[error.code]], public_text(error))
        finally:
            request.finish(_CANCELLED)

    return grpc.stream_stream_rpc_method_handler(handle, request_deserializer=None, response_serializer=None)
