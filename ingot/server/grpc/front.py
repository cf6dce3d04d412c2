"""What both gRPC servers are to the rest: something that starts, says whether it serves, and stops."""

from __future__ import annotations

from typing import Protocol

from ingot.server.dataplane import DataPlane
from ingot.server.tls import Tls


class GrpcFront(Protocol):
    """A gRPC server over a data plane."""

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port; 0 takes any free one.

        Raises:
            OSError: the port is taken, or the address cannot be bound.
        """

    async def set_serving(self, serving: bool) -> None:
        """Say what the health service answers."""

    async def stop(self, drain: float) -> None:
        """Take no more calls, give those in flight ``drain`` seconds, and close."""


def create_front(
    kind: str,
    plane: DataPlane,
    max_body_bytes: int,
    max_bodies_bytes: int,
    tls: Tls | None = None,
    *,
    shared: bool = False,
) -> GrpcFront:
    """Return a server that does not listen yet.

    Args:
        kind: ``fast`` or ``grpcio``; only the one that is asked for is imported.
        plane: the server's behaviour.
        max_body_bytes: the largest message that is taken; answers are not limited.
        max_bodies_bytes: what the messages that are being received may hold together; ``fast`` alone.
        tls: the certificate, or None.
        shared: whether other processes listen on the same port.
    """
    if kind == "fast":
        from ingot.server.grpc.fast.front import FastFront

        context = None if tls is None else tls.context(["h2"])
        return FastFront(plane, max_body_bytes, max_bodies_bytes, context, shared=shared)
    from ingot.server.grpc.grpcio_server import GrpcioFront

    return GrpcioFront(plane, max_body_bytes, tls, shared=shared)
