"""OpenAI's ``/v1/embeddings`` and ``/v1/models``."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ingot.errors import Code, IngotError, InvalidField, public_text
from ingot.protocol.json_codec import STATUS
from ingot.server.plane.apis import asking
from ingot.server.plane.fields import Fields, place_of
from ingot.server.plane.handlers import Call
from ingot.tensors import Array

_TYPES = {
    Code.NOT_FOUND: "not_found_error",
    Code.UNAUTHENTICATED: "authentication_error",
    Code.PERMISSION_DENIED: "permission_error",
    Code.TOO_MANY_REQUESTS: "rate_limit_error",
    Code.UNSUPPORTED: "invalid_request_error",
}


async def embeddings(call: Call) -> dict[str, Any]:
    """Return an embedding for each text.

    Raises:
        InvalidField: a field is wrong; token ids are, as the client's tokenizer is not the model's.
        IngotError: as for :meth:`DataPlane.infer`.
    """
    fields = Fields(call.content)
    name = fields.text("model")
    given = fields.any("input")
    form = fields.text("encoding_format", "float", ("float", "base64"))
    size = fields.count("dimensions")
    prompt = fields.text("prompt_name", "")
    fields.any("user")  # for OpenAI's own records
    fields.end()
    served = asking.find(call.plane, name, asking.EMBEDDING)
    texts = _texts(given, served.steps.max_items)
    place = place_of(call.content, "input")
    vectors, answer = await asking.embed(call, served, texts, prompt=prompt, size=size, place=place)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, form)}
        for index, vector in enumerate(vectors.astype(np.float32, copy=False))
    ]
    usage = {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens}
    return {"object": "list", "data": data, "model": name, "usage": usage}


async def models(call: Call) -> dict[str, Any]:
    """List the models."""
    names = dict.fromkeys(model.name for model in call.plane.repository)
    return {"object": "list", "data": [_model(name) for name in names]}


async def model(call: Call) -> dict[str, Any]:
    """Return a model.

    Raises:
        NotFound: it is not served.
    """
    name, _, version = call.model.partition(":")
    call.plane.repository.get(name, version)
    return _model(call.model)


def refusal(error: IngotError) -> tuple[int, dict[str, Any]]:
    """Return the status and the body of an error."""
    status = STATUS[error.code]
    kind = _TYPES.get(error.code, "invalid_request_error" if status < 500 else "server_error")
    field = error.field if isinstance(error, InvalidField) else None
    return status, {"error": {"message": public_text(error), "type": kind, "param": field, "code": error.code.value}}


def _model(name: str) -> dict[str, Any]:
    # When a model was made is not known here; clients only need the number to be there.
    return {"id": name, "object": "model", "created": 0, "owned_by": "ingot"}


def _texts(given: Any, most: int) -> list[str]:
    first = given[0] if isinstance(given, list) and given else None
    first = first[0] if isinstance(first, list) and first else first
    if isinstance(first, int) and not isinstance(first, bool):
        raise InvalidField(
            "input",
            "has token ids, which the client made with another tokenizer than the model's; send texts. "
            "In LangChain, set OpenAIEmbeddings(check_embedding_ctx_length=False)",
        )
    texts = Fields({"input": given}).texts("input", most)
    if "" in texts:
        raise InvalidField("input", f"has an empty text at index {texts.index('')}")
    return texts


def _encoded(vector: Array, form: str) -> Any:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode() if form == "base64" else vector
