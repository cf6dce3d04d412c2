"""One exchange over HTTP: a request's head and body in, the response out."""

from __future__ import annotations

import asyncio
import functools
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ingot.errors import IngotError, InvalidArgument, NotFound, Unavailable
from ingot.protocol import json_codec, json_large
from ingot.protocol.context import CONTEXT, RequestContext
from ingot.protocol.json_codec import Headers, ResponseFormat
from ingot.protocol.keys import BoundedCache
from ingot.protocol.regions import refuse
from ingot.protocol.requests import Cancellable, InferRequest, InferResponse, memory_of, outcome_of
from ingot.server.http import responses
from ingot.server.http.admission import Admission
from ingot.server.http.api import Api
from ingot.server.http.bodies import CompressedBody, ThreadedBody
from ingot.server.http.json_memo import Decoder
from ingot.server.http.parser import LIVE, PREFLIGHT, Fault, InferHead, RequestHead, infers
from ingot.server.http.responses import HttpResponse, Renderer
from ingot.server.net import compression
from ingot.server.net.compression import Hold
from ingot.server.net.limits import Budget, ClientLimits, Share, bodies_budget, check_size
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.operations import OPERATIONS, Refusal, refusal_of_path

_MAX_HEADS = 1024
_SMALL_PART = 4 << 10
_clock: Final = time.perf_counter

Done = Callable[[HttpResponse], None]
Decode = Callable[..., Cancellable | None]


@dataclass(frozen=True)
class Service:
    """The parts that serve inference over HTTP.

    Attributes:
        plane: the server's behaviour.
        decoder: decodes bodies.
        max_body_bytes: the largest body, before and after decompression.
        budget: bounds the memory of all requests.
        api: what is served.
    """

    plane: DataPlane
    decoder: Decoder
    max_body_bytes: int
    budget: Budget
    api: Api

    def form(self, head: RequestHead) -> Refusal | None:
        """Return the form of errors of the API that a request asks; None for that of the Open Inference Protocol."""
        return self.api.refusal(head.path) if head.infer is None else self.api.infer_refusal


def begin(
    service: Service,
    head: InferHead,
    body: bytes,
    hold: Hold,
    done: Done,
    client: Hashable = None,
    context: RequestContext | None = None,
    decode: Decode | None = None,
) -> Cancellable | None:
    """Begin an inference request.

    Args:
        service: what serves it.
        head: the parts of path and headers that inference needs.
        body: the whole body, not decompressed.
        hold: reserves memory for the request; raises Unavailable if that exceeds the limit.
        done: called once with the response, errors included, unless the request is cancelled: here if it is refused at
            once, else in a later tick of the event loop.
        client: who sends the request.
        context: the request's identity; None if it has no observer.
        decode: reads and submits the content of a body; by default that of the Open Inference Protocol.

    Returns:
        The request, which can be cancelled; None if it is answered.
    """
    if decode is None:
        decode = _decode
    else:
        _name_work(context)
    if not head.encoding:
        return decode(service, head, body, hold, done, client, context)
    try:
        encoding = compression.known(head.encoding)
    except InvalidArgument as error:
        refused = unreadable(service, head, error)
        done(responses.unsupported_encoding(refused) if refused.status == 400 else refused)
        return None
    if not encoding:
        return decode(service, head, body, hold, done, client, context)

    def proceed(content: bytes | Exception) -> Cancellable | None:
        if isinstance(content, Exception):
            done(unreadable(service, head, content))
            return None
        return decode(service, head, content, hold, done, client, context)

    return CompressedBody(proceed).start(body, encoding, service.max_body_bytes, hold)


