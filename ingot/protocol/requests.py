"""Inference requests and responses as the data plane accepts and returns them, independent of HTTP and gRPC.

A codec recognizes a repeated request by the bytes around its tensors, and then looks it up instead of parsing it:
:class:`Memo` and :class:`Pattern`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from ingot.errors import InvalidArgument, quoted
from ingot.protocol import regions
from ingot.protocol.context import RequestContext
from ingot.protocol.keys import BoundedCache, InputKey, Step, key_of
from ingot.protocol.regions import Delivery
from ingot.tensors import Array, DType, TensorSpec

Parameters = Mapping[str, Any]

MAX_TENSORS = 1024
"""Most inputs or outputs of a request: more than any model has. A request with more is refused before it is parsed."""
MAX_PARAMETERS = 4 * MAX_TENSORS
"""Most parameters of a request and of its tensors together: a tensor in shared memory has three."""

# Most names in a template that is remembered: clients choose them.
_MAX_NAMES = 64
_SCALARS = (str, int, float, type(None))
# Response layouts remembered for one template; they differ in the shapes of the outputs.
_LAYOUTS = 16
_NONE: Parameters = MappingProxyType({})
_NOTHING: Mapping[str, Parameters] = MappingProxyType({})
_NO_DELIVERIES: Mapping[str, Delivery] = MappingProxyType({})
# The protocol does not define the range of priorities.
_MAX_PRIORITY = 1 << 31

# Values of a response that the event loop converts one by one, for up to 5 ms.
_AT_ONCE: Final = 1 << 15
# Bytes of its texts that the event loop converts, for as long.
_TEXT_AT_ONCE: Final = 1 << 20

# Bytes that Python's object of a short text takes in addition to the text.
_TEXT_OBJECT = 40

T = TypeVar("T")


def check_parameters(count: int) -> None:
    """Refuse a request with too many parameters before each is looked at.

    Raises:
        InvalidArgument: there are more than :data:`MAX_PARAMETERS`.
    """
    if count > MAX_PARAMETERS:
        raise InvalidArgument(f"the request has {count} parameters; at most {MAX_PARAMETERS} are accepted")


class Cancellable(Protocol):
    """Work that reports its outcome by a callback."""

    def cancel(self) -> None:
        """Drop the work; does nothing once it is done."""


class Route:
    """Where the requests of one template go: a model's name and version, and which of its outputs.

    ``texts`` is whether an output is BYTES. ``placed`` has the parameters of outputs whose values are in shared memory
    instead of the response. ``answers`` belongs to the codec that made the template: what its responses of one layout
    have in common.
    """

    __slots__ = ("answers", "name", "outputs", "placed", "texts", "version")

    def __init__(self, name: str, version: str, outputs: tuple[TensorSpec, ...]):
        self.name = name
        self.version = version
        self.outputs = outputs
        self.texts = any(spec.dtype is DType.BYTES for spec in outputs)
        self.placed: Mapping[str, Parameters] = _NOTHING
        self.answers: BoundedCache[Any, Any] = BoundedCache(_LAYOUTS)


class Template:
    """The common part of requests that differ only in the values of their tensors, their id and their deadline.

    A codec reuses the template of an earlier request with the same bytes, and the data plane keeps in ``route`` what it
    resolved for the first of them. Empty ``outputs`` means all; ``key`` is that of the inputs, if the codec knows it.
    ``deliveries`` is what is wanted of outputs other than their values, by name. ``repeated`` is set for the calls of
    one request with several answers.
    """

    __slots__ = ("deliveries", "key", "model", "outputs", "parameters", "repeated", "route", "version")

    def __init__(
        self,
        model: str,
        version: str = "",
        outputs: tuple[str, ...] = (),
        parameters: Parameters = _NONE,
        key: InputKey | None = None,
        deliveries: Mapping[str, Delivery] = _NO_DELIVERIES,
    ):
        self.model = model
        self.version = version
        self.outputs = outputs
        self.parameters = parameters
        self.key = key
        self.deliveries = regions.deliveries(parameters, deliveries) if regions.CLASSES in parameters else deliveries
        self.repeated = False
        self.route: Route | None = None

    @property
    def light(self) -> bool:
        """Whether it may be remembered: a few bytes of JSON can make objects that take many times as much memory."""
        parameters, names = self.parameters, len(self.parameters) + len(self.outputs)
        return (
            not self.deliveries
            and names <= _MAX_NAMES
            and all(isinstance(value, _SCALARS) for value in parameters.values())
        )


CLIENT: ContextVar[Hashable] = ContextVar("client", default=None)
"""The client whose call a coroutine answers, as in :class:`InferRequest`."""


class InferRequest:
    """One decoded inference request.

    ``left`` is the seconds until its client's deadline, if it has one. ``client`` is who sent it: the name of a key or
    certificate, or else a number of the connection. Clients share the engines. ``sticky`` is whom ``sticky_header``
    names instead, for the choice of a version and the share of the engines. ``context`` is the protocol's request.
    """

    __slots__ = ("client", "context", "id", "inputs", "left", "sticky", "template")

    def __init__(
        self,
        template: Template,
        inputs: Mapping[str, Array],
        identifier: str = "",
        left: float | None = None,
        client: Hashable = None,
    ):
        self.template = template
        self.inputs = inputs
        self.id = identifier
        self.left = left
        self.client = client
        self.sticky = ""
        self.context: RequestContext | None = None


class InferResponse:
    """One response; ``arrays`` may hold more outputs than its route has."""

    __slots__ = ("arrays", "id", "route")

    def __init__(self, route: Route, identifier: str, arrays: Mapping[str, Array]):
        self.route = route
        self.id = identifier
        self.arrays = arrays

    @property
    def outputs(self) -> list[tuple[str, DType, Array]]:
        """The outputs in the order requested, by default the model's."""
        return [(spec.name, spec.dtype, self.arrays[spec.name]) for spec in self.route.outputs]

    def is_slow(self, *, one_by_one: bool) -> bool:
        """Return whether a thread should encode the response: it has many values that are converted one by one.

        Elements of BYTES always are, and their texts may be large; other values if ``one_by_one``, as in JSON and in
        typed contents.
        """
        if not (one_by_one or self.route.texts):
            return False
        values = 0
        for array in self.arrays.values():  # not a comprehension, which is a call in Python 3.11
            values += array.size
        if values <= _AT_ONCE:
            return self.route.texts and sum(map(_text_of, self.arrays.values())) > _TEXT_AT_ONCE
        return one_by_one or any(array.dtype == object for array in self.arrays.values())


