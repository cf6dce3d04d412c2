"""The FastAPI application: its routes convert requests and call the data plane."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse

from ingot._version import __version__
from ingot.errors import IngotError, InternalError, NotFound, Unavailable, Unsupported, shortened
from ingot.server import extensions
from ingot.server.dataplane import DataPlane, ModelMetadata
from ingot.server.http import codec, exchange, responses, schema
from ingot.server.http.decoder import Decoder
from ingot.server.http.parser import InferHead
from ingot.server.limits import Budget, Reservation, bodies_budget, check_size
from ingot.tensors import TensorSpec

# The router's errors, with our codes, for the metrics.
_COUNTED: Mapping[int, type[IngotError]] = {404: NotFound, 405: Unsupported}
_CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client is gone and does not read it


def create_app(
    plane: DataPlane, max_body_bytes: int, max_bodies_bytes: int = 1 << 30, budget: Budget | None = None
) -> FastAPI:
    """Return the application that serves a data plane.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body, before and after decompression.
        max_bodies_bytes: most bytes that all requests together may hold.
        budget: a shared budget, instead of ``max_bodies_bytes``.
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
    service = exchange.Service(plane, Decoder(), max_body_bytes, budget)

    @app.exception_handler(IngotError)
    async def ingot_error(request: Request, error: IngotError) -> Response:
        response = _response(responses.refusal(plane, error))
        if request.method == "POST":
            # Its body was not read to the end, and would be read as the next request. The refusals of exchange.py,
            # which keep the connection, do not come here.
            response.headers["Connection"] = "close"
        return response

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        text = f"{request.method} {shortened(request.url.path)}: {error.detail}"
        if error.status_code == 404 and error.detail == "Not Found":
            text = f"{text}; inference is POST /v2/models/{{model}}/infer, and GET /openapi.json lists all paths"
        headers = error.headers
        if error.status_code == 405 and headers and "Allow" in headers:
            text = f"{text}; use {headers['Allow']}"
            headers = {**headers, "Allow": headers["Allow"].replace("GET", "GET, HEAD")}
        if (kind := _COUNTED.get(error.status_code)) is not None:
            plane.count_error("http", kind(text))
        return _json({"error": text}, error.status_code, headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        return _response(responses.refusal(plane, InternalError(f"{type(error).__name__}: {error}")))

    @app.get("/v2/health/live", response_model=schema.Live)
    async def live() -> Response:
        return _response(responses.live(plane))

    @app.get("/v2/health/ready", response_model=schema.Ready)
    async def ready() -> Response:
        return _response(responses.ready(plane))

    @app.get("/v2/", include_in_schema=False)
    @app.get("/v2", response_model=schema.ServerMetadata)
    async def server_metadata() -> Response:
        return _json(plane.server_metadata())

    @app.get("/v2/models", response_model=schema.Models)
    async def models() -> Response:
        return _json(extensions.models(plane))

    @app.get("/v2/models/stats", response_model=schema.ModelStatistics)
    async def all_statistics() -> Response:
        return _json(await extensions.statistics(plane))

    @app.get(
        "/v2/models/{model}/versions/{version}/stats",
        openapi_extra=schema.VERSION,
        response_model=schema.ModelStatistics,
    )
    @app.get("/v2/models/{model}/stats", response_model=schema.ModelStatistics)
    async def statistics(request: Request, model: str) -> Response:
        return _json(await extensions.statistics(plane, model, _version(request)))

    @app.get(
        "/v2/models/{model}/versions/{version}/config",
        openapi_extra=schema.VERSION,
        response_model=schema.ModelConfiguration,
    )
    @app.get("/v2/models/{model}/config", response_model=schema.ModelConfiguration)
    async def configuration(request: Request, model: str) -> Response:
        return _json(await extensions.configuration(plane, model, _version(request)))

    @app.get("/v2/models/{model}/versions/{version}", openapi_extra=schema.VERSION, response_model=schema.ModelMetadata)
    @app.get("/v2/models/{model}", response_model=schema.ModelMetadata)
    async def model_metadata(request: Request, model: str) -> Response:
        return _json(_metadata(plane.model_metadata(model, _version(request))))

    @app.get(
        "/v2/models/{model}/versions/{version}/ready", openapi_extra=schema.VERSION, response_model=schema.ModelReady
    )
    @app.get("/v2/models/{model}/ready", response_model=schema.ModelReady)
    async def model_ready(request: Request, model: str) -> Response:
        is_ready = plane.model_ready(model, _version(request))
        return _json({"name": model, "ready": is_ready}, 200 if is_ready else 503)

    @app.post("/v2/models/{model}/versions/{version}/infer", openapi_extra={**schema.INFER, **schema.VERSION})
    @app.post("/v2/models/{model}/infer", openapi_extra=schema.INFER)
    async def infer(request: Request, model: str) -> Response:
        with budget.reserve() as reservation:
            body = await _read(request, max_body_bytes, reservation)
            head = InferHead.of(model, _version(request), request.headers)
            work = exchange.infer(service, head, body, reservation.add, str(request.client))
            return _response(await _unless_gone(request, work))

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await plane.render_metrics(), media_type=plane.metrics.CONTENT_TYPE)

    return app


def _version(request: Request) -> str:
    # Not a parameter with a default: for a path without a version, FastAPI would use ?version= of the query.
    return str(request.path_params.get("version", ""))


async def _unless_gone(request: Request, work: Awaitable[responses.HttpResponse]) -> responses.HttpResponse:
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


async def _read(request: Request, limit: int, reservation: Reservation) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        check_size(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            check_size(size, limit)
            reservation.add(len(part))
            parts.append(part)
    except ClientDisconnect:
        raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client left") from None
    return b"".join(parts)


def _response(answer: responses.HttpResponse) -> Response:
    return Response(answer.body, answer.status, dict(answer.headers), answer.media_type)


def _metadata(metadata: ModelMetadata) -> dict[str, Any]:
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": [_tensor(spec) for spec in metadata.inputs],
        "outputs": [_tensor(spec) for spec in metadata.outputs],
        **({"properties": metadata.properties} if metadata.properties else {}),
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.dtype.value, "shape": spec.wire_shape}


def _json(content: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(codec.dumps(content), status, headers, "application/json")
