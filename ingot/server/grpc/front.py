"""The gRPC listener of Google's own library."""

from __future__ import annotations

import grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from ingot.server.config import ServerConfig
from ingot.server.dataplane import DataPlane
from ingot.server.grpc.codec import SERVICE
from ingot.server.grpc.service import create_server
from ingot.server.listening import bracketed, check_port, taken
from ingot.server.tls import Tls


class GrpcFront:
    """gRPC over a data plane; the arguments are those of :class:`ingot.server.fronts.Listeners`."""

    def __init__(self, plane: DataPlane, config: ServerConfig, tls: Tls | None, *, shared: bool = False):
        self._shared = shared
        self._credentials = grpc.ssl_server_credentials([(tls.key, tls.cert)]) if tls is not None else None
        self._server, self._health = create_server(plane, config.max_body_bytes, shared=shared)

    async def start(self, host: str, port: int) -> int:
        if port and not self._shared:
            check_port("gRPC", host, port)  # gRPC's own library would log it to stderr
        address = f"{bracketed(host)}:{port}"
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._credentials)
        except RuntimeError as error:
            raise taken("gRPC", host, port, "in use or not allowed") from error
        await self._server.start()
        await self.report(serving=False)
        return port

    async def report(self, *, serving: bool) -> None:
        status = HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        for service in ("", SERVICE):
            await self._health.set(service, status)

    async def stop(self, drain: float) -> None:
        await self._server.stop(drain)
