"""Access control of the grpcio server."""

from __future__ import annotations

import dataclasses
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from ingot.errors import public_text
from ingot.protocol.proto_codec import STATUS
from ingot.protocol.requests import CLIENT
from ingot.server.access.gate import Gate
from ingot.server.access.grants import Refusal
from ingot.server.access.peers import Peer, certificate_of
from ingot.server.grpc.health import scope_of
from ingot.server.plane.dataplane import DataPlane

_STATUS = {status.value[0]: status for status in grpc.StatusCode}

Context = grpc.aio.ServicerContext[Any, Any]


@dataclasses.dataclass(frozen=True)
class _Check:
    """The check of one call's access."""

    plane: DataPlane
    gate: Gate
    authorization: bytes | None
    scope: str
    path: str

    async def __call__(self, context: Context) -> None:
        """Abort the call if it is refused, which raises."""
        peer = _peer(context)
        outcome = self.gate.check(self.authorization, self.scope, peer)
        if isinstance(outcome, Refusal):
            self.gate.count(outcome, "grpc", self.path, peer)
            self.plane.count_error("grpc", outcome.error)
            await context.abort(_STATUS[STATUS[outcome.error.code]], public_text(outcome.error))
        CLIENT.set(outcome.client)


def _peer(context: Context) -> Peer:
    pem = b"".join(context.auth_context().get("x509_pem_cert", ()))
    certificate = certificate_of(ssl.PEM_cert_to_DER_cert(pem.decode("ascii"))) if pem else None
    return Peer(urllib.parse.unquote(context.peer()).partition(":")[2], certificate)


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without access; streams are checked again before each answer, as rights may have been lost.

    Args:
        plane: counts the refusals.
        gate: the rules of access.
    """

    def __init__(self, plane: DataPlane, gate: Gate):
        self._plane = plane
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        scope = scope_of(handler_call_details.method.encode())
        if handler is None or not scope:
            return handler
        values = [value for name, value in handler_call_details.invocation_metadata if name == "authorization"]
        # With several, a proxy may have checked another one: the empty value is refused.
        value = values[0] if len(values) == 1 else ""
        raw = value if isinstance(value, bytes) else value.encode("latin-1", errors="replace")
        check = _Check(self._plane, self._gate, raw if values else None, scope, handler_call_details.method)
        if handler.unary_unary is not None:
            return handler._replace(unary_unary=_unary(handler.unary_unary, check))
        return handler._replace(stream_stream=_stream(handler.stream_stream, check))


def _unary(inner: Callable[..., Awaitable[Any]], check: _Check) -> Callable[..., Awaitable[Any]]:
    async def call(request: Any, context: Context) -> Any:
        await check(context)
        return await inner(request, context)

    return call


def _stream(inner: Callable[..., AsyncIterator[Any]], check: _Check) -> Callable[..., AsyncIterator[Any]]:
    async def call(requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        await check(context)
        async for answer in inner(requests, context):
            await check(context)
            yield answer

    return call
