"""The HTTP protocol that answers inference itself, without a task, and without parsing a head that it knows."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import httptools

from ingot.errors import InvalidArgument
from ingot.server.http import exchange, heads
from ingot.server.http.cycle import Arriving, Cycle
from ingot.server.http.departure import Departure
from ingot.server.http.heads import Fault, Head
from ingot.server.http.protocol import BoundedProtocol
from ingot.server.http.shared import Shared

_MAX_KNOWN_HEAD = 4 << 10
_END = b"\r\n\r\n"
# An offer to go on in HTTP/2, such as Java's client makes at first. It is to be passed over, but httptools takes no
# body after it.
_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
# Heads that do not come whole, and alone, cannot be mended so; their body would be taken for the next request.
_UPGRADING = Fault(
    InvalidArgument("a request with a body also has the header 'Upgrade'; send it without: this server speaks HTTP/1.1")
)
_REFUSED = Head(exchange.NOTHING, 0)


class FastProtocol(BoundedProtocol):
    """Takes inference and health checks; the rest goes the way of ASGI, on the same connection and in order.

    A head that httptools has parsed before, byte for byte, is not parsed again: its meaning is looked up. That is done
    only for whole requests that come while the connection is idle and the parser stands between two messages, so that
    it never sees them.

    Args:
        shared: what all connections share; the others are uvicorn's.
    """

    def __init__(self, shared: Shared, *args: Any, **named: Any):
        super().__init__(*args, **named)
        self.shared = shared
        self._plain: Head | None = None

    def data_received(self, data: bytes) -> None:
        while data:
            busy = self.cycle is not None and not self.cycle.response_complete
            if busy or not self.parsed or self.flow.write_paused:
                super().data_received(data)
                return
            data = data[self._take(data) :]
            if data and self.transport.is_closing():
                return

    def _take(self, data: bytes) -> int:
        """Take in what comes while the connection is idle; return how many bytes of it are dealt with."""
        end = data.find(_END) + len(_END)
        if not len(_END) <= end <= _MAX_KNOWN_HEAD:
            super().data_received(data)
            return len(data)
        known = data[:end]
        head = self.shared.heads.get(known)
        if head is None:
            self._learn(known)
            return end
        stop = end + (head.length or 0)
        if stop > len(data):
            super().data_received(data)
            return len(data)
        if self._expiry is not None:
            self._settle()
        self._in_head = False
        cycle: Any = Cycle(self, self.shared, head, True)
        self.cycle = self._answering = cycle  # where uvicorn has its own
        self._await_at_end(cycle)
        cycle.run(data[end:stop])
        return stop

    def _learn(self, known: bytes) -> None:
        """Parse what seems to be one head, and keep its meaning if it is exactly that, with a plain body to follow."""
        self._plain = None
        super().data_received(_UPGRADE.sub(b"\r\nx-upgrade:", known))
        if self._plain is not None and not self.parsed and not self.transport.is_closing():
            self.shared.heads.keep(known, self._plain)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._plain = None

    def on_headers_complete(self) -> None:
        parser = self.parser
        fault = heads.fault(parser.get_http_version(), self.headers, self.head_size)
        if fault is None and parser.should_upgrade() and _has_body(self.headers):
            fault = _UPGRADING
        if fault is not None:
            self._enter(refused := Arriving(self, self.shared, _REFUSED, False))
            refused.refuse(*fault)
            return
        path = httptools.parse_url(self.url).path if self._may_be_ours() else None
        head = heads.read(parser.get_method(), path, self.headers) if path is not None else None
        if head is None:
            super().on_headers_complete()
            return
        modern = parser.get_http_version() == "1.1"
        if not modern and head.expects:
            head = head._replace(expects=False)
        keep_alive = modern and parser.should_keep_alive()
        plain = keep_alive and not head.expects and len(self.headers) == len(dict(self.headers))
        if plain and head.length and head.length <= self.shared.service.max_body_bytes:
            self._plain = head
        self._enter(Arriving(self, self.shared, head, keep_alive))

    def _enter(self, cycle: Any) -> None:
        """Put a request at the end of those that are not answered."""
        self._in_head = False
        waits = self.cycle is not None and not self.cycle.response_complete
        self.cycle = cycle
        if waits or self.flow.write_paused:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, None))  # type: ignore[arg-type]
        else:
            self._start_asgi_task(cycle, None)

    def _may_be_ours(self) -> bool:
        return (b"infer" in self.url or b"/health/" in self.url) and not self.parser.should_upgrade()

    def on_body(self, body: bytes) -> None:
        if isinstance(self.cycle, Arriving):
            self._fed = True
            self.cycle.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if isinstance(self.cycle, Arriving):
            self.parsed = True
            self.cycle.complete()
        else:
            super().on_message_complete()

    def too_slow(self) -> bytes:
        answer = exchange.too_slow(self.shared.service.plane)
        return b"".join(self.shared.render(answer, self.server_state.default_headers, keep_alive=False))

    def abandon(self, cycle: Any) -> None:
        if isinstance(cycle, Cycle):
            cycle.leave()
        else:
            super().abandon(cycle)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Arriving):
            self._answering = cycle
            self._await_at_end(cycle)
            cycle.start()
        else:
            super()._start_asgi_task(cycle, app)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # asyncio's own type
        """Close, unless the client may only have shut down its own side and still wait for an answer."""
        waiting = isinstance(self._answering, Cycle) and not self._answering.response_complete
        if not waiting or not self.parsed or self.scheme == "https":  # TLS has no half-closed connections
            return None
        if self.parser.get_http_version() != "1.0":  # which knows no interim answers to find out with
            self._departure = Departure(self.loop, self.transport)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._departure is not None:
            self._departure.end()
        for cycle in (self._answering, self.cycle, *(queued for queued, _ in self.pipeline)):
            if isinstance(cycle, Cycle):
                cycle.leave()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        if isinstance(self._answering, Cycle) and not self._answering.response_complete:
            self._await_at_end(self._answering)

    def _await_at_end(self, cycle: Any) -> None:
        """Have uvicorn wait for a request if the server is stopping, and cancel it when the time for that is over."""
        if self._stopping is not None:
            self.tasks.add(cycle)


def _has_body(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"transfer-encoding" or (name == b"content-length" and value != b"0") for name, value in headers)