def _text_of(array: Array) -> int:
    return sum(map(len, array.flat)) if array.dtype == object else 0


def memory_of(array: Array) -> int:
    """Return about how many bytes an array takes, with the Python objects of a BYTES tensor but without their texts."""
    return array.nbytes + (_TEXT_OBJECT * array.size if array.dtype == object else 0)


def named(tensors: Iterable[tuple[str, Array]]) -> dict[str, Array]:
    """Return a request's tensors by name.

    Raises:
        InvalidArgument: two have the same name.
    """
    given = list(tensors)
    found = dict(given)
    if len(found) < len(given):
        [(twice, _)] = Counter(name for name, _ in given).most_common(1)
        raise InvalidArgument(f"input '{twice}' occurs twice in the request")
    return found


def time_limit_of(request: InferRequest) -> float | None:
    """Return the seconds that a request may take: its parameter, or what its caller has left, if that is less.

    Raises:
        InvalidArgument: the parameter is not valid.
    """
    timeout, left = timeout_of(request.template.parameters), request.left
    return left if timeout is None or (left is not None and left < timeout) else timeout


def timeout_of(parameters: Parameters) -> float | None:
    """Return a request's ``timeout`` parameter, which is in microseconds, in seconds; None if it has none.

    Raises:
        InvalidArgument: it is not a whole number of microseconds.
    """
    value = parameters.get("timeout")
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"parameter 'timeout' is {quoted(value)}; it must be a whole number of microseconds")
    return value / 1e6


