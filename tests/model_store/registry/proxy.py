"""An HTTP server that injects the faults of networks and hostile servers, as a proxy of a registry or alone."""

from __future__ import annotations

import http.client
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_CHUNK = 1 << 14


@dataclass
class Fault:
    """A fault of the next ``times`` requests whose ``METHOD path`` the pattern finds."""

    pattern: str
    times: int = 1
    least: int = 0
    """Only to requests whose body has so many bytes."""
    status: int = 0
    """Answer this without forwarding the request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Replace headers of the answer."""
    drop_sent: int | None = None
    """Break the connection after so many bytes of the request's body."""
    drop_received: int | None = None
    """Break the connection after so many bytes of the answer's body."""
    corrupt: int | None = None
    """Turn this byte of the answer's body round."""
    longer: int = 0
    """Say that the answer's body has so many bytes more than it has."""
    without: str = ""
    """Keep this header of the request to oneself."""


@dataclass
class Asked:
    """A request, and the bytes of its and its answer's body that were forwarded."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Reply:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | Iterator[bytes] = b""


class Server(ThreadingHTTPServer):
    """Passes requests to another port of this machine, or has them answered by a function.

    ``log`` has the requests in the order in which they began.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *, upstream: int = 0, answer: Callable[[Asked], Reply] | None = None):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.answer = answer
        self.faults: list[Fault] = []
        self.log: list[Asked] = []
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return self.server_address[1]

    @property
    def address(self) -> str:
        return f"oci://127.0.0.1:{self.port}"

    def fault(self, request: str, size: int) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.least <= size and re.search(fault.pattern, request):
                    fault.times -= 1
                    return fault
        return None

    def asked(self, pattern: str) -> list[Asked]:
        """Return those requests of the log whose ``METHOD path`` the pattern finds."""
        return [item for item in self.log if re.search(pattern, f"{item.method} {item.path}")]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: connections break here on purpose."""


@contextmanager
def serving(
    *, upstream: int = 0, answer: Callable[[Asked], Reply] | None = None, context: ssl.SSLContext | None = None
) -> Iterator[Server]:
    server = Server(upstream=upstream, answer=answer)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server
    asked: Asked

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        fault = self.server.fault(f"{self.command} {self.path}", size) or Fault("", 0)
        self.asked = Asked(self.command, self.path, dict(self.headers))
        with self.server.lock:
            self.server.log.append(self.asked)
        if self.server.answer is not None:
            self.asked.body = self.rfile.read(size)
            self._reply(self.server.answer(self.asked), fault)
        elif fault.status:
            self.rfile.read(size)
            self._reply(Reply(fault.status), fault)
        else:
            self._pass_on(fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve  # noqa: N815

    def _reply(self, reply: Reply, fault: Fault) -> None:
        self.send_response(reply.status)
        headers = {**reply.headers, **fault.headers}
        if isinstance(reply.body, bytes):
            headers.setdefault("Content-Length", str(len(reply.body)))
        else:
            headers["Connection"] = "close"
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self._give(iter((reply.body,)) if isinstance(reply.body, bytes) else reply.body, fault)

    def _pass_on(self, fault: Fault) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for key, value in self.headers.items():
                if key.lower() != fault.without.lower():
                    connection.putheader(key, value)
            connection.endheaders()
            if not self._send(connection, fault):
                return
            response = connection.getresponse()
            headers = {key: value for key, value in response.getheaders() if key.lower() != "connection"}
            if fault.longer:
                headers["Content-Length"] = str(int(headers["Content-Length"]) + fault.longer)
            self.send_response(response.status)
            for key, value in {**headers, **fault.headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self._give(iter(lambda: response.read(_CHUNK), b""), fault)
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, fault: Fault) -> bool:
        left = int(self.headers.get("Content-Length", 0))
        while left:
            count = min(left, _CHUNK)
            if fault.drop_sent is not None:
                count = min(count, fault.drop_sent - self.asked.sent)
            if not count:
                self._break()
                return False
            chunk = self.rfile.read(count)
            if not chunk:  # the client has gone
                self.close_connection = True
                return False
            self.asked.sent += len(chunk)
            connection.send(chunk)
            left -= len(chunk)
        return True

    def _give(self, body: Iterator[bytes], fault: Fault) -> None:
        for chunk in body:
            if fault.corrupt is not None and self.asked.received <= fault.corrupt < self.asked.received + len(chunk):
                at = fault.corrupt - self.asked.received
                chunk = chunk[:at] + bytes((chunk[at] ^ 255,)) + chunk[at + 1 :]
            if fault.drop_received is not None:
                chunk = chunk[: fault.drop_received - self.asked.received]
            self.asked.received += len(chunk)
            self.wfile.write(chunk)
            if self.asked.received == fault.drop_received:
                self._break()
                return
        if fault.longer:
            self._break()

    def _break(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing."""
