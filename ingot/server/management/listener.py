"""Opens the management listener of a server: HTTP on a Unix socket or a port, and gRPC on a port if asked for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from pathlib import Path

from ingot.addresses import is_path
from ingot.config import ServerConfig
from ingot.errors import InvalidArgument
from ingot.server.access.audit import AuditLog
from ingot.server.access.gate import MANAGE, Gate
from ingot.server.access.watch import Watch
from ingot.server.grpc.fast import FastListener
from ingot.server.http.admission import Admission
from ingot.server.http.listener import HttpListener
from ingot.server.management import places
from ingot.server.net.listening import Listener, bracketed
from ingot.server.net.tls import Tls
from ingot.server.plane.dataplane import DataPlane
from ingot.serving.control import Control
from ingot.serving.rollout import Rollouts

log = logging.getLogger(__name__)


class Management:
    """The management listener of a server, in the process with the models.

    Args:
        plane: the server's behaviour, all of which it serves, too.
        rollouts: changes the models.
        config: addresses and limits.
        tls: the certificate for ports.

    Attributes:
        url: where it listens, such as ``unix:/run/user/1000/ingot/4711-8000.sock``; empty while it does not.
        grpc_url: the same for gRPC.
    """

    def __init__(self, plane: DataPlane, rollouts: Rollouts, config: ServerConfig, tls: Tls | None):
        self.url = ""
        self.grpc_url = ""
        self._plane = plane
        self._rollouts = rollouts
        self._config = config
        self._tls = tls
        self._audit: AuditLog | None = None
        self._open: list[Listener] = []
        self._watch = Watch(plane.metrics)
        self._socket: Path | None = None

    async def start(self, http_port: int, audit: AuditLog | None) -> None:
        """Open it.

        Args:
            http_port: the server's HTTP port.
            audit: where refused requests are logged; None if they are not.

        Raises:
            InvalidArgument: an address that was asked for cannot be opened. If the default one cannot be opened, that
                is only logged.
        """
        config = self._config
        self._audit = audit
        if config.management_grpc is not None:
            await self._start_grpc(*split(config.management_grpc, "--management-grpc"))
        if config.management is None:
            try:
                await self._start_unix(places.default_socket(http_port))
            except InvalidArgument as error:
                log.warning("there is no management listener: %s", error)
        elif is_path(config.management):
            await self._start_unix(Path(config.management).absolute())
        else:
            await self._start_http(*split(config.management, "--management"))
        self._watch.start()

    async def stop(self, drain: float) -> None:
        """Close it, and finish the requests in flight within ``drain`` seconds."""
        self._watch.stop()
        await asyncio.gather(*(listener.stop(drain) for listener in self._open))
        self._open = []
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.unlink()
        self.url = self.grpc_url = ""

    async def _start_unix(self, path: Path) -> None:
        if path.is_socket() and not places.accepts(path):
            path.unlink()  # of a server that was killed
        listener = self._http(None, None, local=True)
        before = os.umask(0o177)
        try:
            await listener.start_unix(path)
        except OSError as error:
            why = error.strerror or str(error)
            raise InvalidArgument(
                f"cannot listen on {path} for management: {why}; give another path by --management"
            ) from error
        finally:
            os.umask(before)
        self._open.append(listener)
        self._socket, self.url = path, f"unix:{path}"

    async def _start_http(self, host: str, port: int) -> None:
        listener = self._http(self._tls, self._gate(), local=False)
        try:
            port = await listener.start(host, port)
        except OSError as error:
            raise _taken("--management", host, port, error) from error
        self._open.append(listener)
        self.url = f"{'http' if self._tls is None else 'https'}://{bracketed(host)}:{port}"

    async def _start_grpc(self, host: str, port: int) -> None:
        config = self._config
        control = Control(self._rollouts, self._plane.metrics, local=False)
        tls = None if self._tls is None else self._tls.context(["h2"])
        limits = config.max_body_bytes, config.max_bodies_mb << 20
        listener = FastListener(self._plane, *limits, tls, self._gate(), control=control)
        try:
            port = await listener.start(host, port)
        except OSError as error:
            raise _taken("--management-grpc", host, port, error) from error
        await listener.set_serving(True)
        self._open.append(listener)
        self.grpc_url = f"{'grpc' if self._tls is None else 'grpcs'}://{bracketed(host)}:{port}"

    def _http(self, tls: Tls | None, gate: Gate | None, *, local: bool) -> HttpListener:
        config = self._config
        control = Control(self._rollouts, self._plane.metrics, local=local)
        admission = None if gate is None else Admission(gate)
        return HttpListener(
            self._plane,
            config.max_body_bytes,
            config.max_bodies_mb << 20,
            tls,
            admission,
            control=control,
            page=config.page and not local,
        )

    def _gate(self) -> Gate | None:
        config = self._config
        if config.auth is None:
            return None
        gate = Gate(config.auth, self._plane.metrics, self._audit, scope=MANAGE)
        self._watch.add("auth", lambda: gate.files, gate.load, gate.replace)
        self._watch.each(gate.expire)
        return gate


def split(address: str, option: str) -> tuple[str, int]:
    """Return the host and port of ``HOST:PORT``.

    Raises:
        InvalidArgument: it has another form.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"{option} is '{address}'; write HOST:PORT, such as 127.0.0.1:8003")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _taken(option: str, host: str, port: int, error: OSError) -> InvalidArgument:
    why = error.strerror or str(error)
    return InvalidArgument(f"cannot listen on {bracketed(host)}:{port} for management: {why}; change {option}")
