"""The FastAPI application: routes convert, the data plane decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

import ingot
from ingot.errors import Code, IngotError, InvalidArgument
from ingot.server import limits
from ingot.server.dataplane import DataPlane, InferResponse, ModelMetadata
from ingot.server.http import codec, schema
from ingot.tensors import TensorSpec

log = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499  # nginx's number; nobody is left to read it


def create_app(plane: DataPlane, max_body_bytes: int) -> FastAPI:
    """Return the application that serves a data plane.

    Args:
        plane: the server's behaviour.
        max_body_bytes: the largest request body, before and after decompression.
    """
    app = FastAPI(title="Ingot", version=ingot.__version__, docs_url=None, redoc_url=None)

    @app.exception_handler(IngotError)
    async def ingot_error(request: Request, error: IngotError) -> Response:
        if error.code is Code.INTERNAL:
            log.error("%s %s: %s", request.method, request.url.path, error)
        plane.metrics.errors.labels("http", error.code.value).inc()
        # A body that was not read would be taken for the next request, so the connection ends with a refusal of it.
        headers = {"Connection": "close"} if error.code is Code.TOO_LARGE else None
        return _error(codec.STATUS[error.code], str(error), headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}", error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        plane.metrics.errors.labels("http", Code.INTERNAL.value).inc()
        return _error(500, "internal error; the server's log has the cause")

    @app.get("/v2/health/live", response_model=schema.Live)
    async def live() -> Response:
        return _json({"live": True})

    @app.get("/v2/health/ready", response_model=schema.Ready)
    async def ready() -> Response:
        return _json({"ready": plane.ready}, 200 if plane.ready else 503)

    @app.get("/v2/", include_in_schema=False)
    @app.get("/v2", response_model=schema.ServerMetadata)
    async def server_metadata() -> Response:
        return _json(plane.server_metadata())

    @app.get("/v2/models/{model}/versions/{version}", response_model=schema.ModelMetadata)
    @app.get("/v2/models/{model}", response_model=schema.ModelMetadata)
    async def model_metadata(model: str, version: str = "") -> Response:
        return _json(_metadata(plane.model_metadata(model, version)))

    @app.get("/v2/models/{model}/versions/{version}/ready", response_model=schema.ModelReady)
    @app.get("/v2/models/{model}/ready", response_model=schema.ModelReady)
    async def model_ready(model: str, version: str = "") -> Response:
        is_ready = plane.model_ready(model, version)
        return _json({"name": model, "ready": is_ready}, 200 if is_ready else 503)

    @app.post("/v2/models/{model}/versions/{version}/infer", openapi_extra=schema.INFER)
    @app.post("/v2/models/{model}/infer", openapi_extra=schema.INFER)
    async def infer(request: Request, model: str, version: str = "") -> Response:
        body = await _read(request, max_body_bytes)
        length = _header_length(request)
        if length == 0:
            signature = plane.repository.get(model, version).signature
            decoded, layout = codec.decode_raw_request(model, version, body, signature)
        else:
            decoded, layout = codec.decode_request(model, version, body, length)
        response = await _unless_gone(request, plane.infer(decoded, "http"))
        return _binary(*codec.encode_response(response, layout), request.headers.get("accept-encoding", ""))

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(plane.metrics.render(), media_type=plane.metrics.CONTENT_TYPE)

    return app


async def _unless_gone(request: Request, work: Awaitable[InferResponse]) -> InferResponse:
    """Await an answer, but stop when its client closes the connection, so that the engine can skip it.

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
        if not gone or answering is None:
            raise
        answering.uncancel()
        raise HTTPException(_CLIENT_CLOSED_REQUEST, "the client left") from None
    finally:
        watching.cancel()


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        limits.check_size(int(declared), limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        limits.check_size(size, limit)
        parts.append(part)
    return limits.decompress(b"".join(parts), request.headers.get("content-encoding", ""), limit)


def _header_length(request: Request) -> int | None:
    text = request.headers.get(codec.HEADER_LENGTH)
    if text is None:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise InvalidArgument(f"{codec.HEADER_LENGTH} is '{text}'; it must be the length of the JSON header in bytes")
    return int(text)


def _binary(body: bytes, header_length: int | None, accepted: str) -> Response:
    headers: dict[str, str] = {}
    if header_length is not None:
        headers[codec.HEADER_LENGTH] = str(header_length)
    if (encoding := limits.wanted_encoding(accepted)) is not None:
        body = limits.compress(body, encoding)
        headers["Content-Encoding"] = encoding
    media_type = "application/json" if header_length is None else "application/octet-stream"
    return Response(body, headers=headers, media_type=media_type)


def _metadata(metadata: ModelMetadata) -> dict[str, Any]:
    return {
        "name": metadata.name,
        "versions": list(metadata.versions),
        "platform": metadata.platform,
        "inputs": [_tensor(spec) for spec in metadata.inputs],
        "outputs": [_tensor(spec) for spec in metadata.outputs],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.dtype.value, "shape": spec.wire_shape}


def _json(content: Mapping[str, Any], status: int = 200) -> Response:
    return Response(codec.dumps(content), status, media_type="application/json")


def _error(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(codec.dumps({"error": text}), status, headers, "application/json")
