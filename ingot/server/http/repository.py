"""The HTTP of management: Triton's repository control, and what ``ingot server`` needs besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response

from ingot.errors import InvalidArgument, Unsupported
from ingot.protocol import json_codec
from ingot.serving.control import ELSEWHERE

if TYPE_CHECKING:
    from ingot.serving.control import Control

MAX_BODY_BYTES = 1 << 20


def add_routes(app: FastAPI, control: Control | None) -> None:
    """Add the paths of repository control; without a control, those that name the management listener instead."""

    shown = control is not None

    @app.post("/v2/repository/index", include_in_schema=shown)
    @app.post("/v2/repository/{repository}/index", include_in_schema=False)
    async def index(request: Request) -> Response:
        wanted = await _parameters(request)
        return _json(_control(control).index(ready=_flag(wanted, "ready")))

    @app.post("/v2/repository/models/{model}/load", include_in_schema=shown)
    @app.post("/v2/repository/{repository}/models/{model}/load", include_in_schema=False)
    async def load(request: Request, model: str) -> Response:
        parameters = (await _parameters(request)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidArgument("'parameters' must be an object")
        deployment = await _control(control).load(model, parameters)
        return _json(deployment.status())

    @app.post("/v2/repository/models/{model}/unload", include_in_schema=shown)
    @app.post("/v2/repository/{repository}/models/{model}/unload", include_in_schema=False)
    async def unload(request: Request, model: str) -> Response:
        parameters = (await _parameters(request)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidArgument("'parameters' must be an object")
        name, _, version = model.partition(":")
        await _control(control).unload(name, version, _flag(parameters, "unload_dependents"))
        return _json({})

    @app.get("/v2/repository/status", include_in_schema=shown)
    async def status() -> Response:
        return _json(_control(control).status())

    @app.post("/v2/repository/models/{model}/trial", include_in_schema=shown)
    async def trial(request: Request, model: str) -> Response:
        return _json(await _control(control).trial(model, await _parameters(request)))

    @app.delete("/v2/repository/models/{model}/trial", include_in_schema=shown)
    async def stop_trial(model: str) -> Response:
        return _json(await _control(control).stop_trial(model))

    @app.post("/v2/repository/reload", include_in_schema=shown)
    async def reload(request: Request) -> Response:
        name = (await _parameters(request)).get("name", "")
        if not isinstance(name, str):
            raise InvalidArgument("'name' must be a text")
        return _json(await _control(control).reload(name))


def _control(control: Control | None) -> Control:
    if control is None:
        raise Unsupported(ELSEWHERE)
    return control


async def _parameters(request: Request) -> dict[str, Any]:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise InvalidArgument(f"the body has over {MAX_BODY_BYTES} bytes")
    return json_codec.decode_object(body)


def _flag(parameters: dict[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"'{name}' is {value!r}; it must be true or false")
    return value


def _json(content: Any) -> Response:
    return Response(json_codec.dumps(content), media_type="application/json")
