"""The standard health service, ``grpc.health.v1.Health``, with Check and Watch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from ingot.errors import NotFound
from ingot.protocol.proto_codec import SERVICE as INFERENCE
from ingot.protocol.proto_codec import parse
from ingot.server.access.gate import INFER
from ingot.server.plane.operations import METHODS

SERVICE = "grpc.health.v1.Health"
_STATUS = {
    True: HealthCheckResponse.SERVING,
    False: HealthCheckResponse.NOT_SERVING,
    None: HealthCheckResponse.SERVICE_UNKNOWN,
}


_SCOPES = {f"/{INFERENCE}/{name}".encode(): operation.scope for name, operation in METHODS.items()}
_HEALTH = f"/{SERVICE}/".encode()


def scope_of(path: bytes) -> str:
    """Return the right that a call needs; empty for health checks of the server, which need none."""
    return "" if path.startswith(_HEALTH) else _SCOPES.get(path, INFER)


class Health:
    """The services' states; a service that was never set is unknown."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, service: str, serving: bool) -> None:
        """Set whether a service is served, and notify watchers."""
        self._serving[service] = serving
        self._announce()

    def close(self) -> None:
        """End the calls of watchers."""
        self._closed = True
        self._announce()

    async def check(self, data: bytes) -> bytes:
        """Answer ``Check``.

        Raises:
            NotFound: the service was never set.
        """
        service = parse(HealthCheckRequest, data).service
        if service not in self._serving:
            raise NotFound(f"there is no service '{service}'")
        return self._answer(service)

    async def watch(self, messages: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """Answer ``Watch`` at once, and again whenever the answer changes."""
        async for data in messages:
            service = parse(HealthCheckRequest, data).service
            sent = b""
            while not self._closed:
                changed = self._changed
                answer = self._answer(service)
                if answer != sent:
                    sent = answer
                    yield answer
                else:
                    await changed.wait()
            return

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _answer(self, service: str) -> bytes:
        status = _STATUS[self._serving.get(service)]
        return HealthCheckResponse(status=status).SerializeToString()
