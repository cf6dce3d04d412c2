"""Requests that an ASGI application serves: all but inference and health checks."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httptools

from ingot.errors import IngotError, PermissionDenied, Unavailable
from ingot.faults import attempt_async
from ingot.protocol.context import CONTEXT, RequestContext
from ingot.server.http import responses
from ingot.server.http.exchange import ConnectionApi, Service
from ingot.server.http.parser import RequestHead
from ingot.server.http.responses import HttpResponse
from ingot.serving.loading import in_thread

if TYPE_CHECKING:
    from ingot.serving.control import Control

# Bytes of a body that wait for the application before reading is paused.
_HIGH_WATER = 64 << 10
_FAILED = HttpResponse(500, b"Internal Server Error", media_type="text/plain; charset=utf-8")

Message = Mapping[str, Any]


class LazyApp:
    """The FastAPI application, imported by :meth:`warm` or the first request, as it takes a third of a second."""

    def __init__(self, service: Service, control: Control | None = None, *, page: bool = False):
        self._service = service
        self._control = control
        self._page = page
        self._app: Any = None
        self._lock = asyncio.Lock()

    async def __call__(self, scope: object, receive: object, send: object) -> None:
        if self._app is None:
            await self._loaded()
        await self._app(scope, receive, send)

    async def warm(self) -> None:
        """Prepare what the first requests would wait for, in a thread that a stopping server does not wait for."""
        app = await self._loaded()
        await in_thread("warm", app.openapi)  # FastAPI keeps it

    async def _loaded(self) -> Any:
        async with self._lock:
            self._app = self._app or await in_thread("warm", self._load)
        return self._app

    def _load(self) -> Any:
        from ingot.server.http.app import create_app

        service = self._service
        return create_app(
            service.plane,
            service.max_body_bytes,
            budget=service.budget,
            control=self._control,
            page=self._page,
            api=service.api,
        )


class AsgiExchange:
    """One request that the application serves.

    The application may respond before the body is complete. HEAD is served as GET, without the body.

    Args:
        connection: the request's connection.
        head: the request's head.
    """

    def __init__(self, connection: ConnectionApi, head: RequestHead):
        self.head = head
        self.keep_alive = head.keep_alive
        self.done = False
        self.disconnected = False
        self._connection = connection
        self._body = bytearray()
        self._complete = False
        self._invites = head.expects
        self._changed = asyncio.Event()
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._task: asyncio.Task[None] | None = None
        self._streaming = False
        self._writable = asyncio.Event()
        self._context = RequestContext(*head.identity)
        observer = connection.shared.service.plane.observer
        if observer is not None:
            observer.begin(self._context, head.method, head.url)

    def start(self) -> None:
        """Begin, once every earlier request is answered."""
        shared = self._connection.shared
        limits, share = shared.limits, self._connection.share
        if _is_change_by_page(self.head):
            # A browser sends it without asking first if it is simple, and hides only the answer from the page.
            error = PermissionDenied("web pages may not send this request; --cors-origin names those that may")
            self._refuse(error)
            return
        if limits is not None:
            try:
                share = limits.admit(self.head.client, share)
            except IngotError as error:
                self._refuse(error)
                return
        tasks = shared.tasks
        self._task = self._connection.loop.create_task(self._run())
        if limits is not None:
            self._task.add_done_callback(lambda _: limits.leave(share))
        tasks.add(self._task)
        self._task.add_done_callback(tasks.discard)

    def take(self, part: bytes) -> None:
        """Add a part of the body."""
        if not self.done:
            self._body += part
            if len(self._body) > _HIGH_WATER:
                self._connection.hold_body(full=True)
            self._changed.set()

    def complete(self) -> None:
        """Note that the body is complete."""
        self._complete = True
        self._invites = False
        self._changed.set()

    def stop(self) -> None:
        """Cancel the application's task, as the time for draining is over."""
        if self._task is not None:
            self._task.cancel()

    def disconnect(self) -> None:
        """Drop the request, as its connection is lost."""
        self.disconnected = True
        self._changed.set()
        self._writable.set()
        self._context.finish(responses.CLIENT_LEFT)

    async def _run(self) -> None:
        CONTEXT.set(self._context)
        served = self._connection.shared.app(self._scope(), self._receive, self._send)
        try:
            await attempt_async("a request to the application failed", served)
        except asyncio.CancelledError:
            error = Unavailable("the server is stopping; ask again elsewhere or later")
            self._refuse(error)
        if not (self.done or self.disconnected):
            self._answer(_FAILED)

    def _refuse(self, error: IngotError) -> None:
        service = self._connection.shared.service
        self._answer(responses.refusal(service.plane, error, service.form(self.head)))

    def _answer(self, response: HttpResponse) -> None:
        if not (self.done or self.disconnected):
            self.keep_alive = False
            if self._streaming:  # without its end, so that the client does not take it for complete
                self._finish([b""], keep_alive=False)
                return
            renderer = self._connection.shared.renderer
            self._status = response.status
            self._finish(renderer.render(response, keep_alive=False, context=self._context), keep_alive=False)

    def _finish(self, parts: list[bytes], *, keep_alive: bool) -> None:
        self.done = True
        self._body.clear()
        self._parts.clear()
        self._changed.set()
        self._connection.hold_body(full=False)
        self._connection.finish(parts, keep_alive=keep_alive)
        self._context.finish(self._status)

    async def _receive(self) -> Message:
        if self._invites and not self._connection.transport.is_closing():
            self._connection.transport.write(responses.CONTINUE)
            self._invites = False
        if not (self.disconnected or self.done):
            self._connection.hold_body(full=False)
            await self._changed.wait()
            self._changed.clear()
        if self.disconnected or self.done:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self._complete}

    async def _send(self, message: Message) -> None:
        if self.disconnected or self.done:
            return
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message["headers"])
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            await self._stream()
        elif self._streaming:
            keep_alive = self._chunked and self._connection.keeps(self)
            self._finish([self._chunk(), b"0\r\n\r\n" if self._chunked else b""], keep_alive=keep_alive)
        else:
            self._respond()

    def written(self) -> None:
        """Continue a response that waited for its client to read."""
        self._writable.set()

    @property
    def _chunked(self) -> bool:
        return self.head.version != "1.0"

    async def _stream(self) -> None:
        """Write a part of a response of unknown length; wait until the client has read most of it."""
        connection = self._connection
        start = b""
        if not self._streaming:
            self._streaming = True
            self.keep_alive = self.keep_alive and self._chunked
            start = connection.shared.renderer.start(self._status, keep_alive=self.keep_alive)
            length = [(b"transfer-encoding", b"chunked")] if self._chunked else []
            own = [(name.lower(), value) for name, value in self._headers if name.lower() != b"connection"]
            extra = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in self.head.extra]
            start += b"".join(b"%b: %b\r\n" % header for header in (*own, *length, *extra))
            start += responses.identity(self._context) + b"\r\n"
        connection.transport.write(start + self._chunk())
        while connection.write_paused and not (self.disconnected or self.done):
            self._writable.clear()
            await self._writable.wait()

    def _chunk(self) -> bytes:
        body = b"".join(self._parts)
        self._parts.clear()
        if self.head.method == b"HEAD" or not body:
            return b""
        return b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body

    def _respond(self) -> None:
        connection, body = self._connection, b"".join(self._parts)
        headers = [(name.lower(), value) for name, value in self._headers]
        if not self._complete:  # the rest of its body may be large, or never come
            self.keep_alive = False
        keep_alive = connection.keeps(self)
        start = connection.shared.renderer.start(self._status, keep_alive=keep_alive)
        lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"connection"]
        lines += [f"{name.lower()}: {value}\r\n".encode("latin-1") for name, value in self.head.extra]
        if not any(name == b"content-length" for name, _ in headers):
            lines.append(b"content-length: %d\r\n" % len(body))
        lines.append(responses.identity(self._context))
        self._finish(
            [b"".join((start, *lines, b"\r\n", b"" if self.head.method == b"HEAD" else body))], keep_alive=keep_alive
        )

    def _scope(self) -> dict[str, Any]:
        head, transport = self.head, self._connection.transport
        url = httptools.parse_url(head.url)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "server": _address(transport, "sockname"),
            "client": _address(transport, "peername"),
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "root_path": "",
            "headers": head.headers,
            "state": {"client": head.client or None},
            "method": "GET" if head.method == b"HEAD" else head.method.decode("ascii"),
            "path": urllib.parse.unquote(url.path.decode("ascii")),
            "raw_path": url.path,
            "query_string": url.query or b"",
        }


# Requests that change nothing: the second are those of the server's own page for models that write text.
_ANSWERS = (b"/infer", b"/generate_stream")


def _is_change_by_page(head: RequestHead) -> bool:
    """Return whether a web page without permission sends a request that may change something."""
    may_change = head.method == b"POST" and not head.url.partition(b"?")[0].endswith(_ANSWERS)
    return may_change and not head.extra and any(name == b"origin" for name, _ in head.headers)


def _address(transport: asyncio.Transport, which: str) -> tuple[str, int] | None:
    address = transport.get_extra_info(which)
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None
