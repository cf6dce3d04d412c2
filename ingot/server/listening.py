"""What listens, the addresses that it listens on, and what is said where one is taken."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Protocol

from ingot.errors import InvalidArgument
from ingot.faultlog import rate_limited_logger
from ingot.runtime import Metrics

log = rate_limited_logger(__name__)

# Connections that may wait to be taken; past it, clients try again a second later.
BACKLOG = 2048
_EVERY = 1.0  # seconds between two checks for free file descriptors
_NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class Listener(Protocol):
    """What speaks one protocol at one port. It is made in the event loop that it is to serve in."""

    async def start(self, host: str, port: int) -> int:
        """Open a port, 0 for any free one, and return it. Health says that nothing is served yet.

        Raises:
            OSError: the port is taken or the address cannot be bound.
        """
        ...

    async def set_serving(self, serving: bool) -> None:
        """Say what the protocol's own health service answers, if it has one."""
        ...

    async def stop(self, drain: float) -> None:
        """Take no more requests, and finish those in flight within ``drain`` seconds."""
        ...


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that listens.

    Args:
        host: an address or a name.
        port: 0 takes any free one.
        shared: let other processes of this user listen on the same port, each getting a part of the connections.

    Raises:
        OSError: the port is taken or the address cannot be bound.
    """
    return socket.create_server((host, port), family=_family(host), backlog=BACKLOG, reuse_port=shared)


def reserve(protocol: str, host: str, port: int) -> socket.socket:
    """Return a socket that holds a port for the processes that are to share it, and takes no connection itself.

    Args:
        protocol: ``HTTP`` or ``gRPC``, for the error's text.
        host: an address or a name.
        port: 0 takes any free one.

    Raises:
        InvalidArgument: the port is taken or the address cannot be bound; the message says what to do.
    """
    if port:
        check_port(protocol, host, port)  # another server that shares its own port would not be noticed
    holder = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, port))
    except OSError as error:
        holder.close()
        raise taken(protocol, host, port, error) from error
    return holder


def check_port(protocol: str, host: str, port: int) -> None:
    """Tell early that a port is taken.

    Raises:
        InvalidArgument: it is; the message says what to do.
    """
    try:
        listen(host, port).close()
    except OSError as error:
        raise taken(protocol, host, port, error) from error


def taken(protocol: str, host: str, port: int, error: OSError) -> InvalidArgument:
    """Return the error for a port that cannot be had."""
    option = f"--{protocol.lower()}-port"
    number = error.errno or 0
    if number < 0 or number == errno.EADDRNOTAVAIL:
        remedy = "give --host an address of this machine (127.0.0.1 is for itself alone, 0.0.0.0 is all)"
    elif number == errno.EACCES:
        remedy = f"ports below 1024 need the system's leave; choose a higher one ({option} 0 takes any free one)"
    else:
        remedy = f"stop what uses it, or choose another port ({option} 0 takes any free one)"
    # A negative number is a fault of looking up a name. create_server adds the address to its text, as to all.
    why = os.strerror(number) if number > 0 else (error.strerror or str(error)).partition(" (while")[0]
    return InvalidArgument(f"cannot listen on {bracketed(host)}:{port} for {protocol}: {why}; {remedy}")


def bracketed(host: str) -> str:
    """Return a host as it stands before a port: IPv6 literals in brackets."""
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