def _decode(
    service: Service,
    head: InferHead,
    body: bytes,
    hold: Hold,
    done: Done,
    client: Hashable,
    context: RequestContext | None,
) -> Cancellable | None:
    plane = service.plane
    try:
        length = head.header_length
        if isinstance(length, str):
            raise InvalidArgument(
                f"{json_codec.HEADER_LENGTH} is '{length}'; it must be the length of the JSON header in bytes"
            )
        regions = service.decoder.reader is not None
        if length == 0:
            signature = plane.signature(head.model, head.version)
            request, layout = json_codec.decode_raw_request(head.model, head.version, body, signature)
        elif (len(body) > json_large.AT_ONCE or regions) and json_large.is_slow(body, length, regions=regions):
            read = refuse if service.decoder.reader is None else service.decoder.reader(client)
            _name_work(context)
            decode = functools.partial(
                json_codec.decode_request, head.model, head.version, body, length, json_large.loads, read
            )
            proceed = functools.partial(_decoded, service, head, hold, done, client, context)
            return ThreadedBody(service.budget, len(body), proceed).start(decode)
        else:
            request, layout = service.decoder.decode(head.model, head.version, body, length, client)
        request.client, request.sticky, request.context = client, head.sticky, context
        return plane.submit(request, "http", functools.partial(_reply, plane, head, layout, done, context))
    except Exception as error:  # noqa: BLE001 - the boundary of one request, which must not end its connection
        _name_work(context)
        done(unreadable(service, head, error))
    return None


def _decoded(
    service: Service,
    head: InferHead,
    hold: Hold,
    done: Done,
    client: Hashable,
    context: RequestContext | None,
    outcome: tuple[InferRequest, ResponseFormat, dict[str, Any]] | Exception,
) -> Cancellable | None:
    """Submit what a thread decoded."""
    plane = service.plane
    if isinstance(outcome, Exception):
        done(unreadable(service, head, outcome))
        return None
    request, layout, _ = outcome
    request.client, request.sticky, request.context = client, head.sticky, context
    try:
        hold(sum(memory_of(array) for array in request.inputs.values()))
        return plane.submit(request, "http", functools.partial(_reply, plane, head, layout, done, context))
    except IngotError as error:
        done(unreadable(service, head, error))
    return None


def _name_work(context: RequestContext | None) -> None:
    """Name a request in what is logged from here on. Few requests log anything, and this is as slow as a lookup."""
    if context is not None:
        CONTEXT.set(context)


def unreadable(service: Service, head: InferHead, error: Exception) -> HttpResponse:
    """Return the response to a body that cannot be read; an unknown model is reported first."""
    if isinstance(error, InvalidArgument):
        try:
            service.plane.repository.get(head.model, head.version)
        except NotFound as missing:
            error = missing
    return responses.failure(service.plane, error, service.api.infer_refusal)


def _reply(
    plane: DataPlane,
    head: InferHead,
    layout: ResponseFormat,
    done: Done,
    context: RequestContext | None,
    outcome: InferResponse | IngotError,
) -> None:
    if isinstance(outcome, IngotError):  # the plane has named it
        done(responses.refusal(plane, outcome))
        return
    try:
        if outcome.is_slow(one_by_one=not layout.default or bool(layout.by_name)):
            _name_work(context)
            encoded = asyncio.get_running_loop().run_in_executor(compression.threads, _timed, outcome, layout)
            encoded.add_done_callback(functools.partial(_encoded, plane, head, done))
            return
        began = _clock()
        body, headers = json_codec.encode_response(outcome, layout)
        plane.encoding_http.observe(_clock() - began)
    except Exception as error:  # noqa: BLE001 - the boundary of one request; others of its batch wait behind it
        _name_work(context)
        done(responses.failure(plane, error))
        return
    _send(head, done, body, headers)


def _timed(response: InferResponse, layout: ResponseFormat) -> tuple[float, bytes, Headers]:
    """Return the seconds that encoding takes, and its result."""
    began = time.perf_counter()
    body, headers = json_codec.encode_large(response, layout)
    return time.perf_counter() - began, body, headers


def _encoded(
    plane: DataPlane, head: InferHead, done: Done, encoded: asyncio.Future[tuple[float, bytes, Headers]]
) -> None:
    """Send what a thread encoded."""
    error = encoded.exception()
    if isinstance(error, Exception):
        done(responses.failure(plane, error))
    else:
        seconds, body, headers = encoded.result()
        plane.encoding_http.observe(seconds)
        _send(head, done, body, headers)


def _send(head: InferHead, done: Done, body: bytes, headers: Headers) -> None:
    media_type = "application/octet-stream" if headers else "application/json"
    encoding = head.response_encoding
    if encoding is None:
        done(HttpResponse(200, body, headers, media_type))
    else:
        headers += (("Content-Encoding", encoding),)
        compression.compress(body, encoding, lambda packed: done(HttpResponse(200, packed, headers, media_type)))


