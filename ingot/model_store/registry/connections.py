"""The open connections of a client, so that a cancelled transfer does not wait for them."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from ingot.model_store.blobs.transfer import Transfer

_OPENED = (".connect_tcp.complete", ".start_tls.complete")


class Connections:
    """The sockets of an httpx client, reported by its ``trace`` extension. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Register a connection that was opened for this thread's request."""
        if not event.endswith(_OPENED):
            return
        opened = info["return_value"].get_extra_info("socket")
        if isinstance(opened, socket.socket):
            with self._lock:
                self._sockets.add(opened)
            transfer = Transfer.of_this_thread()
            if transfer is not None and transfer.cancelled:  # cancelled meanwhile
                self.break_off()

    def break_off(self) -> None:
        """Interrupt every thread that waits on a connection, with a network error."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            # Closing would not wake blocked threads; shutdown does, but fails on sockets that are closed. TLS closure
            # alerts are skipped, since another thread is using the connection.
            with contextlib.suppress(OSError, ValueError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)
