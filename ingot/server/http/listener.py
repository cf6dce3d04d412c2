"""The HTTP listener, in the server's own event loop."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import TYPE_CHECKING

from ingot.server.http.admission import Admission
from ingot.server.http.api import Api
from ingot.server.http.asgi import LazyApp
from ingot.server.http.connection import Connection, Connections
from ingot.server.http.exchange import OPEN_INFERENCE, HttpState
from ingot.server.net import listening
from ingot.server.net.limits import ClientLimits
from ingot.server.net.listening import BACKLOG, listen
from ingot.server.net.tls import Tls
from ingot.server.plane.dataplane import DataPlane

if TYPE_CHECKING:
    from ingot.serving.control import Control

# Seconds for the application's tasks to end once their connection is closed.
_TASK_SECONDS = 1.0


class HttpListener:
    """HTTP/1.1 over a data plane.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body, before and after decompression.
        max_bodies_bytes: how much all requests together may hold.
        tls: the certificate, or None.
        admission: checks the access of requests; None admits all.
        limits: those on clients; None for no limits.
        share_port: let other servers of this user listen on the same port.
        control: of the models, on the management listener.
        page: whether to serve the page that shows the server.
        api: what is served.
    """

    def __init__(
        self,
        plane: DataPlane,
        max_body_bytes: int,
        max_bodies_bytes: int,
        tls: Tls | None = None,
        admission: Admission | None = None,
        limits: ClientLimits | None = None,
        *,
        share_port: bool = False,
        control: Control | None = None,
        page: bool = False,
        api: Api = OPEN_INFERENCE,
    ):
        self._share_port = share_port
        self._tls = None if tls is None else tls.context(["http/1.1"])
        self._shared = HttpState(plane, max_body_bytes, max_bodies_bytes, admission, limits, api)
        self._app = self._shared.app = LazyApp(self._shared.service, control, page=page)
        self._connections = connections = Connections()
        if control is None and api is OPEN_INFERENCE:
            plane.metrics.http_connections.set_function(lambda: len(connections))
        if admission is not None and admission.gate is not None:
            admission.gate.changed += (self._shared.heads.clear, self._connections.forget)
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        listener = listen(host, port, share_port=self._share_port)
        self._server = await asyncio.get_running_loop().create_server(
            self._connect, sock=listener, ssl=self._tls, backlog=BACKLOG
        )
        number: int = listener.getsockname()[1]
        return number

    async def warm(self) -> None:
        """Prepare what the first requests other than inference would wait for."""
        await self._app.warm()

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket.

        Raises:
            OSError: the path is taken or cannot be made.
        """
        if path.exists():  # asyncio would replace it
            raise OSError(errno.EADDRINUSE, "it is taken")
        self._server = await asyncio.get_running_loop().create_unix_server(self._connect, str(path), backlog=BACKLOG)

    def _connect(self) -> Connection:
        return Connection(self._shared, self._connections)

    async def set_serving(self, serving: bool) -> None:
        """Do nothing: health checks ask the data plane each time."""

    async def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await listening.close(server, self._connect, self._tls)

    async def stop(self, drain: float) -> None:
        await self.close()
        await self._connections.drain(drain)
        if self._shared.tasks:
            await asyncio.wait(self._shared.tasks, timeout=_TASK_SECONDS)
