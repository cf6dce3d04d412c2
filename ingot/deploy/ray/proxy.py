"""Errors of Ray's HTTP proxy as the Open Inference Protocol defines them: an object with ``error``, not a text."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOST = b"the replica ended before it answered; send the request again"


def middlewares() -> list[Middleware]:
    """Return the middleware of a proxy whose ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`` names this function."""
    return [Middleware(JsonErrors)]


class JsonErrors:
    """Convert errors in text to JSON, and answer for replicas that ended.

    Only requests for ``/v2`` are affected: the proxy has the ports of other applications as well.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "/v2" not in scope["path"]:
            await self._app(scope, receive, send)
            return
        # The proxy sends nothing for a replica that ended: its HTTP server would send a text.
        status, headers, text = 500, Headers(), bytearray(_LOST)
        forwarded = False

        async def forward(message: Message) -> None:
            nonlocal status, headers, forwarded
            if message["type"] == "http.response.start":
                status, headers = message["status"], Headers(raw=message["headers"])
                forwarded = status < 400 or not headers.get("content-type", "").startswith("text/")
                text.clear()
            if forwarded:
                await send(message)
            else:
                text.extend(message.get("body", b""))

        await self._app(scope, receive, forward)
        if not forwarded:
            kept = {name: value for name, value in headers.items() if name not in ("content-type", "content-length")}
            await JSONResponse({"error": text.decode("utf-8", "replace")}, status, kept)(scope, receive, send)
