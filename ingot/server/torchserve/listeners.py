"""Opens TorchServe's ports next to the server's own: three of HTTP, and two of gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from ingot.config import ServerConfig
from ingot.errors import InvalidArgument
from ingot.server.access.audit import AuditLog
from ingot.server.access.gate import MANAGE, Gate
from ingot.server.access.watch import Watch
from ingot.server.grpc.call import Method
from ingot.server.http.admission import Admission, Hosts
from ingot.server.http.api import Api
from ingot.server.http.listener import HttpListener
from ingot.server.listeners import Listeners
from ingot.server.net.limits import ClientLimits
from ingot.server.net.listening import Listener, bracketed
from ingot.server.net.tls import Tls
from ingot.server.plane.dataplane import DataPlane
from ingot.server.torchserve import api, grpc
from ingot.server.torchserve.management import Management
from ingot.server.torchserve.predictions import Predictions
from ingot.server.torchserve.versions import Versions
from ingot.serving.rollout import Rollouts

_LOOPBACK = "127.0.0.1"


class TorchServe:
    """The listeners with TorchServe's APIs, in the process with the models.

    Inference and metrics are where the server's own ports are; management is on this machine only, and open if clients
    need keys, or with ``insecure``.

    Args:
        plane: the server's behaviour.
        rollouts: changes the models.
        config: addresses and limits.
        tls: the certificate, or None.

    Attributes:
        urls: where they listen, by their names; empty while they do not.
    """

    def __init__(self, plane: DataPlane, rollouts: Rollouts, config: ServerConfig, tls: Tls | None):
        self.urls: dict[str, str] = {}
        self._plane = plane
        self._config = config
        self._tls = tls
        versions = Versions(rollouts.repository)
        self._predictions = Predictions(plane, versions)
        self._management = Management(rollouts, versions, config)
        self._watch = Watch(plane.metrics)
        self._open: list[Listener] = []

    async def start(self, ports: Listeners) -> None:
        """Open the ports.

        Args:
            ports: the server's own, whose rules of access and limits on clients hold here too.

        Raises:
            InvalidArgument: one is taken, or the address cannot be bound; none is open then.
        """
        config = self._config
        http, http_managed, http_metrics, rpc, rpc_managed = config.torchserve_ports_by_use
        async with contextlib.AsyncExitStack() as on_error:
            on_error.push_async_callback(self.stop, 0)
            admission, limits = ports.admission(api.scope_of), ports.limits
            await self._http("inference", http, config.host, api.inference(self._predictions), admission, limits)
            await self._http("metrics", http_metrics, config.host, api.METRICS_API, admission, limits)
            methods = grpc.inference(self._plane, self._predictions)
            await self._grpc("gRPC inference", rpc, config.host, methods, ports.gate, limits)
            if config.auth is not None or config.insecure:
                managing = self._gate(ports.audit)
                admission = Admission(managing, None, Hosts(frozenset()), scope_of=api.scope_of)
                served = api.management(self._management)
                await self._http("management", http_managed, _LOOPBACK, served, admission, None)
                methods = grpc.management(self._management)
                await self._grpc("gRPC management", rpc_managed, _LOOPBACK, methods, managing, None)
            self._watch.start()
            on_error.pop_all()

    async def stop(self, drain: float) -> None:
        """Close the ports, and finish the requests in flight within ``drain`` seconds."""
        self._watch.stop()
        await asyncio.gather(*(listener.stop(drain) for listener in self._open))
        self._open, self.urls = [], {}

    async def _http(
        self, name: str, port: int, host: str, served: Api, admission: Admission | None, limits: ClientLimits | None
    ) -> None:
        sizes = self._config.max_body_bytes, self._config.max_bodies_mb << 20
        listener = HttpListener(self._plane, *sizes, self._tls, admission, limits, api=served)
        await self._listen(name, listener, host, port, "http")

    async def _grpc(
        self,
        name: str,
        port: int,
        host: str,
        methods: Mapping[bytes, Method],
        gate: Gate | None,
        limits: ClientLimits | None,
    ) -> None:
        sizes = self._config.max_body_bytes, self._config.max_bodies_mb << 20
        tls = None if self._tls is None else self._tls.context(["h2"])
        listener = grpc.ServicesListener(methods, self._plane, *sizes, tls, gate, limits)
        await self._listen(name, listener, host, port, "grpc")
        await listener.set_serving(True)

    async def _listen(self, name: str, listener: Listener, host: str, port: int, scheme: str) -> None:
        try:
            port = await listener.start(host, port)
        except OSError as error:
            raise InvalidArgument(
                f"cannot listen on {bracketed(host)}:{port} for TorchServe's {name}: {error.strerror or error}; change "
                "--torchserve-ports"
            ) from error
        self._open.append(listener)
        self.urls[name] = f"{scheme}{'' if self._tls is None else 's'}://{bracketed(host)}:{port}"

    def _gate(self, audit: AuditLog | None) -> Gate | None:
        if self._config.auth is None:
            return None
        gate = Gate(self._config.auth, self._plane.metrics, audit, scope=MANAGE)
        self._watch.add("auth", lambda: gate.files, gate.load, gate.replace)
        self._watch.each(gate.expire)
        return gate
