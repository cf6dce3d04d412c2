"""Triton's generate extension: flat JSON for people, and a stream of answers as server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import orjson

from ingot.errors import InvalidArgument, ModelFailed, Unsupported, shortened
from ingot.protocol import json_codec, json_data, json_large
from ingot.protocol.requests import InferRequest, InferResponse, Template, check_parameters
from ingot.server.net import compression
from ingot.server.plane import decoupled
from ingot.server.plane.dataplane import DataPlane
from ingot.server.plane.texts import NAMES, text_decoder
from ingot.tensors import Array, TensorSpec


async def read(plane: DataPlane, model: str, version: str, body: bytes, client: Hashable) -> InferRequest:
    """Parse a request, in a thread if it is large; arguments and errors as for :func:`decode`."""
    return await compression.run(
        partial(decode, plane, model, version, body, client), in_thread=len(body) > json_large.AT_ONCE
    )


def decode(plane: DataPlane, model: str, version: str, body: bytes, client: Hashable) -> InferRequest:
    """Parse a request: an input by its name, ``id``, ``parameters``, and other keys as further parameters.

    A value with fewer dimensions than its input is one row, or one element: ``"n": 3`` for ``n:int64[batch,1]``.

    Raises:
        NotFound: no such model or version is served.
        InvalidArgument: the body is not a JSON object, or a value does not fit its input.
        TooLarge: it has too many values.
    """
    json_large.check(body)
    content = json_codec.decode_object(body)
    specs = {spec.name: spec for spec in _inputs(plane, model, version)}
    inputs = {name: _array(specs[name], value) for name, value in content.items() if name in specs}
    given, identifier = content.get("parameters", {}), content.get("id", "")
    if not isinstance(given, dict) or not isinstance(identifier, str):
        raise InvalidArgument("'parameters' must be an object, and 'id' a text")
    others = {name: value for name, value in content.items() if name not in specs and name not in ("parameters", "id")}
    parameters = {**given, **others}
    check_parameters(len(parameters))
    for name, value in parameters.items():
        if not isinstance(value, str | int | float | bool):
            raise InvalidArgument(
                f"'{shortened(name)}' is not an input of model '{model}', nor a parameter: a text or a number"
            )
    return InferRequest(Template(model, version, (), parameters), inputs, identifier, None, client)


async def answer(plane: DataPlane, request: InferRequest) -> bytes:
    """Return the one answer as JSON.

    Raises:
        Unsupported: the model answers several times.
        IngotError: as for :meth:`DataPlane.infer`.
    """
    template = request.template
    model = plane.repository.get(template.model, template.version)
    if not model.decoupled:
        return await _encoded(await plane.infer(request, "http"))
    if template.parameters.get("max_steps") != 1:
        raise Unsupported(f"model '{template.model}' answers a request several times; ask .../generate_stream")
    async with contextlib.aclosing(decoupled.answers(plane, request, "http")) as answers:
        async for response, _ in answers:
            return await _encoded(response)
    raise ModelFailed(f"model '{template.model}' has no answer to this request")


async def events(plane: DataPlane, request: InferRequest) -> AsyncGenerator[orjson.Fragment]:
    """Yield each answer as JSON; errors as for :func:`answer`."""
    async with contextlib.aclosing(decoupled.answers(plane, request, "http")) as answers:
        async for response, _ in answers:
            yield orjson.Fragment(await _encoded(response))


def _inputs(plane: DataPlane, model: str, version: str) -> Sequence[TensorSpec]:
    """Return the inputs of a model; a prompt may have Triton's name."""
    found = plane.signature(model, version).inputs
    texts = text_decoder(plane.repository.get(model, version), [spec.name for spec in found]) is not None
    return [replace(found[0], name=name) for name in NAMES] if texts else found


def _array(spec: TensorSpec, value: object) -> Array:
    array = json_data.from_json(spec.name, spec.dtype, value)
    missing = len(spec.shape) - array.ndim
    return array.reshape((1,) * missing + array.shape) if missing > 0 else array


async def _encoded(response: InferResponse) -> bytes:
    return await compression.run(partial(_encode, response), in_thread=response.is_slow(one_by_one=True))


def _encode(response: InferResponse) -> bytes:
    route = response.route
    content: dict[str, Any] = {"id": response.id} if response.id else {}
    content |= {"model_name": route.name, "model_version": route.version}
    for name, dtype, array in response.outputs:
        text = json_data.to_json(name, dtype, np.asarray(array))
        content[name] = orjson.Fragment(text[1:-1] if array.size == 1 else text)
    return orjson.dumps(content)
