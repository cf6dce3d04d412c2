"""HTTP responses: health, errors, and any response as bytes."""

from __future__ import annotations

import http
import time
from email.utils import formatdate
from typing import Any, Final

from ingot.errors import Code, DeadlineExceeded, EngineLost, IngotError, public_text
from ingot.faults import public_error
from ingot.protocol import json_codec
from ingot.protocol.context import RequestContext
from ingot.protocol.json_codec import Headers
from ingot.protocol.keys import BoundedCache
from ingot.server.net import compression
from ingot.server.net.limits import BODY_PACE
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.operations import Refusal

# Seconds after which a refused client may ask again: the smallest value of the header.
_RETRY: Headers = (("Retry-After", "1"),)
_LATER: Final = frozenset((Code.UNAVAILABLE, Code.TOO_MANY_REQUESTS))
_MAX_HEADS = 1024
# Copying a small body behind its head costs less than handing two buffers to the kernel.
_JOIN_BELOW: Final = 32 << 10

CLIENT_LEFT = 499
"""nginx's status of a request whose client left, for logs."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpResponse:
    """One HTTP response. Content type and length are not in ``headers``; an empty ``media_type`` is not sent."""

    __slots__ = ("body", "headers", "media_type", "status")

    def __init__(self, status: int, body: bytes, headers: Headers = (), media_type: str = "application/json"):
        self.status = status
        self.body = body
        self.headers = headers
        self.media_type = media_type

    def with_headers(self, headers: Headers, status: int | None = None) -> HttpResponse:
        """Return the response with further headers and, if it is given, another status."""
        return HttpResponse(status or self.status, self.body, self.headers + headers, self.media_type)


# Without a date: sent where a client's further bytes cannot be read.
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
WRONG_VERSION = b"HTTP/1.1 505 HTTP Version Not Supported\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
LIVE = HttpResponse(200, b'{"live":true}')
PREFLIGHT = HttpResponse(200, b"", media_type="text/plain")
MALFORMED = HttpResponse(400, b"Invalid HTTP request received.", media_type="text/plain; charset=utf-8")


def ready(plane: DataPlane) -> HttpResponse:
    """Return whether requests would be served."""
    return HttpResponse(200 if plane.ready else 503, json_codec.dumps({"ready": plane.ready}))


def refusal(plane: DataPlane, error: IngotError, form: Refusal | None = None) -> HttpResponse:
    """Return the response of an error, and count it.

    Args:
        plane: which counts it.
        error: the error.
        form: of the API that was asked; None for that of the Open Inference Protocol.
    """
    plane.count_error("http", error)
    # A request during which an engine process ended may have caused that.
    later = error.code in _LATER and not isinstance(error, EngineLost)
    headers = _RETRY if later else ()
    status, content = (json_codec.STATUS[error.code], {"error": public_text(error)}) if form is None else form(error)
    return HttpResponse(status, json_codec.dumps(content), headers)


def too_slow(plane: DataPlane, form: Refusal | None) -> HttpResponse:
    """Return the response to a request whose body arrives too slowly, and count it; see :func:`refusal`."""
    error = DeadlineExceeded(f"the rest of the request's body did not arrive in time; {BODY_PACE}")
    return refusal(plane, error, form).with_headers((), json_codec.TOO_SLOW)


def failure(plane: DataPlane, error: Exception, form: Refusal | None = None) -> HttpResponse:
    """Return the response of any error; an internal one is logged, and its text is not sent."""
    return refusal(plane, public_error(error, "a request failed"), form)


def unsupported_encoding(response: HttpResponse) -> HttpResponse:
    """Return the response to a body whose ``Content-Encoding`` is unknown, with the encodings that are known."""
    accepted = (("Accept-Encoding", ", ".join(sorted(compression.ENCODINGS))),)
    return response.with_headers(accepted, 415)


def identity(context: RequestContext) -> bytes:
    """Return the headers that name a request: its id and, if it has one, its trace context."""
    if context.traceparent:
        return b"x-request-id: %b\r\ntraceparent: %b\r\n" % (context.id, context.traceparent)
    return b"x-request-id: %b\r\n" % context.id


class Renderer:
    """Turns responses into bytes, and remembers the heads of one second."""

    def __init__(self) -> None:
        self._heads: BoundedCache[tuple[Any, ...], bytes] = BoundedCache(_MAX_HEADS)
        self._second = 0
        self._date = b""

    def render(self, response: HttpResponse, *, keep_alive: bool, context: RequestContext | None = None) -> list[bytes]:
        """Return a response as bytes, in one piece or two.

        Args:
            response: the response.
            keep_alive: whether the connection stays open.
            context: the request; by default a new one, for one that could not be read.
        """
        body = response.body
        if int(time.time()) != self._second:
            self._renew()
        kind = (response.status, response.media_type, response.headers, keep_alive, len(body))
        head = self._heads.get(kind)
        if head is None:
            head = self._head(response, keep_alive=keep_alive)
            self._heads.keep(kind, head)
        head += identity(context or RequestContext()) + b"\r\n"
        return [head + body] if len(body) < _JOIN_BELOW else [head, body]

    def start(self, status: int, *, keep_alive: bool) -> bytes:
        """Return the status line and the headers that every response has."""
        if int(time.time()) != self._second:
            self._renew()
        end = b"" if keep_alive else b"connection: close\r\n"
        return b"HTTP/1.1 %d %b\r\ndate: %b\r\n%b" % (status, _phrase(status), self._date, end)

    def _renew(self) -> None:
        self._second = int(time.time())
        self._date = formatdate(self._second, usegmt=True).encode()
        self._heads.clear()

    def _head(self, response: HttpResponse, *, keep_alive: bool) -> bytes:
        lines = [self.start(response.status, keep_alive=keep_alive)]
        if response.media_type:
            lines.append(f"content-type: {response.media_type}\r\n".encode())
        lines.append(f"content-length: {len(response.body)}\r\n".encode())
        lines += [f"{name.lower()}: {value}\r\n".encode("latin-1") for name, value in response.headers]
        return b"".join(lines)


def _phrase(status: int) -> bytes:
    try:
        return http.HTTPStatus(status).phrase.encode()
    except ValueError:  # 499, which the standard does not have
        return b""
