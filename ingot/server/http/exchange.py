"""One exchange over HTTP: a request's headers and body in, the answer's out. Whoever answers HTTP calls only this."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from ingot.errors import Code, DeadlineExceeded, IngotError, InvalidArgument, NotFound, public_text
from ingot.faultlog import rate_limited_logger
from ingot.server import compression
from ingot.server.compression import Decompression, Hold
from ingot.server.dataplane import DataPlane, wrapped
from ingot.server.http import codec, large
from ingot.server.http.codec import Headers
from ingot.server.http.plans import Plans, ResponseFormat
from ingot.server.limits import BODY_PACE, Budget
from ingot.server.requests import Cancellable, InferRequest, InferResponse, outcome_of

log = rate_limited_logger(__name__)

# Seconds after which a refused client may ask again: the least that the header can say.
_RETRY: Headers = (("Retry-After", "1"),)


class HttpResponse(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    headers: Headers = ()
    media_type: str = "application/json"


Done = Callable[[HttpResponse], None]
Probe = Callable[[DataPlane], HttpResponse]


class RequestHead(NamedTuple):
    """What path and headers say of an inference request. ``header_length`` is text if it is no number."""

    model: str
    version: str
    header_length: int | str | None
    encoding: str
    answer_encoding: str | None

    @classmethod
    def of(cls, model: str, version: str, headers: Mapping[str, str]) -> RequestHead:
        """Return it.

        Args:
            model: from the path.
            version: from the path, or empty.
            headers: the request's, with names in lower case.
        """
        return cls(
            model,
            version,
            _number(headers.get(codec.HEADER_LENGTH.lower())),
            headers.get("content-encoding", ""),
            compression.wanted_encoding(headers.get("accept-encoding", "")),
        )


NOTHING = RequestHead("", "", None, "", None)


class Service(NamedTuple):
    """What inference over HTTP is answered with.

    ``plane`` is the server's behaviour, ``plans`` knows requests that came before, and ``max_body_bytes`` is the most
    that a body may have, before and after it is decompressed. ``budget`` bounds the memory of all requests.
    """

    plane: DataPlane
    plans: Plans
    max_body_bytes: int
    budget: Budget


def begin(service: Service, asked: RequestHead, body: bytes, hold: Hold, done: Done) -> Cancellable | None:
    """Take an inference request in.

    Args:
        service: what answers it.
        asked: what its head says.
        body: the whole body, as it came.
        hold: told how much more memory it then takes; raises Unavailable if that is too much.
        done: called once with the answer, errors included, unless the request is cancelled: here if it is refused at
            once, else in a later tick of the event loop.

    Returns:
        The request, which can be cancelled; None if it is answered.
    """
    if asked.encoding:
        return _Packed(service, asked, hold, done).start(body)
    return _submit(service, asked, body, hold, done)


def _submit(service: Service, asked: RequestHead, body: bytes, hold: Hold, done: Done) -> Cancellable | None:
    plane = service.plane
    try:
        length = asked.header_length
        if isinstance(length, str):
            raise InvalidArgument(
                f"{codec.HEADER_LENGTH} is '{length}'; it must be the length of the JSON header in bytes"
            )
        if length == 0:
            signature = plane.signature(asked.model, asked.version)
            request, layout = codec.decode_raw_request(asked.model, asked.version, body, signature)
        elif min(len(body), len(body) if length is None else length) > large.AT_ONCE:
            return _Decoding(service, asked, hold, done).start(body, length)
        else:
            request, layout = codec.decode_request(service.plans, asked.model, asked.version, body, length)
        return plane.submit(request, "http", functools.partial(_reply, plane, asked, layout, done))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's and ends no connection
        done(_undecoded(plane, asked, error))
    return None


class _Decoding:
    """A request with JSON so large that it is decoded in a thread: in the event loop, all others would wait for it."""

    def __init__(self, service: Service, asked: RequestHead, hold: Hold, done: Done):
        self._service = service
        self._asked = asked
        self._hold = hold
        self._done = done
        self._work: Cancellable | None = None
        self._decoding: Future[tuple[InferRequest, ResponseFormat]] | None = None
        self._size = 0
        self._cancelled = False

    def start(self, body: bytes, header_length: int | None) -> Cancellable:
        self._size = len(body)
        self._decoding = compression.threads.submit(
            codec.decode_request, None, self._asked.model, self._asked.version, body, header_length
        )
        asyncio.wrap_future(self._decoding).add_done_callback(self._decoded)
        return self

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        if self._decoding is not None and not self._decoding.cancel():
            self._service.budget.keep(self._size)  # the thread uses the body until it is decoded
        work, self._work = self._work, None
        if work is not None:
            work.cancel()

    def _decoded(self, future: asyncio.Future[tuple[InferRequest, ResponseFormat]]) -> None:
        self._decoding = None
        if future.cancelled():
            return
        if self._cancelled:
            self._service.budget.change(-self._size)
            future.exception()  # which else is logged as never retrieved
            return
        plane, asked, done = self._service.plane, self._asked, self._done
        try:
            request, layout = future.result()
            self._hold(sum(array.nbytes for array in request.inputs.values()))
            self._work = plane.submit(request, "http", functools.partial(_reply, plane, asked, layout, done))
        except Exception as error:  # noqa: BLE001 - as in _submit
            done(_undecoded(plane, asked, error))


class _Packed:
    """A request with a ``Content-Encoding``."""

    def __init__(self, service: Service, asked: RequestHead, hold: Hold, done: Done):
        self._service = service
        self._asked = asked
        self._hold = hold
        self._done = done
        self._work: Cancellable | None = None

    def start(self, body: bytes) -> Cancellable | None:
        try:
            encoding = compression.known(self._asked.encoding)
        except InvalidArgument as error:
            self._go_on(error)
            return None
        if not encoding:
            return _submit(self._service, self._asked, body, self._hold, self._done)
        pieces = compression.decompressed(body, encoding, self._service.max_body_bytes)
        self._work = body_to_be = Decompression(pieces, self._hold, self._go_on)
        body_to_be.start(len(body))
        return self if self._work is not None else None

    def cancel(self) -> None:
        work, self._work = self._work, None  # which leads back here
        if work is not None:
            work.cancel()

    def _go_on(self, body: bytes | Exception) -> None:
        if isinstance(body, Exception):
            self._work = None
            self._done(_undecoded(self._service.plane, self._asked, body))
        else:
            self._work = _submit(self._service, self._asked, body, self._hold, self._done)


def _undecoded(plane: DataPlane, asked: RequestHead, error: Exception) -> HttpResponse:
    """Answer that a body cannot be read, or first that there is no model for it."""
    if isinstance(error, InvalidArgument):
        try:
            plane.repository.get(asked.model, asked.version)
        except NotFound as missing:
            error = missing
    return failure(plane, error)


def _reply(
    plane: DataPlane, asked: RequestHead, layout: ResponseFormat, done: Done, outcome: InferResponse | IngotError
) -> None:
    if isinstance(outcome, IngotError):
        done(refusal(plane, outcome))
        return
    try:
        body, headers = codec.encode_response(outcome, layout)
        media_type = "application/octet-stream" if headers else "application/json"
    except Exception as error:  # noqa: BLE001 - the other requests of the batch wait behind this one
        done(failure(plane, error))
        return
    if asked.answer_encoding is None:
        done(HttpResponse(200, body, headers, media_type))
    else:
        headers += (("Content-Encoding", asked.answer_encoding),)
        compression.compress(
            body, asked.answer_encoding, lambda packed: done(HttpResponse(200, packed, headers, media_type))
        )


async def infer(service: Service, asked: RequestHead, body: bytes, hold: Hold) -> HttpResponse:
    """Answer an inference request; :func:`begin` as a coroutine."""
    return await outcome_of(functools.partial(begin, service, asked, body, hold))


def live(plane: DataPlane) -> HttpResponse:
    """Answer whether the process runs."""
    return HttpResponse(200, codec.dumps({"live": True}))


def ready(plane: DataPlane) -> HttpResponse:
    """Answer whether requests would be served."""
    return HttpResponse(200 if plane.ready else 503, codec.dumps({"ready": plane.ready}))


def refusal(plane: DataPlane, error: IngotError) -> HttpResponse:
    """Return an error as an answer, and count it."""
    plane.count_error("http", error)
    headers = _RETRY if error.code is Code.UNAVAILABLE else ()
    return HttpResponse(codec.STATUS[error.code], codec.dumps({"error": public_text(error)}), headers)


def too_slow(plane: DataPlane) -> HttpResponse:
    """Answer that a body comes too slowly, and count it."""
    error = DeadlineExceeded(f"the rest of the request's body did not come in time; {BODY_PACE}")
    return refusal(plane, error)._replace(status=codec.TOO_SLOW)


def failure(plane: DataPlane, error: Exception) -> HttpResponse:
    """Return any error as an answer; what is not ours to tell is logged."""
    if not isinstance(error, IngotError):
        log.error("a request failed", exc_info=error)
        error = wrapped(error)
    return refusal(plane, error)


def _number(text: str | None) -> int | str | None:
    """Return the number that a header is, the text of one that is none, and None if it is not there."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else text
