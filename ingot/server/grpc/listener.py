"""The choice of the gRPC server; only the chosen one is imported."""

from __future__ import annotations

from ingot.server.access.gate import Gate
from ingot.server.net.limits import ClientLimits
from ingot.server.net.listening import Listener
from ingot.server.net.tls import Tls
from ingot.server.plane.dataplane import DataPlane


def create_listener(
    kind: str,
    plane: DataPlane,
    max_body_bytes: int,
    max_bodies_bytes: int,
    tls: Tls | None = None,
    gate: Gate | None = None,
    limits: ClientLimits | None = None,
    *,
    share_port: bool = False,
) -> Listener:
    """Return a server that does not listen yet.

    Args:
        kind: ``fast`` or ``grpcio``.
        plane: the server's behaviour.
        max_body_bytes: the largest message that is accepted; answers are not limited.
        max_bodies_bytes: the most bytes that incomplete messages may hold together; only for ``fast``.
        tls: the certificate, or None.
        gate: the rules of access; None if all calls are served.
        limits: those on clients; None for no limits; only for ``fast``.
        share_port: let other servers of this user listen on the same port.
    """
    if kind == "fast":
        from ingot.server.grpc.fast import FastListener

        context = None if tls is None else tls.context(["h2"])
        return FastListener(plane, max_body_bytes, max_bodies_bytes, context, gate, limits, share_port=share_port)
    from ingot.server.grpc.grpcio_server import GrpcioListener

    return GrpcioListener(plane, max_body_bytes, tls, gate, share_port=share_port)
