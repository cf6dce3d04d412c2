"""Addresses that are listened on, and what is said where one is taken."""

from __future__ import annotations

import os
import socket

from ingot.errors import InvalidArgument


def listen(protocol: str, host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens.

    Args:
        protocol: ``HTTP`` or ``gRPC``, for the error's text.
        host: an address or a name.
        port: 0 takes any free one.
        shared: let other processes of this user listen on the same port, each getting a part of the connections.

    Raises:
        InvalidArgument: the port is taken or the address cannot be bound; the message says what to do.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048, reuse_port=shared)
    except OSError as error:
        raise taken(protocol, host, port, os.strerror(error.errno) if error.errno else str(error)) from error


def reserve(protocol: str, host: str, port: int) -> socket.socket:
    """Return a socket that holds a port for the processes that are to share it, and takes no connection itself.

    Raises:
        InvalidArgument: as :func:`listen` does.
    """
    if port:
        check_port(protocol, host, port)  # as another server that shares its own port would not be noticed
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise taken(protocol, host, port, os.strerror(error.errno) if error.errno else str(error)) from error
    return holder


def check_port(protocol: str, host: str, port: int) -> None:
    """Tell early that a port is taken.

    Raises:
        InvalidArgument: it is; the message says what to do.
    """
    listen(protocol, host, port).close()


def taken(protocol: str, host: str, port: int, why: str) -> InvalidArgument:
    """Return the error for a port that cannot be had."""
    option = f"--{protocol.lower()}-port"
    return InvalidArgument(
        f"cannot listen on {host}:{port} for {protocol}: {why}; stop what uses it, or choose another port "
        f"({option} 0 takes any free one)"
    )


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: IPv6 literals in brackets."""
    return f"[{host}]" if ":" in host else host
