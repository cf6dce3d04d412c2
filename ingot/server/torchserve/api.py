"""The operations of TorchServe's three HTTP ports, each stated once; see :mod:`ingot.server.plane.operations`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs

from ingot.protocol.requests import Cancellable
from ingot.server.access.gate import INFER, METRICS
from ingot.server.http.api import Api
from ingot.server.http.parser import HeaderList, InferHead
from ingot.server.http.responses import HttpResponse
from ingot.server.plane.handlers import Call
from ingot.server.plane.operations import Handler, Operation
from ingot.server.torchserve import metrics, predictions
from ingot.server.torchserve.errors import pretty, refusal
from ingot.server.torchserve.management import Management, Parameters, Status
from ingot.server.torchserve.predictions import Predictions

_HINT = "Requested resource is not found, please refer to API document: OPTIONS /"
PING = "/ping"


def _operation(name: str, handler: Handler | None, *routes: str, scope: str = INFER) -> Operation:
    return Operation(name, routes, handler=handler, scope=scope, refusal=refusal)


def _answer(content: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(status, pretty(content) + b"\n")


async def ping(call: Call) -> HttpResponse:
    """Return whether every model is ready."""
    healthy = call.plane.ready
    return _answer({"status": "Healthy" if healthy else "Unhealthy"}, 200 if healthy else 500)


_PING = _operation("ping", ping, f"GET {PING}", scope="")
_DESCRIPTION = _operation("description", None, "OPTIONS /", "GET /api-description")


def inference(served: Predictions) -> Api:
    """Return the API of the port for predictions, which the hot path serves."""
    listed = _operation(
        "predictions",
        None,
        "POST /predictions/{model}",
        "POST /predictions/{model}/{version}",
        "POST /invocations",
        "POST /models/{model}/invoke",
        "POST /v1/models/{model}:predict",
        "POST /explanations/{model}",
        "POST /explanations/{model}/{version}",
        "POST /v1/models/{model}:explain",
        "POST /wfpredict/{model}",
    )
    return _api((_PING, _DESCRIPTION, listed), predictions.infers, served.begin)


def management(served: Management) -> Api:
    """Return the API of the port for management."""

    def changed(work: Callable[[Call, Parameters], Awaitable[Status] | Status]) -> Handler:
        async def handler(call: Call) -> HttpResponse:
            found = work(call, Parameters.of(call.query))
            status = found if isinstance(found, Status) else await found
            return _answer({"status": status.text}, status.code)

        return handler

    async def listed(call: Call) -> HttpResponse:
        return _answer(served.page(Parameters.of(call.query)))

    async def described(call: Call) -> HttpResponse:
        return _answer(served.describe(call.model, call.version))

    def one(method: str) -> tuple[str, ...]:
        return tuple(f"{method} /models/{{model}}{rest}" for rest in ("", "/", "/{version}"))

    operations = (
        _PING,
        _DESCRIPTION,
        _operation("list_models", listed, "GET /models"),
        _operation("register_model", changed(lambda call, given: served.register(given)), "POST /models"),
        _operation("describe_model", described, *one("GET")),
        _operation(
            "scale_workers",
            changed(lambda call, given: served.scale(call.model, call.version, given)),
            *one("PUT"),
        ),
        _operation(
            "set_default",
            changed(lambda call, given: served.set_default(call.model, call.version)),
            "PUT /models/{model}/{version}/set-default",
        ),
        _operation(
            "unregister_model",
            changed(lambda call, given: served.unregister(call.model, call.version)),
            *one("DELETE"),
        ),
    )
    return _api(operations)


async def _metrics(call: Call) -> HttpResponse:
    names = parse_qs(call.query).get("name[]", [])
    plain = metrics.rendered(call.plane.metrics, names)
    return HttpResponse(200, plain, media_type=call.plane.metrics.CONTENT_TYPE)


def _nothing(method: bytes, url: bytes, headers: HeaderList) -> InferHead | None:
    return None


def _api(
    operations: tuple[Operation, ...],
    infers: Callable[[bytes, bytes, HeaderList], InferHead | None] = _nothing,
    begin: Callable[..., Cancellable | None] = lambda *_: None,
) -> Api:
    return Api(operations, lambda path: refusal, infers, begin, refusal, _HINT)


METRICS_API = _api((_operation("metrics", _metrics, "GET /metrics", scope=METRICS),))
"""The API of the port for metrics."""


def scope_of(path: str) -> str:
    """Return the right that a request to a path of these APIs needs; empty for none."""
    return "" if path == PING else METRICS if path == "/metrics" else INFER
