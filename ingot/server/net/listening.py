"""Listeners and their sockets, and the errors of ports that cannot be opened."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from collections.abc import Callable
from typing import Protocol

from ingot.errors import InvalidArgument
from ingot.faults import rate_limited_logger
from ingot.runtime import Metrics

log = rate_limited_logger(__name__)

# Connections that may wait to be accepted; more are retried by their clients a second later.
BACKLOG = 2048
_EVERY = 1.0  # seconds between two checks for free file descriptors
# Time for the handshakes of connections that are accepted when a port is closed.
_HANDSHAKE_SECONDS = 1.0
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class Listener(Protocol):
    """A server of one protocol on one port. It is created in the event loop in which it serves."""

    async def start(self, host: str, port: int) -> int:
        """Open a port, 0 for any free one, and return it. Its health service starts as not serving.

        Raises:
            OSError: the port is taken or the address cannot be bound.
        """
        ...

    async def set_serving(self, serving: bool) -> None:
        """Set the status that the protocol's health service reports, if there is one."""
        ...

    async def stop(self, drain: float) -> None:
        """Close the port, refuse new requests, and finish those in flight within ``drain`` seconds."""
        ...


def listen(host: str, port: int, *, share_port: bool = False) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: an address or a name.
        port: 0 takes any free one.
        share_port: let other servers of this user listen on the same port; the kernel distributes the connections.

    Raises:
        OSError: the port is taken or the address cannot be bound.
    """
    return socket.create_server((host, port), family=_family(host), backlog=BACKLOG, reuse_port=share_port)


async def close(
    server: asyncio.Server, protocol: Callable[[], asyncio.BaseProtocol], tls: ssl.SSLContext | None
) -> None:
    """Close a port, and serve the connections that wait to be accepted: the kernel would reset them."""
    waiting = []
    for each in server.sockets:
        with socket.socket(fileno=os.dup(each.fileno())) as listener, contextlib.suppress(OSError):
            listener.setblocking(False)
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                waiting.append(connection)
    server.close()
    loop = asyncio.get_running_loop()
    accepting = [loop.connect_accepted_socket(protocol, each, ssl=tls) for each in waiting]
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*accepting, return_exceptions=True), _HANDSHAKE_SECONDS)


def reserve(protocol: str, host: str, port: int) -> socket.socket:
    """Return a socket that is bound to a port which servers share, and accepts no connection.

    Args:
        protocol: ``HTTP`` or ``gRPC``, for the error's text.
        host: an address or a name.
        port: not 0.

    Raises:
        InvalidArgument: the port is taken by a process that does not share it, or the address cannot be bound.
    """
    bound = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise taken(protocol, host, port, error, share_port=True) from error
    return bound


def check_port(protocol: str, host: str, port: int) -> None:
    """Check that a port can be opened.

    Raises:
        InvalidArgument: it is taken or the address cannot be bound; the message says what to do.
    """
    try:
        listen(host, port).close()
    except OSError as error:
        raise taken(protocol, host, port, error) from error


def taken(protocol: str, host: str, port: int, error: OSError, *, share_port: bool = False) -> InvalidArgument:
    """Return the error for a port that cannot be opened, by a server that shares its ports or one that does not."""
    option = f"--{protocol.lower()}-port"
    number = error.errno or 0
    if number < 0 or number == errno.EADDRNOTAVAIL:
        remedy = "give --host an address of this machine (127.0.0.1 is local only, 0.0.0.0 is all)"
    elif number == errno.EACCES:
        remedy = f"ports below 1024 need privileges; choose a higher one ({option} 0 for any free port)"
    elif share_port:
        remedy = (
            "the process that uses it does not share it: start that server with --share-port too, as the same user, or "
            f"choose another port ({option})"
        )
    else:
        remedy = (
            f"stop the process that uses it, choose another port ({option} 0 for any free port), or let servers share "
            "it (ingot serve --share-port, for each of them)"
        )
    # A negative number is an error of name resolution. create_server adds the address to every text.
    why = os.strerror(number) if number > 0 else (error.strerror or str(error)).partition(" (while")[0]
    return InvalidArgument(f"cannot listen on {bracketed(host)}:{port} for {protocol}: {why}; {remedy}")


def bracketed(host: str) -> str:
    """Return a host as it is written before a port: IPv6 literals in brackets."""
    return f"[{host}]" if ":" in host else host


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


class Descriptors:
    """Checks each second that a file can be opened; counts failures, and logs when they start and stop.

    Args:
        metrics: where to count.
    """

    def __init__(self, metrics: Metrics):
        self._count = metrics.out_of_files
        self._out = False
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin; call in the event loop."""
        self._look(asyncio.get_running_loop())

    def stop(self) -> None:
        """End."""
        if self._next is not None:
            self._next.cancel()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._next = loop.call_later(_EVERY, self._look, loop)
        out = not _can_open()
        if out:
            self._count.inc()
        if out and not self._out:
            log.error(
                "out of file descriptors: new connections are closed unanswered; raise the limit (ulimit -n), or let "
                "clients keep fewer connections"
            )
        elif self._out and not out:
            log.warning("file descriptors are available again; accepting connections")
        self._out = out


def _can_open() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno not in _NONE_LEFT
    return True
