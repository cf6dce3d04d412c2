"""One request that a connection answers itself, from its head to its answer."""

from __future__ import annotations

import functools

from ingot.errors import IngotError, Unavailable
from ingot.server.http import exchange
from ingot.server.http.exchange import HttpResponse
from ingot.server.http.heads import Head
from ingot.server.http.protocol import BoundedProtocol
from ingot.server.http.shared import Shared
from ingot.server.limits import check_size
from ingot.server.requests import Cancellable

_SMALL_PART = 4 << 10


class Cycle:
    """One request whose body is there, and its answer, in the place of uvicorn's ``RequestResponseCycle``.

    Args:
        protocol: its connection.
        shared: what all connections share.
        head: what it says of itself.
        keep_alive: whether the connection is to be kept after it.
    """

    __slots__ = (
        "_held",
        "_protocol",
        "_shared",
        "_ticket",
        "disconnected",
        "head",
        "keep_alive",
        "response_complete",
    )

    def __init__(self, protocol: BoundedProtocol, shared: Shared, head: Head, keep_alive: bool):
        self.head = head
        self.keep_alive = keep_alive
        self.response_complete = False
        self.disconnected = False
        self._protocol = protocol
        self._shared = shared
        self._held = 0
        self._ticket: Cancellable | None = None

    @property
    def response_started(self) -> bool:
        """The same as ``response_complete``, since answers are written in one go; uvicorn's cycles tell them apart."""
        return self.response_complete

    @property
    def message_event(self) -> Cycle:
        """uvicorn sets its cycle's event when a connection is lost; here that is :meth:`leave`."""
        return self

    def set(self) -> None:
        """Nothing; see :attr:`message_event`."""

    def run(self, body: bytes) -> None:
        """Put the request to its model.

        Args:
            body: all of it; it is within the limit of one request.
        """
        try:
            self._shared.budget.change(len(body))
        except IngotError as error:
            self.answer(exchange.refusal(self._shared.service.plane, error))
            return
        self._held = len(body)
        self._begin(body)

    def _begin(self, body: bytes) -> None:
        self._ticket = exchange.begin(self._shared.service, self.head.asked, body, self._hold, self.answer)

    def _hold(self, size: int) -> None:
        """Take memory into account, until the answer.

        Raises:
            Unavailable: it is too much.
        """
        self._shared.budget.change(size, self._held)
        self._held += size

    def answer(self, answer: HttpResponse) -> None:
        """Send the answer, and let the connection go on."""
        if self.disconnected or self.response_complete:
            return
        shared, protocol = self._shared, self._protocol
        if self._held:
            shared.budget.change(-self._held)
            self._held = 0
        self._ticket = None  # which leads back here; see Pending
        self.response_complete = True
        transport = protocol.transport
        if shared.service.plane.draining:
            # The client is to go elsewhere, but not before it has the answers to what it has sent already.
            self.keep_alive = self.keep_alive and bool(protocol.pipeline)
            protocol.tasks.discard(self)
        parts = shared.render(answer, protocol.server_state.default_headers, keep_alive=self.keep_alive)
        if len(parts) == 1:
            transport.write(parts[0])
        else:
            transport.writelines(parts)
        if not self.keep_alive:
            protocol.tasks.discard(self)
            transport.close()
        protocol.on_response_complete()

    def cancel(self, msg: str = "") -> None:
        """Answer that the server stops; uvicorn calls this when the time to drain is over."""
        error = Unavailable("the server is stopping; ask again elsewhere or later")
        self._protocol.loop.call_soon(functools.partial(self._stop, error))

    def _stop(self, error: IngotError) -> None:
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
        self.answer(exchange.refusal(self._shared.service.plane, error))

    def leave(self) -> None:
        """Forget the request: its connection is gone."""
        if self.response_complete or self.disconnected:
            return
        self.disconnected = True
        self._protocol.tasks.discard(self)
        if self._held:
            self._shared.budget.change(-self._held)
            self._held = 0
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None


class Arriving(Cycle):
    """A request that comes in parts, or behind others that are not answered yet."""

    __slots__ = ("_complete", "_error", "_parts", "_started", "_status")

    def __init__(self, protocol: BoundedProtocol, shared: Shared, head: Head, keep_alive: bool):
        super().__init__(protocol, shared, head, keep_alive)
        self._parts: list[bytes | bytearray] = []
        self._complete = False
        self._started = False
        self._error: IngotError | None = None
        self._status: int | None = None

    def take(self, part: bytes) -> None:
        """Take a part of the body in."""
        if self._error is not None or self.response_complete:
            return
        try:
            check_size(self._held + len(part), self._shared.service.max_body_bytes)
            self._hold(len(part))
        except IngotError as error:
            self.refuse(error)
            return
        # Small parts are gathered: as an object each, they would take many times the memory of what is in them.
        if not self._parts or len(part) >= _SMALL_PART:
            self._parts.append(part)
        elif isinstance(self._parts[-1], bytearray):
            self._parts[-1] += part
        else:
            self._parts.append(bytearray(part))

    def complete(self) -> None:
        """Note that the body is whole."""
        self._complete = True
        if self._started and not self.response_complete:
            self._go()

    def start(self) -> None:
        """Go: every request before this one is answered."""
        self._started = True
        if self._error is None and self.head.length is not None:
            try:
                check_size(self.head.length, self._shared.service.max_body_bytes)
            except IngotError as error:
                self.refuse(error)
                return
        if self._error is not None:
            self._answer_refusal(self._error)
        elif self._complete:
            self._go()
        elif self.head.expects:
            self._protocol.loop.call_soon(self._invite)  # unless the body is in the same packet as the head

    def _invite(self) -> None:
        if not (self._complete or self.response_complete or self.disconnected):
            self._protocol.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def refuse(self, error: IngotError, status: int | None = None) -> None:
        """Answer without the body, the rest of which would be taken for the next request: the connection ends.

        Args:
            error: why.
            status: by default that of the error.
        """
        self._error = error
        self._status = status
        self._parts.clear()
        self.keep_alive = False
        if self._started:
            self._answer_refusal(error)

    def _answer_refusal(self, error: IngotError) -> None:
        answer = exchange.refusal(self._shared.service.plane, error)
        self.answer(answer if self._status is None else answer._replace(status=self._status))

    def _go(self) -> None:
        if self.head.probe is not None:
            self.answer(self.head.probe(self._shared.service.plane))
            return
        body = bytes(self._parts[0]) if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._begin(body)

    def leave(self) -> None:
        self._parts.clear()
        super().leave()
