"""Inference requests and answers as the data plane takes and gives them, free of HTTP and gRPC."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ingot.errors import InvalidArgument
from ingot.runtime import InputKey
from ingot.server.recent import BoundedCache
from ingot.tensors import Array, DType, TensorSpec

Parameters = Mapping[str, Any]
# What templates that are remembered may hold at most of what their clients made up.
_MOST_NAMES = 64
_SCALARS = (str, int, float, type(None))
# How many forms of answers are remembered for one template; they differ in the shapes of the outputs.
_FORMS = 16
_NONE: Parameters = MappingProxyType({})


class Route:
    """Whose answers the requests of one template get: a model's name and version, and which of its outputs.

    ``answers`` is for the codec that made the template: what its answers of one form have in common.
    """

    __slots__ = ("answers", "name", "outputs", "version")

    def __init__(self, name: str, version: str, outputs: tuple[TensorSpec, ...]):
        self.name = name
        self.version = version
        self.outputs = outputs
        self.answers: BoundedCache[Any, Any] = BoundedCache(_FORMS)


class Template:
    """What requests have in common that differ in nothing but their tensors' values, their id and their deadline.

    A codec that has seen the like of a request before, byte for byte, uses that one's template again, and the data
    plane keeps in its ``route`` what it found out for the first. ``outputs`` empty means all; ``key`` is what
    :func:`ingot.runtime.key_of` gives for the inputs, where the codec knows it.
    """

    __slots__ = ("key", "model", "outputs", "parameters", "route", "version")

    def __init__(
        self,
        model: str,
        version: str = "",
        outputs: tuple[str, ...] = (),
        parameters: Parameters = _NONE,
        key: InputKey | None = None,
    ):
        self.model = model
        self.version = version
        self.outputs = outputs
        self.parameters = parameters
        self.key = key
        self.route: Route | None = None

    @property
    def light(self) -> bool:
        """Whether it may be remembered: a few bytes of JSON can make objects that take many times as much memory."""
        parameters, names = self.parameters, len(self.parameters) + len(self.outputs)
        return names <= _MOST_NAMES and all(isinstance(value, _SCALARS) for value in parameters.values())


@dataclass(slots=True, eq=False)
class InferRequest:
    """One inference request, decoded. ``left`` is in how many seconds its client gives up, if it says so."""

    template: Template
    inputs: Mapping[str, Array]
    id: str = ""
    left: float | None = None


@dataclass(slots=True, eq=False)
class InferResponse:
    """One answer; ``arrays`` may hold more outputs than its route has."""

    route: Route
    id: str
    arrays: Mapping[str, Array]

    @property
    def outputs(self) -> list[tuple[str, DType, Array]]:
        """The outputs in the order asked for, else in the model's."""
        return [(spec.name, spec.dtype, self.arrays[spec.name]) for spec in self.route.outputs]


def named(tensors: Iterable[tuple[str, Array]]) -> dict[str, Array]:
    """Return a request's tensors by name.

    Raises:
        InvalidArgument: two have the same name.
    """
    given = list(tensors)
    found = dict(given)
    if len(found) < len(given):
        [(twice, _)] = Counter(name for name, _ in given).most_common(1)
        raise InvalidArgument(f"input '{twice}' stands twice in the request")
    return found
