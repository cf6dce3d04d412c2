"""Samples as plain JSON of a model without declared steps: a class in Python, or a graph; for ``huggingface``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, InvalidField, quoted
from ingot.protocol import json_data
from ingot.protocol.requests import InferRequest, InferResponse, Template
from ingot.server.net import compression
from ingot.server.plane import decoupled
from ingot.server.plane.apis.asking import AT_ONCE
from ingot.server.plane.fields import Fields, check_count
from ingot.server.plane.handlers import Call, Events
from ingot.serving import ServedModel
from ingot.tensors import Array, DType, Signature

_MOST = 2048
"""Samples of a request, as many as models with steps accept by default."""


async def answer(call: Call, model: ServedModel) -> Any:
    """Return the outputs of a sample as an object by name, or a list of such objects for a list of samples.

    Args:
        call: ``inputs`` are a sample or a list of them. A sample is an object by the names of inputs, or the value of
            the only input. Inputs that ``parameters`` name have the same value in every sample. With ``stream``, there
            is one sample, and each of its answers is an event.
        model: the model. If its requests cannot be joined, a sample is the whole of each tensor.

    Raises:
        InvalidField: a field is wrong.
        InvalidArgument: a value does not fit its tensor, or an output is not text or numbers that JSON has.
        IngotError: as for :meth:`DataPlane.infer`.
    """
    fields = Fields(call.content)
    given, parameters = fields.any("inputs"), fields.any("parameters")
    stream = fields.flag("stream")
    fields.end()
    check_count("inputs", given, _MOST)
    signature = model.signature
    joined = all(spec.shape[:1] == (signature.batch,) for spec in (*signature.inputs, *signature.outputs))
    samples, listed = _samples(signature, given, _shared(signature, parameters), joined=joined)
    read = partial(_arrays, signature, samples, joined=joined)
    inputs = await compression.run(read, in_thread=not isinstance(given, str | bytes))
    request = InferRequest(Template(model.name, model.version), inputs, "", None, call.client)
    if stream:
        return Events(_stream(call, request, joined=joined))
    response = await call.plane.infer(request, "http")
    many = sum(array.size for array in response.arrays.values()) > AT_ONCE
    rows = await compression.run(partial(_rows, response, joined=joined), in_thread=many)
    return rows if listed else rows[0]


async def _stream(call: Call, request: InferRequest, *, joined: bool) -> AsyncGenerator[dict[str, Any]]:
    async with contextlib.aclosing(decoupled.answers(call.plane, request, "http")) as answers:
        async for response, _ in answers:
            for row in _rows(response, joined=joined):
                yield row


def _shared(signature: Signature, parameters: Any) -> dict[str, Any]:
    """Return the inputs that parameters name.

    Raises:
        InvalidField: they are not an object, or one is not an input.
    """
    if not isinstance(parameters, dict | None):
        raise InvalidField("parameters", f"is {quoted(parameters)}; it must be an object")
    _check_names(signature, parameters or {}, "parameters")
    return parameters or {}


def _samples(
    signature: Signature, given: Any, shared: Mapping[str, Any], *, joined: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the inputs of each sample, and whether they were in a list.

    Raises:
        InvalidField: they are not of the model's inputs.
    """
    specs = {spec.name: spec for spec in signature.inputs if spec.name not in shared}
    by_name = isinstance(given, dict) or (isinstance(given, list) and given and isinstance(given[0], dict))
    if not by_name and len(specs) != 1:
        raise InvalidField("inputs", f"must be an object with {', '.join(specs) or 'no fields'}, or a list of such")
    rank = 0 if by_name else len(next(iter(specs.values())).shape)
    listed = joined and isinstance(given, list) and (by_name or _depth(given) >= rank)
    values = given if listed else [given]
    if not values:
        raise InvalidField("inputs", "is an empty list; send one sample or more")
    found = [value if by_name else dict.fromkeys(specs, value) for value in values]
    for index, each in enumerate(found):
        place = f"inputs[{index}]" if listed else "inputs"
        if not isinstance(each, dict) or each.keys() != specs.keys():
            _check_names(signature, each if isinstance(each, dict) else {}, place)
            raise InvalidField(place, f"must be an object with {', '.join(specs)}")
    return [{**each, **shared} for each in found], listed


def _check_names(signature: Signature, content: Mapping[str, Any], place: str) -> None:
    names = [spec.name for spec in signature.inputs]
    for name in content:
        if name not in names:
            raise InvalidField(f"{place}.{name}", f"is not an input of the model, which has {', '.join(names)}")


def _depth(value: Any) -> int:
    depth = 0
    while isinstance(value, list):
        value, depth = (value[0] if value else None), depth + 1
    return depth


def _arrays(signature: Signature, samples: Sequence[Mapping[str, Any]], *, joined: bool) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for spec in signature.inputs:
        values = [sample[spec.name] for sample in samples]
        if spec.dtype is DType.BYTES and isinstance(values[0], bytes):  # the body of the request
            found[spec.name] = np.array(values, object).reshape([1] * len(spec.shape))
        else:
            found[spec.name] = json_data.from_json(spec.name, spec.dtype, values if joined else values[0])
    return found


def _rows(response: InferResponse, *, joined: bool) -> list[dict[str, Any]]:
    columns = {name: _values(name, dtype, np.asarray(array)) for name, dtype, array in response.outputs}
    if not joined:
        return [columns]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _values(name: str, dtype: DType, array: Array) -> Any:
    """Return nested lists of JSON's values.

    Raises:
        InvalidArgument: JSON has no form for one.
    """
    if dtype is DType.BYTES:
        try:
            return np.vectorize(lambda item: item if isinstance(item, str) else item.decode(), "O")(array).tolist()
        except UnicodeDecodeError as error:
            raise InvalidArgument(f"output '{name}' has bytes that are not UTF-8; ask /v2 for binary data") from error
    if dtype.is_float and not np.isfinite(array).all():
        raise InvalidArgument(f"output '{name}' has NaN or infinity, which JSON has not; ask /v2 for binary data")
    return (array.astype(np.float32) if dtype is DType.BF16 else array).tolist()
