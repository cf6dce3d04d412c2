"""Both ports of a server, and a listener for each protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from ingot.config import CLIENT_LIMITS, ServerConfig
from ingot.config.exposure import listed
from ingot.errors import Unauthenticated
from ingot.server.access.audit import AuditLog
from ingot.server.access.gate import Gate
from ingot.server.access.grants import Refusal
from ingot.server.access.peers import Peer
from ingot.server.access.watch import Watch
from ingot.server.http.admission import Admission, Cors, Hosts
from ingot.server.http.listener import HttpListener
from ingot.server.net.limits import ClientLimits
from ingot.server.net.listening import Descriptors, Listener, check_port, reserve, taken
from ingot.server.net.tls import Tls
from ingot.server.observation.access_log import AccessLog
from ingot.server.observation.observer import Observer, spans_to
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.operations import scope_of_path

log = logging.getLogger(__name__)


class Ports(Protocol):
    """Both ports of a server, whichever process listens on them.

    Attributes:
        audit: where refused requests are logged while the ports are open; None if they are not.
    """

    audit: AuditLog | None
    http_port: int
    grpc_port: int

    async def start(self) -> None:
        """Open both ports.

        Raises:
            InvalidArgument: one is taken or the address cannot be bound; none is open then.
        """
        ...

    async def set_serving(self, serving: bool) -> None:
        """Set the status that the health services report."""
        ...

    async def stop(self, drain: float) -> None:
        """Close both ports, and finish the requests in flight within ``drain`` seconds."""
        ...


class Listeners:
    """Both protocols in this process and event loop.

    Ports are open from the start, so that health checks see models load. Shared ports are only reserved until the
    server serves: other servers answer on them meanwhile, and this one would refuse its part of the requests.

    Args:
        plane: the server's behaviour.
        config: addresses and limits.
        tls: the certificate, or None.

    Attributes:
        audit: as of :class:`Ports`.
        gate: the rules of access; None if all requests are served.
        limits: those on clients, which all ports share; None if there are none.
    """

    def __init__(self, plane: DataPlane, config: ServerConfig, tls: Tls | None):
        self.http_port = config.http_port
        self.grpc_port = config.grpc_port
        self._plane = plane
        plane.sticky_header = (config.sticky_header or "").lower()
        self._config = config
        self._tls = tls
        self._created: dict[str, Listener] = {}
        self._open: list[Listener] = []
        self._reserved: list[socket.socket] = []
        self._descriptors = Descriptors(plane.metrics)
        self.audit: AuditLog | None = None
        self.gate: Gate | None = None
        self.limits = self._limits()
        self._watch = Watch(plane.metrics)
        self._had_plain = False

    async def start(self) -> None:
        plane, config, tls = self._plane, self._config, self._tls
        async with contextlib.AsyncExitStack() as on_error:
            on_error.push_async_callback(self.stop, config.drain_timeout)
            if config.audit_log is not None:
                self.audit = AuditLog(config.audit_log, plane.metrics)
                self._watch = Watch(plane.metrics, self.audit)
                self._watch.each(self.audit.summarize)
            self.gate = self._gate()
            if tls is not None:
                tls.refused = self._refused_handshake
                self._watch.add("certificates", lambda: tls.files, tls.read, tls.use)
            plane.observe(self._observer())
            self._created = self._create(self.gate)
            if config.share_port:
                for protocol, port in (("HTTP", self.http_port), ("gRPC", self.grpc_port)):
                    self._reserved.append(reserve(protocol, config.host, port))
            else:
                await self._listen()
            self._descriptors.start()
            self._watch.start()
            on_error.pop_all()

    async def set_serving(self, serving: bool) -> None:
        if serving and self._reserved:
            await self._listen()
            self._release()
        for listener in self._open:
            await listener.set_serving(serving)

    async def warm(self) -> None:
        """Prepare what the first requests other than inference would wait for."""
        for listener in self._open:
            if isinstance(listener, HttpListener):
                await listener.warm()

    async def stop(self, drain: float) -> None:
        self._descriptors.stop()
        self._watch.stop()
        await asyncio.gather(*(listener.stop(drain) for listener in self._open))
        self._open = []
        self._release()
        if self._plane.observer is not None:
            await asyncio.to_thread(self._plane.observer.close)
        if self.audit is not None:
            await asyncio.to_thread(self.audit.close)
            self.audit = None

    def _create(self, gate: Gate | None) -> dict[str, Listener]:
        """Return a listener of each protocol that does not listen yet. Only the chosen gRPC server is imported."""
        plane, config, tls, limits = self._plane, self._config, self._tls, self.limits
        sizes = config.max_body_bytes, config.max_bodies_mb << 20
        admission, share_port = self.admission(), config.share_port
        http = HttpListener(plane, *sizes, tls, admission, limits, share_port=share_port, page=config.shows_page)
        if config.grpc_server == "grpcio":
            from ingot.server.grpc.grpcio_server import GrpcioListener

            return {"HTTP": http, "gRPC": GrpcioListener(plane, sizes[0], tls, gate, share_port=share_port)}
        from ingot.server.grpc.fast import FastListener

        context = None if tls is None else tls.context(["h2"])
        return {"HTTP": http, "gRPC": FastListener(plane, *sizes, context, gate, limits, share_port=share_port)}

    async def _listen(self) -> None:
        self.http_port = await self._opened("HTTP", self.http_port)
        if self.grpc_port and not self._config.share_port:
            # grpcio logs the failure to stderr, without its cause.
            check_port("gRPC", self._config.host, self.grpc_port)
        self.grpc_port = await self._opened("gRPC", self.grpc_port)

    def _release(self) -> None:
        """Close the sockets that reserve shared ports."""
        for bound in self._reserved:
            bound.close()
        self._reserved = []

    def _gate(self) -> Gate | None:
        """Return the rules of access, which follow their file; None if all requests are served."""
        config = self._config
        if config.auth is None and config.tls_client_ca is None:
            return None
        gate = Gate(config.auth, self._plane.metrics, self.audit, by_certificate=config.tls_client_ca is not None)
        if config.auth is not None:
            self._watch.add("auth", lambda: gate.files, gate.load, gate.replace)
        self._watch.each(gate.expire)
        return gate

    def _limits(self) -> ClientLimits | None:
        """Return the limits on clients, which both protocols share; None if there are none."""
        config, limited = self._config, self._plane.metrics.limited
        if not any(getattr(config, name) is not None for name in CLIENT_LIMITS):
            return None
        most = config.max_connections, config.max_in_flight, config.max_rate
        return ClientLimits(lambda limit: limited.labels(limit).inc(), *most)

    def _observer(self) -> Observer | None:
        """Return the observer of requests; None if no reports are configured."""
        config, metrics = self._config, self._plane.metrics
        access_log = None
        if config.access_log != "off":
            lines = metrics.access_log_lines
            access_log = AccessLog(config.access_log, config.access_log_share, config.access_log_slow, lines)
        spans = spans_to(config.otlp, config.otlp_share, metrics, config.replica_name)
        return None if access_log is None and spans is None else Observer(access_log, spans)

    def _refused_handshake(self, reason: str) -> None:
        self._plane.metrics.tls_refused.labels(reason).inc()
        if reason == "plain" and not self._had_plain:
            self._had_plain = True
            log.warning(
                "a client speaks HTTP or gRPC without TLS to a port with TLS; it needs https:// or grpcs://. Further "
                'ones are counted only: ingot_tls_refused_total{reason="plain"}'
            )
        if reason == "certificate" and self.audit is not None:
            # Its address is not known here.
            self.audit.refused(Refusal(Unauthenticated("no valid certificate"), reason), "tls", "", Peer())

    def admission(self, scope_of: Callable[[str], str] = scope_of_path) -> Admission | None:
        """Return the checks of requests over HTTP, by the right that each path needs; None to admit all."""
        config, gate = self._config, self.gate
        origins, names = listed(config.cors_origin), listed(config.allowed_host)
        cors = Cors(origins, credentials=config.tls_client_ca is not None) if origins else None
        hosts = Hosts(names) if names else None
        sticky = self._plane.sticky_header
        return (
            None
            if gate is None and cors is None and hosts is None and not sticky
            else Admission(gate, cors, hosts, sticky, scope_of)
        )

    async def _opened(self, protocol: str, port: int) -> int:
        host, listener = self._config.host, self._created[protocol]
        try:
            port = await listener.start(host, port)
        except OSError as error:
            raise taken(protocol, host, port, error, share_port=self._config.share_port) from error
        self._open.append(listener)
        return port
