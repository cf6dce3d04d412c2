"""The open connections of a client, so that a transfer that is given up need not wait for any of them."""

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
    """The sockets of a client of httpx, which tells of them by its ``trace`` extension. For many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Take in a connection that was just made for this thread's request."""
        if not event.endswith(_OPENED):
            return
        opened = info["return_value"].get_extra_info("socket")
        if isinstance(opened, socket.socket):
            with self._lock:
                self._sockets.add(opened)
            transfer = Transfer.of_this_thread()
            if transfer is not None and transfer.cancelled:  # while it was being made
                self.break_off()

    def break_off(self) -> None:
        """End whatever waits on a connection, with an error of the network."""
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            # A close would leave those who wait on it waiting; and one that is closed already cannot be shut down. TLS
            # says no farewell: another thread is in the middle of it.
            with contextlib.suppress(OSError, ValueError):
                socket.socket.shutdown(each, socket.SHUT_RDWR)