OPEN_INFERENCE = Api(OPERATIONS, refusal_of_path, infers, begin)
"""What the server's own HTTP port serves."""


async def infer(service: Service, head: InferHead, body: bytes, hold: Hold, client: Hashable = None) -> HttpResponse:
    """Answer an inference request: :func:`begin` as a coroutine."""
    return await outcome_of(functools.partial(begin, service, head, body, hold, client=client))


class HttpState:
    """The state that all HTTP connections of a server share.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body, before and after decompression.
        max_bodies_bytes: how much all requests together may hold.
        admission: checks the access of request heads; None admits all.
        limits: those on clients; None for no limits.
        api: what is served.

    Attributes:
        heads: those of earlier inference requests, by their bytes.
        app: the ASGI application that serves all but inference and health checks; set by the listener.
        tasks: those of requests that the application serves.
    """

    def __init__(
        self,
        plane: DataPlane,
        max_body_bytes: int,
        max_bodies_bytes: int,
        admission: Admission | None = None,
        limits: ClientLimits | None = None,
        api: Api = OPEN_INFERENCE,
    ):
        self.service = Service(plane, Decoder(plane.reader), max_body_bytes, bodies_budget(max_bodies_bytes), api)
        self.heads: BoundedCache[bytes, RequestHead] = BoundedCache(_MAX_HEADS)
        self.renderer = Renderer()
        self.admission = admission
        self.limits = limits
        self.app: Any = None
        self.tasks: set[asyncio.Task[None]] = set()


class ConnectionApi(asyncio.Protocol):
    """The part of a connection that its exchanges use.

    ``share``: of a client without a name. ``write_paused``: its client has much of the response to read.
    """

    transport: asyncio.Transport

    def __init__(self, shared: HttpState):
        self.shared = shared
        self.loop = asyncio.get_running_loop()
        self.share = Share()
        self.write_paused = False

    @abstractmethod
    def keeps(self, exchange: Any) -> bool:
        """Return whether the connection stays open after an exchange."""

    @abstractmethod
    def finish(self, parts: Sequence[bytes], *, keep_alive: bool) -> None:
        """Send a response, and continue with the next request."""

    @abstractmethod
    def hold_body(self, *, full: bool) -> None:
        """Pause or resume reading: too much of the body waits for the application."""


