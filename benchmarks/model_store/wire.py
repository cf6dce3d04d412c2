"""A proxy that counts the bytes it forwards."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

_CHUNK = 1 << 18


class Wire:
    """A port on this machine that forwards to another one; use it in a ``with`` block.

    ``sent`` and ``received`` are the bytes that clients sent and got, headers and all.
    """

    def __init__(self, target: int):
        self.sent = 0
        self.received = 0
        self._target = target
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._connections: list[threading.Thread] = []

    def __enter__(self) -> Wire:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._server.close()
        for thread in (self._thread, *self._connections):
            thread.join(timeout=10)

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Yield a list that has the bytes sent within the block when it ends."""
        before, found = self.sent, list[int]()
        yield found
        found.append(self.sent - before)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._server.accept()
                try:
                    target = socket.create_connection(("127.0.0.1", self._target), timeout=10)
                except OSError:
                    client.close()
                    continue
                target.settimeout(None)
                thread = threading.Thread(target=self._join, args=(client, target), daemon=True)
                self._connections.append(thread)
                thread.start()

    def _join(self, client: socket.socket, target: socket.socket) -> None:
        with client, target:
            up = threading.Thread(target=self._pump, args=(client, target, True), daemon=True)
            up.start()
            self._pump(target, client, False)
            up.join()

    def _pump(self, source: socket.socket, into: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):  # either side hung up
            while chunk := source.recv(_CHUNK):
                # Counted before it is forwarded: a client that has its answer finds its request counted.
                with self._lock:
                    self.sent += len(chunk) if up else 0
                    self.received += 0 if up else len(chunk)
                into.sendall(chunk)
        with contextlib.suppress(OSError):
            into.shutdown(socket.SHUT_WR)