def priority_of(parameters: Parameters) -> int:
    """Return a request's ``priority`` parameter as the scheduler expects it; 1 is the most urgent in the protocol.

    Raises:
        InvalidArgument: it is not a whole number in the protocol's range.
    """
    value = parameters.get("priority")
    if value is None or value == 0:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_PRIORITY:
        raise InvalidArgument(
            f"parameter 'priority' is {quoted(value)}; it must be a whole number, 1 for the most urgent"
        )
    return _MAX_PRIORITY - value


def step_of(parameters: Parameters) -> Step:
    """Return the step of a sequence that a request is.

    Raises:
        InvalidArgument: it does not name its sequence, or a parameter is wrong.
    """
    name = parameters.get("sequence_id")
    if isinstance(name, bool) or not isinstance(name, int | str | None):
        raise InvalidArgument(f"parameter 'sequence_id' is {quoted(name)}; it must be a whole number or a text")
    if not name:
        raise InvalidArgument(
            "the model keeps a state for each sequence: send the parameter 'sequence_id', a whole number other than 0 "
            "or a text, and 'sequence_start' with the first request"
        )
    start, end = (parameters.get(flag, False) for flag in ("sequence_start", "sequence_end"))
    for flag, value in (("sequence_start", start), ("sequence_end", end)):
        if not isinstance(value, bool):
            raise InvalidArgument(f"parameter '{flag}' is {quoted(value)}; it must be true or false")
    return Step.of(name, start, end)


@dataclass(frozen=True)
class Pattern:
    """A request without its id and the values of its raw tensors.

    Attributes:
        template: what the request asks for.
        tensors: name, shape, type and offset of each; a codec makes them views on the bytes, as ``np.ndarray``.
        size: where the last tensor ends.
    """

    template: Template
    tensors: tuple[tuple[str, tuple[int, ...], np.dtype[Any], int], ...]
    size: int

    @classmethod
    def of(cls, request: InferRequest, gaps: Iterable[int] = ()) -> Pattern | None:
        """Return a request's pattern, or None if its tensors must be checked each time or it is too large to keep.

        Args:
            request: with raw tensors, in their order.
            gaps: bytes before each tensor, behind the one before it; by default none.
        """
        arrays = request.inputs.values()
        # Text and truth values are checked each time.
        if not request.template.light or any(array.dtype.kind in "Ob" or not array.size for array in arrays):
            return None
        tensors, end = [], 0
        for (name, array), gap in zip(request.inputs.items(), itertools.chain(gaps, itertools.repeat(0)), strict=False):
            tensors.append((name, array.shape, array.dtype, end + gap))
            end += gap + array.nbytes
        request.template.key = key_of(request.inputs)
        return cls(request.template, tuple(tensors), end)


async def outcome_of(begin: Callable[[Callable[[T | Exception], None]], Cancellable | None]) -> T:
    """Return the outcome of work that reports it by a callback; cancel the work if this task is cancelled.

    Args:
        begin: starts the work, given the callback, and returns what can be cancelled; None if the work is done.

    Raises:
        Exception: the outcome, if it is one, or what ``begin`` raises.
    """
    outcome = await _outcome_of(begin)
    if not isinstance(outcome, Exception):
        return outcome
    try:
        raise outcome
    finally:
        del outcome  # its traceback has this frame: a cycle would keep the request's memory until it is collected


async def _outcome_of(begin: Callable[[Callable[[T | Exception], None]], Cancellable | None]) -> T | Exception:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    outcomes: list[T | Exception] = []  # not the future's result, which the callback and so the work would keep

    def done(outcome: T | Exception) -> None:
        if not future.done():  # otherwise the task was cancelled in this very tick
            outcomes.append(outcome)
            future.set_result(None)

    work = begin(done)
    try:
        await future
        return outcomes.pop()
    finally:
        if work is not None:
            work.cancel()
