"""The FastAPI application. Its routes are made from the table in ``server/plane/operations.py``; add one there."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Mapping, Sized
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from ingot._version import __version__
from ingot.errors import IngotError, InternalError, NotFound, Unavailable, Unsupported, shortened
from ingot.protocol import json_codec, json_large
from ingot.protocol.requests import outcome_of
from ingot.server.http import exchange, generate, responses, schema
from ingot.server.http import page as page_module
from ingot.server.http.api import Api
from ingot.server.http.json_memo import Decoder
from ingot.server.http.parser import InferHead
from ingot.server.net import compression
from ingot.server.net.limits import SMALL_BYTES, Budget, Reservation, bodies_budget, check_size
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.handlers import Call, Events
from ingot.server.plane.operations import Handler, Operation, Refusal

if TYPE_CHECKING:
    from ingot.serving.control import Control

T = TypeVar("T")

Endpoint = Callable[..., Awaitable[Response]]

# The router's errors, with our codes, for the metrics.
_COUNTED: Mapping[int, type[IngotError]] = {404: NotFound, 405: Unsupported}
# Items of an answer whose JSON the event loop writes itself.
_ITEMS_AT_ONCE = 8
_SPACE = b" \t\r\n"  # of JSON
_CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client is gone and does not read it


def create_app(
    plane: DataPlane,
    max_body_bytes: int,
    max_bodies_bytes: int = 1 << 30,
    budget: Budget | None = None,
    control: Control | None = None,
    *,
    page: bool = False,
    api: Api = exchange.OPEN_INFERENCE,
) -> FastAPI:
    """Return the application that serves a data plane.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body, before and after decompression.
        max_bodies_bytes: most bytes that all requests together may hold.
        budget: a shared budget, instead of ``max_bodies_bytes``.
        control: of the models, on the management listener.
        page: whether to serve the page that shows the server.
        api: what is served.
    """
    app = FastAPI(
        title="Ingot",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=schema.REFUSALS,
    )
    budget = budget or bodies_budget(max_bodies_bytes)
    service = exchange.Service(plane, Decoder(plane.reader), max_body_bytes, budget, api)

    @app.exception_handler(IngotError)
    async def ingot_error(request: Request, error: IngotError) -> Response:
        return _response(responses.refusal(plane, error, api.refusal(request.url.path)))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {shortened(request.url.path)}: {error.detail}"
        if error.status_code == 404 and error.detail == "Not Found":
            text = f"{text}; {api.hint}"
        headers = error.headers
        if error.status_code == 405 and headers and "Allow" in headers:
            text = f"{text}; use {headers['Allow']}"
            headers = {**headers, "Allow": headers["Allow"].replace("GET", "GET, HEAD")}
        if (kind := _COUNTED.get(error.status_code)) is None:
            return _json({"error": text}, error.status_code, headers)
        refused = responses.refusal(plane, kind(text), api.refusal(request.url.path))
        return _response(refused.with_headers(tuple((headers or {}).items()), error.status_code))

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        internal = InternalError(f"{type(error).__name__}: {error}")
        return _response(responses.refusal(plane, internal, api.refusal(request.url.path)))

    endpoints = _Endpoints(plane, control, service, app.openapi)
    for operation in api.operations:
        if operation.http and (page or operation.name not in page_module.ENDPOINTS):
            _add(app, operation, endpoints.of(operation), listed=operation.holds(plane, control))
    return app


def _add(app: FastAPI, operation: Operation, serve: Endpoint, *, listed: bool) -> None:
    """Add the paths of an operation; OpenAPI has them if they are ``listed``."""
    for route in operation.http:
        method, path = route.split()
        app.add_api_route(
            path,
            _with_parameters(serve, path),
            methods=[method],
            name=operation.name,
            include_in_schema=listed and route not in operation.hidden,
            response_model=schema.response_model(operation),
            responses=schema.refusals(operation),
            response_class=PlainTextResponse if operation.response == schema.TEXT else JSONResponse,
            openapi_extra=schema.extra(operation),
        )


def _with_parameters(serve: Endpoint, path: str) -> Endpoint:
    """Return an endpoint whose signature has the parameters of a path, by which FastAPI passes and describes them."""

    async def endpoint(request: Request, **given: str) -> Response:
        return await serve(request, **given)

    names = re.findall(r"\{(\w+)\}", path)
    first = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Request)
    given = (inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=str) for name in names)
    endpoint.__signature__ = inspect.Signature((first, *given))  # type: ignore[attr-defined]
    return endpoint


class _Endpoints:
    """Serves operations over HTTP: those with a handler by it, the others by the method of their name.

    Args:
        plane: the server's behaviour.
        control: of the models, on the management listener.
        service: what serves inference, with the limits of bodies.
        described: returns the OpenAPI document.
    """

    def __init__(
        self,
        plane: DataPlane,
        control: Control | None,
        service: exchange.Service,
        described: Callable[[], dict[str, Any]],
    ):
        self._plane = plane
        self._control = control
        self._service = service
        self._described = described

    def of(self, operation: Operation) -> Endpoint:
        """Return the endpoint of an operation."""
        if operation.handler is not None:
            if operation.refusal is not None:
                return partial(self._answer, operation, operation.handler)
            return partial(self._call, operation, operation.handler)
        served: Endpoint = page_module.ENDPOINTS.get(operation.name) or getattr(self, operation.name)
        return served

    async def _call(self, operation: Operation, handler: Handler, request: Request, **path: str) -> Response:
        content: Mapping[str, Any] = {}
        if operation.request is not None:
            with self._service.budget.reserve() as reservation:
                content = json_codec.decode_object(await self._read(request, reservation, small=True))
        answer = await handler(Call(self._plane, self._control, _client(request), content, **path))
        return _json(answer, 503 if operation.probe and not answer["ready"] else 200)

    async def _answer(self, operation: Operation, handler: Handler, request: Request, **path: str) -> Response:
        """Answer a request of another server's API, whose bodies may be large."""
        with self._service.budget.reserve() as reservation:
            content: Mapping[str, Any] = {}
            if operation.request is not None:
                body = await self._read(request, reservation)
                if operation.files and _is_file(request.headers.get("content-type", ""), body):
                    content = {"inputs": body}
                else:
                    content = await compression.run(partial(_decoded, body), in_thread=len(body) > json_large.AT_ONCE)
            path["query"] = request.url.query
            call = Call(self._plane, self._control, _sender(request), content, **path)
            found = await _unless_gone(request, _answered(handler, call))
            if isinstance(found, Events):
                return await self._stream(request, found, operation.refusal)
            return _response(found)

    async def _stream(self, request: Request, events: Events, form: Refusal | None) -> Response:
        """Answer a request with server-sent events, each a JSON object."""
        items = events.items
        first = await _unless_gone(request, _first(items))  # an error before it has its own status

        async def written() -> AsyncGenerator[bytes]:
            async with contextlib.aclosing(items):
                try:
                    if first is not None:
                        yield _event(first)
                    async for item in items:
                        yield _event(item)
                except Exception as error:  # noqa: BLE001 - the boundary of one request
                    yield _event(orjson.Fragment(responses.failure(self._plane, error, form).body))
                else:
                    yield events.end

        headers = {"Cache-Control": "no-store"}
        return StreamingResponse(written(), media_type="text/event-stream", headers=headers)

    async def infer(self, request: Request, model: str, version: str = "") -> Response:
        """Answer one request of inference."""
        with self._service.budget.reserve() as reservation:
            body = await self._read(request, reservation)
            head = InferHead.of(model, version, request.headers)
            work = exchange.infer(self._service, head, body, reservation.add, _sender(request))
            return _response(await _unless_gone(request, work))

    async def predictions(self, request: Request, **path: str) -> Response:
        """Answer one request that the API's own inference reads, such as TorchServe's."""
        with self._service.budget.reserve() as reservation:
            body = await self._read(request, reservation)
            head = self._service.api.infers(b"POST", quote(request.url.path).encode(), request.headers.raw)
            begin = partial(self._service.api.begin, self._service, head, body, reservation.add)
            return _response(await _unless_gone(request, outcome_of(partial(begin, client=_sender(request)))))

    async def description(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        return _json(self._described())

    async def generate_one(self, request: Request, model: str, version: str = "") -> Response:
        """Answer one request of inference in flat JSON."""
        with self._service.budget.reserve() as reservation:
            body = await self._read(request, reservation)
            decoded = await generate.read(self._plane, model, version, body, _sender(request))
            return Response(await generate.answer(self._plane, decoded), media_type="application/json")

    async def generate_stream(self, request: Request, model: str, version: str = "") -> Response:
        """Answer a request in flat JSON with server-sent events."""
        with self._service.budget.reserve() as reservation:
            body = await self._read(request, reservation)
            decoded = await generate.read(self._plane, model, version, body, _sender(request))
        return await self._stream(request, Events(generate.events(self._plane, decoded)), None)

    async def metrics(self, request: Request) -> Response:
        """Return the metrics in Prometheus' text form."""
        return Response(self._plane.metrics.render(), media_type=self._plane.metrics.CONTENT_TYPE)

    async def _read(self, request: Request, reservation: Reservation, *, small: bool = False) -> bytes:
        """Return a request's body; a ``small`` one is decoded in the event loop, and has a lower limit."""
        most = self._service.max_body_bytes
        check = partial(check_size, limit=min(SMALL_BYTES, most) if small else most)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal():
            check(int(declared))
        parts: list[bytes] = []
        size = 0
        try:
            async for part in request.stream():
                size += len(part)
                check(size)
                reservation.add(len(part))
                parts.append(part)
        except ClientDisconnect:
            raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client left") from None
        return b"".join(parts)


async def _first(items: AsyncGenerator[Any]) -> Any:
    """Return the first item; None if there is none."""
    async for item in items:
        return item
    return None


def _event(content: Any) -> bytes:
    return b"data: %b\n\n" % json_codec.dumps(content)


async def _answered(handler: Handler, call: Call) -> responses.HttpResponse | Events:
    """Return the answer of another server's API, in JSON that a thread makes if it is long."""
    content = await handler(call)
    if isinstance(content, responses.HttpResponse | Events):
        return content
    lists = content.values() if isinstance(content, dict) else (content,)
    many = any(len(each) > _ITEMS_AT_ONCE for each in lists if isinstance(each, Sized) and not isinstance(each, str))
    return responses.HttpResponse(200, await compression.run(partial(json_codec.dumps, content), in_thread=many))


def _is_file(media_type: str, body: bytes) -> bool:
    """Return whether a body is a file: by its type, or without one if it cannot be a JSON object.

    curl states the type of a form for any body unless the user names another.
    """
    if media_type and media_type != "application/x-www-form-urlencoded":
        return media_type.lower().startswith(schema.FILES)
    return not body.lstrip(_SPACE).startswith(b"{")


def _decoded(body: bytes) -> Mapping[str, Any]:
    json_large.check(body)
    return json_codec.decode_object(body)


def _client(request: Request) -> Hashable:
    """Return the name of a request's client, by its key; None if it has none."""
    return getattr(request.state, "client", None)


def _sender(request: Request) -> Hashable:
    """Return who sent a request: a name, or else a number of its connection."""
    return _client(request) or hash(request.client)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Await a response, but cancel it when the client closes the connection, so that the engine can skip it.

    Raises:
        HTTPException: the client left; the status is only for the log.
    """
    answering = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        if answering is not None:
            answering.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if answering is None:
            raise
        answering.uncancel()
        if not gone:  # the server is stopping, and the time for draining is over
            raise Unavailable("the server is stopping; ask again elsewhere or later") from None
        raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client left") from None
    finally:
        watching.cancel()


def _response(answer: responses.HttpResponse) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), answer.media_type)


def _json(
    content: Mapping[str, Any] | list[Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json_codec.dumps(content), status, headers, "application/json")
