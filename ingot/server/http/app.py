"""The FastAPI application: its routes convert requests and call the data plane."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, StreamingResponse

from ingot._version import __version__
from ingot.errors import IngotError, InternalError, NotFound, Unavailable, Unsupported, shortened
from ingot.protocol import json_codec
from ingot.server.http import exchange, generate, responses, schema
from ingot.server.http.decoder import Decoder
from ingot.server.http.page import add_page
from ingot.server.http.parser import InferHead
from ingot.server.http.repository import add_routes
from ingot.server.net.limits import Budget, Reservation, bodies_budget, check_size
from ingot.server.plane import extensions
from ingot.server.plane.dataplane import DataPlane, ModelMetadata
from ingot.server.triton.cuda_memory import CudaRegion, handle_of
from ingot.tensors import TensorSpec

if TYPE_CHECKING:
    from ingot.serving.control import Control

# The router's errors, with our codes, for the metrics.
_COUNTED: Mapping[int, type[IngotError]] = {404: NotFound, 405: Unsupported}
_CLIENT_CLOSED_REQUEST = 499  # nginx's status; the client is gone and does not read it


def create_app(
    plane: DataPlane,
    max_body_bytes: int,
    max_bodies_bytes: int = 1 << 30,
    budget: Budget | None = None,
    control: Control | None = None,
    *,
    page: bool = False,
) -> FastAPI:
    """Return the application that serves a data plane.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body, before and after decompression.
        max_bodies_bytes: most bytes that all requests together may hold.
        budget: a shared budget, instead of ``max_bodies_bytes``.
        control: of the models, on the management listener.
        page: whether to serve the page that shows the server.
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
    service = exchange.Service(plane, Decoder(plane.reader), max_body_bytes, budget)

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
        return _response(responses.LIVE)

    @app.get("/v2/health/ready", response_model=schema.Ready)
    async def ready() -> Response:
        return _response(responses.ready(plane))

    @app.get("/v2/", include_in_schema=False)
    @app.get("/v2", response_model=schema.ServerMetadata)
    async def server_metadata() -> Response:
        return _json(plane.server_metadata(managed=control is not None))

    @app.get("/v2/models", response_model=schema.Models)
    async def models() -> Response:
        return _json(extensions.models(plane))

    @app.get("/v2/models/stats", response_model=schema.ModelStatistics)
    async def all_statistics() -> Response:
        return _json(extensions.statistics(plane))

    @app.get(
        "/v2/models/{model}/versions/{version}/stats",
        openapi_extra=schema.VERSION,
        response_model=schema.ModelStatistics,
    )
    @app.get("/v2/models/{model}/stats", response_model=schema.ModelStatistics)
    async def statistics(request: Request, model: str) -> Response:
        return _json(extensions.statistics(plane, model, _version(request)))

    @app.get(
        "/v2/models/{model}/versions/{version}/config",
        openapi_extra=schema.VERSION,
        response_model=schema.ModelConfiguration,
    )
    @app.get("/v2/models/{model}/config", response_model=schema.ModelConfiguration)
    async def configuration(request: Request, model: str) -> Response:
        return _json(extensions.configuration(plane, model, _version(request)))

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
            work = exchange.infer(service, head, body, reservation.add, _sender(request))
            return _response(await _unless_gone(request, work))

    @app.post("/v2/models/{model}/versions/{version}/generate", openapi_extra={**schema.GENERATE, **schema.VERSION})
    @app.post("/v2/models/{model}/generate", openapi_extra=schema.GENERATE)
    async def generate_one(request: Request, model: str) -> Response:
        with budget.reserve() as reservation:
            body = await _read(request, max_body_bytes, reservation)
            decoded = generate.decode(plane, model, _version(request), body, _sender(request))
            return Response(await generate.answer(plane, decoded), media_type="application/json")

    @app.post(
        "/v2/models/{model}/versions/{version}/generate_stream", openapi_extra={**schema.EVENTS, **schema.VERSION}
    )
    @app.post("/v2/models/{model}/generate_stream", openapi_extra=schema.EVENTS)
    async def generate_stream(request: Request, model: str) -> Response:
        with budget.reserve() as reservation:
            body = await _read(request, max_body_bytes, reservation)
            decoded = generate.decode(plane, model, _version(request), body, _sender(request))
        answers = generate.events(plane, decoded)
        first = await anext(answers)  # an error before it has its own status

        async def events() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(answers):
                yield first
                async for event in answers:
                    yield event

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @app.get("/v2/logging", response_model=schema.LogSettings)
    async def log_settings() -> Response:
        return _json(plane.logs.content)

    changeable = plane.logs.changeable or control is not None

    @app.post("/v2/logging", openapi_extra=schema.LOGGING, include_in_schema=changeable)
    async def change_log_settings(request: Request) -> Response:
        with budget.reserve() as reservation:
            wanted = json_codec.decode_object(await _read(request, max_body_bytes, reservation))
        plane.logs.change(wanted, _client(request), managed=control is not None)
        return _json(plane.logs.content)

    add_routes(app, control)
    if page:
        add_page(app)
    _add_shared_memory(app, plane, max_body_bytes, budget)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(plane.metrics.render(), media_type=plane.metrics.CONTENT_TYPE)

    return app


