"""One HTTP/1.1 connection: bytes in, requests in order, responses out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, cast

from ingot.protocol.keys import BoundedCache
from ingot.server.access.peers import Peer, peer_of
from ingot.server.http import responses
from ingot.server.http.asgi import AsgiExchange
from ingot.server.http.disconnect import DisconnectProbe
from ingot.server.http.exchange import ConnectionApi, Exchange, HttpState, PendingBody
from ingot.server.http.parser import Event, Parser, RequestHead, Signal
from ingot.server.http.refused_connection import RefusedConnection
from ingot.server.http.timeouts import Timeouts

_HEAD_END: Final = b"\r\n\r\n"
# The longest head that is looked up by its bytes.
_MAX_KNOWN_BYTES: Final = 4 << 10
# Heads that a connection remembers for itself.
_OWN_HEADS = 8


class Connection(ConnectionApi):
    """Serves inference and health checks itself and passes the rest to the application, in the order of the requests.

    A head with the same bytes as an earlier one is looked up instead of parsed. This applies only to complete
    requests that arrive while the connection is idle and the parser is between two requests, so the parser can skip
    them.

    Reading from a client is paused while it does not read its responses, or while too many of its requests wait.

    Args:
        shared: the state of the listener, which all its connections share.
        connections: the open connections of the listener.
    """

    def __init__(self, shared: HttpState, connections: Connections):
        super().__init__(shared)
        self._connections = connections
        admission = shared.admission
        self._peer = Peer()
        # With client certificates, equal heads of two connections are those of different clients.
        own = admission is not None and admission.by_certificate
        self._known: BoundedCache[bytes, RequestHead] = BoundedCache(_OWN_HEADS) if own else shared.heads
        self._last: RequestHead | None = None  # the head that was looked up last: mostly that of the next request too
        self._last_bytes = b""
        admit = None if admission is None else self._admit
        self._parser = Parser(self._known, shared.service.max_body_bytes, admit, shared.service.api.infers)
        self._current: Exchange | AsgiExchange | None = None  # started and unanswered
        self._queue: deque[PendingBody | AsgiExchange] = deque()  # behind it
        self._arriving: PendingBody | AsgiExchange | None = None  # the one whose body is arriving
        self._advancing = False
        self._stopping = False
        self._body_full = False
        self._read_paused = False
        self._probe: DisconnectProbe | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        limits = self.shared.limits
        if limits is not None and (refused := limits.connect()) is not None:
            self.transport.set_protocol(RefusedConnection(self.shared, self.transport, refused))
            return
        if self.shared.admission is not None:
            self._peer = peer_of(transport)
        self._timeouts = Timeouts(self)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timeouts.cancel()
        if self.shared.limits is not None:
            self.shared.limits.disconnect()
        if self._probe is not None:
            self._probe.cancel()
        for exchange in {self._current, self._arriving, *self._queue}:
            if exchange is not None:
                exchange.disconnect()
        self._current = self._arriving = None
        self._queue.clear()
        self._connections.remove(self)

    @property
    def busy(self) -> bool:
        """Whether a request is unanswered."""
        return self._current is not None or bool(self._queue)

    @property
    def between(self) -> bool:
        """Whether the next byte begins a new request."""
        return self._parser.between

    @property
    def in_body(self) -> bool:
        """Whether a body is incomplete."""
        return not (self._parser.between or self._parser.in_head)

    @property
    def held(self) -> bool:
        """Whether the server delays the body: reading is paused, or an earlier request is unanswered."""
        return self._read_paused or (self._current is not None and self._current is not self._arriving)

    def data_received(self, data: bytes) -> None:
        """Run complete requests with a known head at once, and give all other bytes to the parser."""
        parser = self._parser
        while data:
            idle = self._current is None and parser.between and not self._queue and not self.write_paused
            head = self._last
            if idle and head is not None and data.startswith(self._last_bytes):
                end = len(self._last_bytes)
            else:
                end = data.find(_HEAD_END) + len(_HEAD_END) if idle else 0
                if not len(_HEAD_END) <= end <= _MAX_KNOWN_BYTES:
                    self._handle(parser.receive(data), len(data))
                    return
                self._last_bytes = data[:end]
                head = self._last = self._known.get(self._last_bytes)
            if head is None:
                self._handle(parser.learn(data[:end]), end)
                data = data[end:]
            else:
                stop = end + (head.length or 0)
                if stop > len(data):
                    self._handle(parser.receive(data), len(data))
                    return
                if self._timeouts.in_head:
                    self._timeouts.end_head()
                self._current = exchange = Exchange(self, head)
                exchange.run(data[end:stop])
                data = data[stop:]
            if data and self.transport.is_closing():
                return

    def _admit(self, head: RequestHead) -> RequestHead:
        return head if self.shared.admission is None else self.shared.admission.admit(head, self._peer)

    def forget(self) -> None:
        """Forget all heads, as clients may have lost their access."""
        self._known.clear()
        self._last = None

    def _handle(self, events: Sequence[Event], size: int) -> None:
        """Handle the events that the parser found in ``size`` received bytes."""
        for event in events:
            if self.transport.is_closing():
                return
            if isinstance(event, RequestHead):
                self._begin(event)
            elif isinstance(event, Signal):
                self._handle_signal(event)
            elif self._arriving is not None:
                self._arriving.take(event)
        if self.transport.is_closing():
            return
        if self._parser.in_head:
            self._timeouts.wait_for_head()
            return
        self._timeouts.end_head()
        if not self._parser.between:
            self._timeouts.wait_for_body(size)

    def _begin(self, head: RequestHead) -> None:
        """Queue a request behind those that are unanswered."""
        self._timeouts.begin_body()
        served_here = head.fault is not None or head.infer is not None or head.probe is not None
        self._arriving = exchange = PendingBody(self, head) if served_here else AsgiExchange(self, head)
        self._queue.append(exchange)
        self._advance()

    def _handle_signal(self, signal: Signal) -> None:
        if signal is Signal.END:
            exchange, self._arriving = self._arriving, None
            if exchange is not None:
                exchange.complete()
        elif signal is Signal.TOO_LARGE and self.in_body:
            self._break_off(responses.TOO_LARGE)
        elif signal is Signal.MALFORMED:
            self._close_with(*self.shared.renderer.render(responses.MALFORMED, keep_alive=False))
        else:
            self._close_with(responses.TOO_LARGE if signal is Signal.TOO_LARGE else responses.WRONG_VERSION)

    def _close_with(self, response: bytes) -> None:
        self.transport.write(response)
        self.transport.close()

    def _break_off(self, response: bytes) -> None:
        """End the connection during a body, with a response unless one was sent."""
        exchange = self._arriving
        if exchange is not None and not exchange.done:
            self.transport.write(response)
            exchange.disconnect()  # at once, even if the client is slow to read the response
        self._timeouts.close()

    def end_slow_body(self) -> None:
        """End the connection, as the body arrives too slowly."""
        service = self.shared.service
        form = None if self._arriving is None else service.form(self._arriving.head)
        response = responses.too_slow(service.plane, form)
        self._break_off(b"".join(self.shared.renderer.render(response, keep_alive=False)))

    def keeps(self, exchange: Exchange | AsgiExchange) -> bool:
        """Return whether the connection stays open after an exchange.

        While the server stops, a connection is closed after the responses to all requests that were received on it.
        """
        if self._stopping or self.shared.service.plane.draining:
            return exchange.keep_alive and bool(self._queue)
        return exchange.keep_alive

    def finish(self, parts: Sequence[bytes], *, keep_alive: bool) -> None:
        """Send the response of the current exchange, and continue with the next."""
        self._current = None
        transport = self.transport
        if len(parts) == 1:
            transport.write(parts[0])
        else:
            transport.writelines(parts)
        if not keep_alive or (self._probe is not None and not self._queue):  # a probed client sends no more
            self._timeouts.close()
            return
        self._timeouts.begin_idle()
        if self._queue or self._read_paused:
            self._advance()

    def _advance(self) -> None:
        """Start the next requests, and resume reading, unless the client leaves its responses unread."""
        if self._advancing:  # by a request that was answered at once; the loop below continues after it
            return
        self._advancing = True
        advanced = False
        try:
            while self._queue and self._current is None and not self.write_paused:
                if self.transport.is_closing():
                    break
                self._current = exchange = self._queue.popleft()
                exchange.start()
            advanced = True
        finally:
            self._advancing = False
            if not advanced:
                self.transport.abort()  # the client would read the next response as this one
        self._regulate()

    def hold_body(self, *, full: bool) -> None:
        """Pause reading if ``full``, as too much of the body waits for the application; otherwise resume it."""
        self._body_full = full
        self._regulate()

    def _regulate(self) -> None:
        """Pause reading while requests are queued, or responses or parts of a body are not read; then resume it."""
        paused = bool(self._queue) or self.write_paused or self._body_full
        if paused != self._read_paused and not self.transport.is_closing():
            self._read_paused = paused
            self._timeouts.reading(paused=paused)
            if paused:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def pause_writing(self) -> None:
        self.write_paused = True
        self._regulate()
        self._timeouts.wait_for_reader()

    def resume_writing(self) -> None:
        self.write_paused = False
        self._timeouts.end_wait_for_reader()
        if isinstance(self._current, AsgiExchange):
            self._current.written()
        self._advance()

    def eof_received(self) -> bool | None:
        """Close, unless the client may only have shut down its own side and still wait for a response."""
        waiting = self._current is not None and not isinstance(self._current, AsgiExchange)
        if not waiting or not self._parser.between or self.transport.get_extra_info("sslcontext"):
            return None  # TLS has no half-closed connections
        if self._current is not None and self._current.head.version != "1.0":  # HTTP/1.0 has no interim responses
            self._probe = DisconnectProbe(self.transport)
        return True

    def drain(self, seconds: float) -> None:
        """Close after answering the requests received, and one that may arrive within ``seconds``, at most a second."""
        self._stopping = True
        self._timeouts.linger(seconds)

    def stop(self) -> None:
        """Refuse the request that is unanswered, as the time for draining is over."""
        if self._current is not None:
            self._current.keep_alive = False
            self._current.stop()


class Connections:
    """The open connections of a listener."""

    def __init__(self) -> None:
        self._open: set[Connection] = set()
        self._all_closed = asyncio.Event()
        self._until: float | None = None  # the loop's time at which draining ends

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._all_closed.clear()
        if self._until is not None:  # accepted before the port was closed, but added one tick of the loop later
            connection.drain(max(0.0, self._until - asyncio.get_running_loop().time()))

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        if not self._open:
            self._all_closed.set()

    def forget(self) -> None:
        """Forget the heads of all connections."""
        for connection in self._open:
            connection.forget()

    async def drain(self, seconds: float) -> None:
        """Wait until all connections are closed; after ``seconds``, refuse the requests that are unanswered."""
        self._until = asyncio.get_running_loop().time() + seconds
        for connection in tuple(self._open):
            connection.drain(seconds)
        await asyncio.sleep(0)
        if self._open:
            try:
                await asyncio.wait_for(self._all_closed.wait(), seconds)
            except TimeoutError:
                for connection in tuple(self._open):
                    connection.stop()
