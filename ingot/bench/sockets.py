"""Sockets of the load generator: connect blocking, then send and receive without blocking."""

from __future__ import annotations

import contextlib
import socket
import ssl

from ingot.bench.plan import Plan, Tls

_READ = 1 << 18


def context(tls: Tls, *, http2: bool) -> ssl.SSLContext:
    """Return a TLS context that verifies the server. Raises OSError or SSLError if a file cannot be used."""
    made = ssl.create_default_context(cafile=tls.ca_file)
    if tls.cert_file is not None:
        made.load_cert_chain(tls.cert_file, tls.cert_key_file)
    made.set_alpn_protocols(["h2"] if http2 else ["http/1.1"])
    return made


class Socket:
    """A connection. Bytes that the system does not accept at once wait in ``unsent``."""

    __slots__ = ("_socket", "unsent")

    def __init__(self, plan: Plan, security: ssl.SSLContext | None):
        plain = socket.create_connection((plan.host, plan.port), timeout=10)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket: socket.socket = (
            plain if security is None else security.wrap_socket(plain, server_hostname=plan.host)
        )
        self.unsent = b""

    def ready(self) -> int:
        """Stop blocking, and return the file descriptor."""
        self._socket.setblocking(False)
        return self._socket.fileno()

    def send(self, data: bytes) -> None:
        """Send bytes after those that wait already. Raises OSError if the connection is lost."""
        if self.unsent:
            self.unsent += data
            return
        try:
            sent = self._socket.send(data)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            sent = 0
        if sent < len(data):
            self.unsent = data[sent:]

    def flush(self) -> None:
        """Send what waits, as far as the system accepts it."""
        waiting, self.unsent = self.unsent, b""
        self.send(waiting)

    def receive(self) -> bytes:
        """Return the bytes that have arrived, possibly none. Raises OSError if the connection is lost or closed."""
        try:
            data = self._socket.recv(_READ)
            while isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
                data += self._socket.recv(_READ)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return b""
        if not data:
            raise ConnectionError("the server closed the connection")
        return data

    def close(self) -> None:
        """Close it, whatever its state is."""
        with contextlib.suppress(OSError):
            self._socket.close()