class Exchange:
    """One complete request and its response: inference, or a health check.

    Args:
        connection: the request's connection.
        head: the request's head.
    """

    __slots__ = ("_connection", "_held", "_share", "_work", "context", "disconnected", "done", "head", "keep_alive")

    def __init__(self, connection: ConnectionApi, head: RequestHead):
        self.head = head
        self.keep_alive = head.keep_alive
        self.done = False
        self.disconnected = False
        self._connection = connection
        self._held = 0
        self._share: Share | None = None
        self._work: Cancellable | None = None
        request_id, traceparent = head.identity
        self.context = RequestContext(request_id, traceparent)
        observer = connection.shared.service.plane.observer
        if observer is not None:
            observer.begin(self.context, head.method, head.url)

    def run(self, body: bytes) -> None:
        """Serve the request; ``body`` is within the limit of one request."""
        service = self._connection.shared.service
        if self.head.infer is None:
            self._answer_probe()
            return
        try:
            service.budget.change(len(body))
        except IngotError as error:
            self._turn_away(error)
            return
        self._held = len(body)
        self._begin(self.head.infer, body)

    def _begin(self, infer: InferHead, body: bytes) -> None:
        shared = self._connection.shared
        if shared.limits is not None:
            try:
                self._share = shared.limits.admit(self.head.client, self._connection.share)
            except IngotError as error:
                self._turn_away(error)
                return
        client = self.head.client or id(self._connection)
        begin = shared.service.api.begin
        self._work = begin(shared.service, infer, body, self._hold, self.answer, client, self.context)

    def _turn_away(self, error: IngotError) -> None:
        service = self._connection.shared.service
        self.answer(responses.refusal(service.plane, error, service.form(self.head)))

    def _answer_probe(self) -> None:
        if self.head.probe == PREFLIGHT:
            self.answer(responses.PREFLIGHT)
        elif self.head.probe == LIVE:
            self.answer(responses.LIVE)
        else:
            self.answer(responses.ready(self._connection.shared.service.plane))

    def _hold(self, size: int) -> None:
        """Reserve memory until the response.

        Raises:
            Unavailable: the budget is exhausted.
        """
        self._connection.shared.service.budget.change(size, self._held)
        self._held += size

    def answer(self, response: HttpResponse) -> None:
        """Send the response, and let the connection continue; does nothing if the exchange is over."""
        if self.disconnected or self.done:
            return
        if self.head.extra:
            response = response.with_headers(self.head.extra)
        connection = self._connection
        self._release()
        self._work = None  # it refers back to this object
        self.done = True
        keep_alive = connection.keeps(self)
        parts = connection.shared.renderer.render(response, keep_alive=keep_alive, context=self.context)
        connection.finish(parts, keep_alive=keep_alive)
        self.context.finish(response.status)

    def stop(self) -> None:
        """Refuse the request, as the time for draining is over."""
        self._cancel()
        self._turn_away(Unavailable("the server is stopping; ask again elsewhere or later"))

    def disconnect(self) -> None:
        """Drop the request, as its connection is lost."""
        if not (self.done or self.disconnected):
            self.disconnected = True
            self._release()
            self._cancel()
            self.context.finish(responses.CLIENT_LEFT)

    def _release(self) -> None:
        if self._held:
            self._connection.shared.service.budget.change(-self._held)
            self._held = 0
        limits = self._connection.shared.limits
        if limits is not None and self._share is not None:
            limits.leave(self._share)
            self._share = None

    def _cancel(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.cancel()


class PendingBody(Exchange):
    """A request that arrives in parts, or behind unanswered ones."""

    __slots__ = ("_complete", "_parts", "_refusal", "_started")

    def __init__(self, connection: ConnectionApi, head: RequestHead):
        super().__init__(connection, head)
        self._parts: list[bytes | bytearray] = []
        self._complete = False
        self._started = False
        self._refusal: Fault | None = None
        if head.fault is not None:
            self._refuse(head.fault)

    def take(self, part: bytes) -> None:
        """Add a part of the body."""
        if self._refusal is not None or self.done:
            return
        try:
            check_size(self._held + len(part), self._connection.shared.service.max_body_bytes)
            self._hold(len(part))
        except IngotError as error:
            self._refuse(Fault(error))
            return
        # Small parts are joined: as separate objects they would need many times the memory of their bytes.
        if not self._parts or len(part) >= _SMALL_PART:
            self._parts.append(part)
        elif isinstance(self._parts[-1], bytearray):
            self._parts[-1] += part
        else:
            self._parts.append(bytearray(part))

    def complete(self) -> None:
        """Note that the body is complete."""
        self._complete = True
        if self._started and not self.done:
            self._serve()

    def start(self) -> None:
        """Begin, once every earlier request is answered."""
        self._started = True
        if self._refusal is None and self.head.length is not None:
            try:
                check_size(self.head.length, self._connection.shared.service.max_body_bytes)
            except IngotError as error:
                self._refuse(Fault(error))
                return
        if self._refusal is not None:
            self._answer_refusal(self._refusal)
        elif self._complete:
            self._serve()
        elif self.head.expects:
            self._connection.loop.call_soon(self._invite)  # unless the body is in the same packet as the head

    def _invite(self) -> None:
        if not (self._complete or self.done or self.disconnected):
            self._connection.transport.write(responses.CONTINUE)

    def _refuse(self, fault: Fault) -> None:
        """Refuse the request without its body, the rest of which would be read as the next request."""
        self._refusal = fault
        self._parts.clear()
        self.keep_alive = False
        if self._started:
            self._answer_refusal(fault)

    def _answer_refusal(self, fault: Fault) -> None:
        service = self._connection.shared.service
        response = responses.refusal(service.plane, fault.error, service.form(self.head))
        self.answer(response.with_headers(fault.headers, fault.status))

    def _serve(self) -> None:
        if self.head.infer is None:
            self._answer_probe()
            return
        body = bytes(self._parts[0]) if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._begin(self.head.infer, body)

    def disconnect(self) -> None:
        self._parts.clear()
        super().disconnect()
