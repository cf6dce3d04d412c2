"""A connection that is refused, as there are too many: it gets an answer and is closed."""

from __future__ import annotations

import asyncio

from ingot.errors import IngotError
from ingot.server.http import responses
from ingot.server.http.exchange import HttpState
from ingot.server.http.parser import LIVE

# How long the client may send nothing.
_SILENT_SECONDS = 1.0


class RefusedConnection(asyncio.Protocol):
    """Answers one request with an error and closes; a liveness probe is answered as on any connection.

    Otherwise an orchestrator would restart a server that has many clients.

    Args:
        shared: what all connections share.
        transport: the connection, whose protocol this becomes.
        error: why it is refused.
    """

    def __init__(self, shared: HttpState, transport: asyncio.Transport, error: IngotError):
        self._shared = shared
        self._transport = transport
        self._error = error
        # A response before the request may be lost: a client that still writes sees a reset.
        self._timer = asyncio.get_running_loop().call_later(_SILENT_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        service = self._shared.service
        alive = data.startswith(b"GET " + LIVE + b" ")
        response = responses.LIVE if alive else responses.refusal(service.plane, self._error, service.api.infer_refusal)
        self._transport.writelines(self._shared.renderer.render(response, keep_alive=False))
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
