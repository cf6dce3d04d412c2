"""The HTTP listener: uvicorn in the server's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Iterator

import uvicorn

from ingot.server.dataplane import DataPlane
from ingot.server.http.fast import FastProtocol
from ingot.server.http.shared import Shared
from ingot.server.listening import listen
from ingot.server.tls import Tls


class HttpListener:
    """HTTP/1.1 over a data plane.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body.
        max_bodies_bytes: how much all bodies together may hold.
        tls: the certificate, or None.
        shared: whether other processes listen on the same port.
    """

    def __init__(
        self,
        plane: DataPlane,
        max_body_bytes: int,
        max_bodies_bytes: int,
        tls: Tls | None = None,
        *,
        shared: bool = False,
    ):
        self._shared = shared
        common = Shared(plane, max_body_bytes, max_bodies_bytes)
        settings = uvicorn.Config(
            common,
            http=functools.partial(FastProtocol, common),  # type: ignore[arg-type]  # any callable will do
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
        )
        if tls is not None:
            settings.load()
            settings.ssl = tls.context(["http/1.1"])
        self._server = _Uvicorn(settings)

    async def start(self, host: str, port: int) -> int:
        listener = listen(host, port, shared=self._shared)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        number: int = listener.getsockname()[1]
        return number

    async def set_serving(self, serving: bool) -> None:
        """Do nothing: who asks over HTTP asks the data plane each time."""

    async def stop(self, drain: float) -> None:
        self._server.config.timeout_graceful_shutdown = math.ceil(drain)
        self._server.should_exit = True
        await self._serving


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are handled once, for both listeners
