"""The listeners of a server: one for each protocol, behind one small interface."""

from __future__ import annotations

import asyncio
from typing import Protocol

from ingot.server.config import ServerConfig
from ingot.server.dataplane import DataPlane
from ingot.server.grpc.front import GrpcFront
from ingot.server.http.front import HttpFront
from ingot.server.tls import Tls


class Front(Protocol):
    """What speaks one protocol at one port. It is made in the event loop that it is to serve in."""

    async def start(self, host: str, port: int) -> int:
        """Open a port, 0 for any free one, and return it. Health says that nothing is served yet.

        Raises:
            InvalidArgument: the port is taken or the address cannot be bound.
        """
        ...

    async def report(self, *, serving: bool) -> None:
        """Tell those who watch the protocol's own health service, if it has one."""
        ...

    async def stop(self, drain: float) -> None:
        """Take no more requests, and finish those in flight within ``drain`` seconds."""
        ...


class Fronts(Protocol):
    """All that listens for a server."""

    http_port: int
    grpc_port: int

    async def start(self) -> None:
        """Open both ports.

        Raises:
            InvalidArgument: one is taken or the address cannot be bound; none is open then.
        """
        ...

    async def report(self, *, serving: bool) -> None:
        """Tell clients whether it is worth asking."""
        ...

    async def stop(self, drain: float) -> None:
        """Close both ports, and finish the requests in flight within ``drain`` seconds."""
        ...


class Listeners:
    """Both protocols in this process and event loop.

    Args:
        plane: what they call.
        config: addresses and limits.
        tls: what they encrypt with, or None.
        shared: whether other processes listen on the same ports.
    """

    def __init__(self, plane: DataPlane, config: ServerConfig, tls: Tls | None, *, shared: bool = False):
        self.http_port = config.http_port
        self.grpc_port = config.grpc_port
        self._plane = plane
        self._config = config
        self._tls = tls
        self._shared = shared
        self._open: list[Front] = []

    async def start(self) -> None:
        try:
            self.http_port = await self._started(HttpFront, self.http_port)
            self.grpc_port = await self._started(GrpcFront, self.grpc_port)
        except BaseException:
            await self.stop(self._config.drain_timeout)
            raise

    async def report(self, *, serving: bool) -> None:
        for front in self._open:
            await front.report(serving=serving)

    async def stop(self, drain: float) -> None:
        await asyncio.gather(*(front.stop(drain) for front in self._open))
        self._open = []

    async def _started(self, kind: type[HttpFront] | type[GrpcFront], port: int) -> int:
        front: Front = kind(self._plane, self._config, self._tls, shared=self._shared)
        port = await front.start(self._config.host, port)
        self._open.append(front)
        return port
