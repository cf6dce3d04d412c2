"""The fast gRPC server: its listener, its open connections, and the services that it offers."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from ingot.protocol import open_inference_pb2 as pb
from ingot.protocol.proto_codec import SERVICE, parse
from ingot.runtime import Metrics
from ingot.server.access.gate import Gate
from ingot.server.grpc.call import Method, Streaming
from ingot.server.grpc.calls import Calls
from ingot.server.grpc.connection import Connection
from ingot.server.grpc.health import SERVICE as HEALTH
from ingot.server.grpc.health import Health
from ingot.server.grpc.reflection import SERVICES as REFLECTION
from ingot.server.grpc.reflection import Reflection, pool
from ingot.server.grpc.service import Service, Unary
from ingot.server.http2.frames import ErrorCode
from ingot.server.net import listening
from ingot.server.net.limits import ClientLimits, bodies_budget, calls_budget
from ingot.server.net.listening import BACKLOG, listen
from ingot.server.plane.dataplane import DataPlane

if TYPE_CHECKING:
    from ingot.serving.control import Control

# The interval of Connection.poll, and its limits in calls: 60 s without a sign of life to a ping, 80 s to the end.
_POLL_SECONDS = 10.0
_WARN, _END = 6, 8
# The interval of checks whether all connections have drained.
_STEP = 0.02
# Time that a client has for its first bytes after the ports closed.
_SILENT_SECONDS = 1.0


class FastListener:
    """A gRPC server that does not listen yet; its health service starts as not serving.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest message accepted; answers are not limited.
        max_bodies_bytes: the memory for all messages that are being received.
        tls: the certificate; ALPN must offer ``h2``.
        gate: the rules of access; None if all calls are served.
        limits: the limits on clients; None for no limits.
        share_port: let other servers of this user listen on the same port.
        control: loads and unloads models, on the management listener; None on the listener of the data plane.
    """

    def __init__(
        self,
        plane: DataPlane,
        max_body_bytes: int,
        max_bodies_bytes: int,
        tls: ssl.SSLContext | None = None,
        gate: Gate | None = None,
        limits: ClientLimits | None = None,
        *,
        share_port: bool = False,
        control: Control | None = None,
    ):
        self._tls = tls
        self._share_port = share_port
        self._health = Health()
        self._faults = plane.metrics.grpc_faults
        methods = self._methods(Service(plane, control))
        budgets = bodies_budget(max_bodies_bytes), calls_budget(max_bodies_bytes)
        infer = method_path("ModelInfer")
        self._calls = Calls(plane, methods, infer, max_body_bytes, *budgets, self._count_fault, gate, limits)
        self._connections = set[Connection]()
        if gate is not None:
            gate.changed.append(self._recheck)
        if control is None:
            self._publish(plane.metrics)
        self._listener: asyncio.Server | None = None
        self._poll_timer: asyncio.TimerHandle | None = None

    def _publish(self, metrics: Metrics) -> None:
        """Let the metrics show the connections and streams."""
        connections = self._connections
        metrics.grpc_connections.set_function(lambda: len(connections))
        metrics.grpc_streams.set_function(lambda: sum(len(one.http2.sender.streams) for one in list(connections)))

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port; 0 chooses a free one.

        Raises:
            OSError: the port is taken, or the address cannot be bound.
        """
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(
            self._connect,
            sock=listen(host, port, share_port=self._share_port),
            backlog=BACKLOG,  # asyncio calls listen() again, with 100 by default
            ssl=self._tls,
        )
        self._poll(loop)
        return int(self._listener.sockets[0].getsockname()[1])

    async def set_serving(self, serving: bool) -> None:
        """Set the answer of the health service."""
        for service in ("", SERVICE):
            self._health.set(service, serving)

    def _connect(self) -> Connection:
        return Connection(asyncio.get_running_loop(), self._calls, self._connections)

    async def close(self) -> None:
        """Stop listening; open connections stay."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await listening.close(listener, self._connect, self._tls)

    async def stop(self, drain: float) -> None:
        """Refuse new calls, wait up to ``drain`` seconds for those in flight, and close."""
        await self.close()
        self._health.close()
        self._calls.stopping = True
        loop = asyncio.get_running_loop()
        end = loop.time() + drain
        silent = min(end, loop.time() + _SILENT_SECONDS)
        for connection in list(self._connections):
            connection.leave()
        while loop.time() < end:
            await asyncio.sleep(_STEP)
            if loop.time() > silent:
                for connection in [one for one in self._connections if not one.http2.control.settled]:
                    connection.close()
            if not self._connections:
                break
        for connection in list(self._connections):
            connection.close()
        if self._poll_timer is not None:
            self._poll_timer.cancel()

    def _methods(self, service: Service) -> dict[bytes, Method]:
        methods = {
            method_path(name): Method(unary(*call), large=name == "ModelInfer")
            for name, call in service.unary().items()
        }
        methods[method_path("ModelStreamInfer")] = Method(streaming=_infer_stream(service), many=True, large=True)
        methods[method_path("Check", HEALTH)] = Method(self._health.check)
        methods[method_path("Watch", HEALTH)] = Method(streaming=self._health.watch)
        reflection = Reflection((SERVICE, HEALTH, *REFLECTION), pool())
        for name in REFLECTION:
            methods[method_path("ServerReflectionInfo", name)] = Method(streaming=reflection.info, many=True)
        return methods

    def _recheck(self) -> None:
        """End the calls of clients that have lost their access."""
        for connection in list(self._connections):
            connection.recheck()

    def _count_fault(self, code: ErrorCode) -> None:
        self._faults.labels(code.name.lower()).inc()

    def _poll(self, loop: asyncio.AbstractEventLoop) -> None:
        for connection in list(self._connections):
            connection.poll(_WARN, _END)
        self._poll_timer = loop.call_later(_POLL_SECONDS, self._poll, loop)


def method_path(method: str, service: str = SERVICE) -> bytes:
    """Return the path of a method."""
    return f"/{service}/{method}".encode()


def unary(function: Unary, kind: type[Message]) -> Callable[[bytes], Awaitable[bytes]]:
    """Return a unary method as a function from bytes to bytes."""

    async def call(data: bytes) -> bytes:
        return (await function(parse(kind, data))).SerializeToString()

    return call


def _infer_stream(service: Service) -> Streaming:
    """Return ModelStreamInfer as a function from a stream of bytes to a stream of bytes."""

    async def call(messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        requests = (parse(pb.ModelInferRequest, data) async for data in messages)
        async with contextlib.aclosing(service.model_stream_infer(requests)) as answers:
            async for answer in answers:
                yield answer.SerializeToString()

    return call
