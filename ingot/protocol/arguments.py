"""Arguments of :class:`ingot.Client`, checked before they are sent, so that both protocols refuse the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ingot.errors import InvalidArgument, quoted
from ingot.protocol.requests import InferRequest, Template
from ingot.tensors import Array, DType, dlpack

Tensors = Callable[[str, Any], Any]
"""Returns a tensor of another library, by the name of the input, as an array, or as one in a GPU's memory."""


def request(
    model: object,
    inputs: object,
    version: object,
    outputs: object,
    parameters: object,
    tensors: Tensors = dlpack.to_array,
) -> InferRequest:
    """Return a request; the arguments are those of :meth:`ingot.Client.infer`.

    ``tensors`` converts inputs of other libraries than numpy.

    Raises:
        InvalidArgument: one of them has a wrong type; the message names it.
    """
    if not isinstance(inputs, Mapping):
        raise InvalidArgument(f"inputs is {_kind(inputs)}; give the arrays by the names of the inputs: {{'x': array}}")
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
        raise InvalidArgument(f"outputs is {_kind(outputs)}; give a list of the outputs' names: outputs=['y']")
    if not isinstance(parameters, Mapping | None):
        raise InvalidArgument(f"parameters is {_kind(parameters)}; give values by name: {{'timeout': 50_000}}")
    names = tuple(text("an output's name", output) for output in outputs)
    template = Template(text("model", model), version_text(version), names, _parameters(parameters or {}))
    arrays = {text("an input's name", name): _array(name, inputs[name], tensors) for name in inputs}
    return InferRequest(template, arrays)


def repeatable(request: InferRequest) -> bool:
    """Return whether a request may be sent twice; a step of a sequence may not."""
    return "sequence_id" not in request.template.parameters


def text(what: str, value: object) -> str:
    """Return a value that must be text.

    Raises:
        InvalidArgument: it is not text, or has a lone surrogate, which neither protocol can carry.
    """
    if not isinstance(value, str):
        raise InvalidArgument(f"{what} is {_kind(value)}; it must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is {value!r}, which is not UTF-8: {error.reason}") from error
    return value


def mebibytes(what: str, value: object) -> int:
    """Return a number of MiB in bytes.

    Raises:
        InvalidArgument: it is not a whole number of at least 1.
    """
    if type(value) is not int or value < 1:
        raise InvalidArgument(f"{what} is {_kind(value)}; it must be a whole number of MiB, at least 1")
    return value << 20


def datatype(name: str, text: str) -> DType:
    """Return the datatype of an input, as a server's metadata names it.

    Raises:
        InvalidArgument: Ingot does not have it.
    """
    try:
        return DType(text)
    except ValueError:
        known = ", ".join(dtype.value for dtype in DType)
        raise InvalidArgument(f"the server says that input '{name}' is {text[:40]!r}; known: {known}") from None


def version_text(value: object) -> str:
    """Return a model's version as text; it may be a number.

    Raises:
        InvalidArgument: it is neither text nor a number.
    """
    return str(value) if type(value) is int else text("version", value)


def _parameters(parameters: Mapping[Any, Any]) -> dict[str, Any]:
    return {text("a parameter's name", name): _parameter(name, parameters[name]) for name in parameters}


def _parameter(name: str, value: object) -> bool | int | float | str:
    """Return a parameter's value, if both JSON and gRPC's messages can carry it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return str.__str__(text(f"parameter '{name}'", value))  # the value of an Enum's member
    if not isinstance(value, bool | int | float):
        raise InvalidArgument(
            f"parameter '{name}' is {_kind(value)}; it must be true or false, a number or text. "
            "Leave out those that are not to be sent"
        )
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidArgument(f"parameter '{name}' is {value}, which JSON cannot carry")
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise InvalidArgument(f"parameter '{name}' is a whole number that does not fit into 64 bits")
    return next(kind(value) for kind in (bool, int, float) if isinstance(value, kind))


def _array(name: str, value: object, tensors: Tensors) -> Array:
    if dlpack.exports(value):
        found: Array = tensors(name, value)
        return found
    try:
        array = np.asarray(value)
    except Exception as error:  # the caller's object converts itself, and may raise anything
        raise InvalidArgument(f"input '{name}' cannot be made an array: {error}") from error
    try:
        dtype = DType.of(array)
    except InvalidArgument as error:
        raise InvalidArgument(f"input '{name}': {error}") from None
    if dtype is DType.BYTES and (odd := [item for item in array.flat if not isinstance(item, str | bytes)]):
        raise InvalidArgument(f"input '{name}' holds {_kind(odd[0])}; arrays are of numbers, flags, text or bytes")
    return array


def _kind(value: object) -> str:
    """Return a description of a value for messages, with the value itself if it is short."""
    if value is None:
        return "None"
    shown, kind = quoted(value), type(value).__name__
    return f"{shown} ({kind})" if len(shown) <= 40 and "\n" not in shown else f"of type {kind}"
