"""The parts of /openapi.json that FastAPI cannot derive, from bodies_of_protocol.py and bodies_of_apis.py."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ingot.server.http import bodies_of_apis, bodies_of_protocol
from ingot.server.plane.operations import Operation

MODELS: dict[str, type[BaseModel]] = {
    name: kind
    for name, kind in {**vars(bodies_of_protocol), **vars(bodies_of_apis)}.items()
    if isinstance(kind, type) and issubclass(kind, BaseModel)
}
"""The models of bodies, by name."""
FILES = ("image/", "audio/", "application/octet-stream")
"""How the media types of bodies that are files begin."""
_BINARY: dict[str, Any] = {"schema": {"type": "string", "format": "binary"}}


def _inlined(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON schema with its references resolved, as ``openapi_extra`` needs it."""
    whole = model.model_json_schema()
    definitions = whole.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(definitions[node["$ref"].rpartition("/")[2]])
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(value) for value in node] if isinstance(node, list) else node

    return resolve(whole)  # type: ignore[no-any-return]


# Schemas of bodies that are not models here, as the table of operations names them.
INPUTS, EVENTS, TEXT = "Inputs", "Events", "Text"
IN_WORDS = {INPUTS: "inputs by name", EVENTS: "server-sent events", TEXT: "text"}
_FLAT = {"type": "object", "description": "Inputs by name, id, and parameters"}


def response_model(operation: Operation) -> Any:
    """Return the model of an answer, or None."""
    kind, _, inner = operation.response.partition("[")
    if operation.handler is None or not kind:
        return None
    return list[MODELS[inner.rstrip("]")]] if inner else MODELS[kind]  # type: ignore[misc]


def extra(operation: Operation) -> dict[str, Any]:
    """Return the parts of the schema that FastAPI cannot derive, since endpoints read and write bodies themselves."""
    found: dict[str, Any] = {}
    if operation.request:
        content = _FLAT if operation.request == INPUTS else _inlined(MODELS[operation.request])
        media: dict[str, Any] = {"application/json": {"schema": content}}
        if operation.files:
            media |= {f"{kind.rstrip('/')}/*" if kind.endswith("/") else kind: _BINARY for kind in FILES}
        found["requestBody"] = {"required": True, "content": media}
    if operation.handler is None and operation.response not in ("", TEXT):
        found["responses"] = {"200": _answer(operation.response)}
    return found


def _answer(name: str) -> dict[str, Any]:
    if name == EVENTS:
        events = {"text/event-stream": {"schema": {"type": "string"}}}
        return {"description": "An event for each answer", "content": events}
    return {"description": "The answer", "content": {"application/json": {"schema": _inlined(MODELS[name])}}}


def refusals(operation: Operation) -> dict[int | str, dict[str, Any]]:
    """Return the errors of an operation, if their bodies have another form than usual."""
    if operation.refusal is None:
        return {}
    return {status: {**about, "model": MODELS["OtherRefusal"]} for status, about in REFUSALS.items()}


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": MODELS["Refusal"], "description": "The request cannot be answered"},
    "5XX": {
        "model": MODELS["Refusal"],
        "description": "The server cannot answer now, or does not support this",
    },
}