def _add_shared_memory(app: FastAPI, plane: DataPlane, max_body_bytes: int, budget: Budget) -> None:
    """Add the paths of shared memory, which /openapi.json lists only if they work."""
    listed = plane.reader is not None

    @app.get(
        "/v2/systemsharedmemory/region/{region}/status",
        openapi_extra=schema.REGION,
        response_model=list[schema.Region],
        include_in_schema=listed,
    )
    @app.get("/v2/systemsharedmemory/status", response_model=list[schema.Region], include_in_schema=listed)
    async def memory_status(request: Request) -> Response:
        return _json(plane.memory.status(_client(request), request.path_params.get("region", "")))

    @app.post(
        "/v2/systemsharedmemory/region/{region}/register", openapi_extra=schema.REGISTER, include_in_schema=listed
    )
    async def register_memory(request: Request, region: str) -> Response:
        with budget.reserve() as reservation:
            content = json_codec.decode_object(await _read(request, max_body_bytes, reservation))
        plane.memory.register(_client(request), region, *json_codec.region_of(content))
        return _json({})

    @app.post(
        "/v2/systemsharedmemory/region/{region}/unregister", openapi_extra=schema.REGION, include_in_schema=listed
    )
    @app.post("/v2/systemsharedmemory/unregister", include_in_schema=listed)
    async def unregister_memory(request: Request) -> Response:
        plane.memory.unregister(_client(request), request.path_params.get("region", ""))
        return _json({})

    listed = plane.shares_cuda

    @app.get(
        "/v2/cudasharedmemory/region/{region}/status",
        openapi_extra=schema.REGION,
        response_model=list[schema.CudaRegion],
        include_in_schema=listed,
    )
    @app.get("/v2/cudasharedmemory/status", response_model=list[schema.CudaRegion], include_in_schema=listed)
    async def cuda_memory_status(request: Request) -> Response:
        return _json(plane.memory.status(_client(request), request.path_params.get("region", ""), CudaRegion))

    @app.post(
        "/v2/cudasharedmemory/region/{region}/register", openapi_extra=schema.REGISTER_CUDA, include_in_schema=listed
    )
    async def register_cuda_memory(request: Request, region: str) -> Response:
        with budget.reserve() as reservation:
            content = json_codec.decode_object(await _read(request, max_body_bytes, reservation))
        plane.memory.register_cuda(_client(request), region, *handle_of(content))
        return _json({})

    @app.post("/v2/cudasharedmemory/region/{region}/unregister", openapi_extra=schema.REGION, include_in_schema=listed)
    @app.post("/v2/cudasharedmemory/unregister", include_in_schema=listed)
    async def unregister_cuda_memory(request: Request) -> Response:
        plane.memory.unregister(_client(request), request.path_params.get("region", ""), CudaRegion)
        return _json({})


def _client(request: Request) -> Hashable:
    """Return the name of a request's client, by its key; None if it has none."""
    return getattr(request.state, "client", None)


def _sender(request: Request) -> Hashable:
    """Return who sent a request: a name, or else a number of its connection."""
    return _client(request) or hash(request.client)


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
        **({"labels": list(metadata.labels)} if metadata.labels else {}),
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.dtype.value, "shape": spec.wire_shape}


def _json(
    content: Mapping[str, Any] | list[Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(json_codec.dumps(content), status, headers, "application/json")
