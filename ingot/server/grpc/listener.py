"""The choice between the two gRPC servers: only the one that is asked for is imported."""

from __future__ import annotations

from ingot.server.dataplane import DataPlane
from ingot.server.listening import Listener, Tls


def create_listener(
    kind: str,
    plane: DataPlane,
    max_body_bytes: int,
    max_bodies_bytes: int,
    tls: Tls | None = None,
    *,
    shared: bool = False,
) -> Listener:
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
        from ingot.server.grpc.fast.listener import FastListener

        context = None if tls is None else tls.context(["h2"])
        return FastListener(plane, max_body_bytes, max_bodies_bytes, context, shared=shared)
    from ingot.server.grpc.grpcio_server import GrpcioListener

    return GrpcioListener(plane, max_body_bytes, tls, shared=shared)
