"""What both protocols call: the server's whole behaviour, free of HTTP and gRPC."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import ingot
from ingot.errors import Code, IngotError, InternalError, InvalidArgument, Unsupported
from ingot.runtime import Catalog, Key, Metrics, Servable
from ingot.runtime.entry import Outcome
from ingot.runtime.statistics import Statistics
from ingot.runtime.tally import Count
from ingot.server.recorder import Recorder
from ingot.tensors import Array, DType, Signature, TensorSpec

log = logging.getLogger(__name__)

# More inputs or outputs than any model has; a request is refused before time is spent on each of millions.
MAX_TENSORS = 1024

EXTENSIONS = ("binary_tensor_data", "model_configuration", "schedule_policy", "statistics")

Parameters = Mapping[str, Any]
_NONE = (None, 0)
_UNSUPPORTED = {
    "shared_memory_region": "shared memory",
    "classification": "the classification extension",
}


class InferRequest(NamedTuple):
    """One inference request, decoded. ``outputs`` empty means all.

    ``key`` is what :func:`ingot.runtime.key_of` gives for the inputs, where a codec knows it from an earlier request.
    """

    model: str
    inputs: tuple[tuple[str, Array], ...]
    version: str = ""
    id: str = ""
    outputs: tuple[str, ...] = ()
    parameters: Parameters = MappingProxyType({})
    key: Key | None = None


class InferResponse(NamedTuple):
    """One answer; ``outputs`` are in the order asked for, else in the model's."""

    model: str
    version: str
    id: str
    outputs: tuple[tuple[str, DType, Array], ...]


@dataclass(frozen=True)
class ModelMetadata:
    """What the metadata endpoints tell of a model."""

    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    properties: Mapping[str, str]


Reply = Callable[[InferResponse | IngotError], None]


class DataPlane:
    """Health, metadata and inference over a catalog of models; ``recorder``, if there is one, keeps some of it."""

    def __init__(self, repository: Catalog[Servable]):
        self.repository = repository
        self.recorder: Recorder | None = None
        self.metrics = repository.metrics
        self.draining = False
        self._tallies: dict[tuple[Servable, str], _Tally] = {}

    @property
    def ready(self) -> bool:
        """Whether every model answers and the server takes new requests."""
        return not self.draining and self.repository.ready

    def server_metadata(self) -> dict[str, Any]:
        """Return the server's name, version and the protocol extensions that work."""
        return {"name": "ingot", "version": ingot.__version__, "extensions": list(EXTENSIONS)}

    def model_ready(self, name: str, version: str = "") -> bool:
        """Tell whether a model answers.

        Raises:
            NotFound: no such model or version is served.
        """
        return self.repository.get(name, version).ready and not self.draining

    def signature(self, name: str, version: str = "") -> Signature:
        """Return what a model takes and gives.

        Raises:
            NotFound: no such model or version is served.
            Unavailable: it is still loading.
        """
        return self.repository.get(name, version).signature

    def count_error(self, protocol: str, error: IngotError) -> None:
        """Count an answer that is an error, and log it if it is our fault; both protocols call this for every one."""
        self.metrics.errors.labels(protocol, error.code.value).inc()
        if error.code is Code.INTERNAL:
            log.error("%s: %s", protocol, error)

    def model_metadata(self, name: str, version: str = "") -> ModelMetadata:
        """Describe a model.

        Raises:
            NotFound: no such model or version is served.
            Unavailable: it is still loading.
        """
        model = self.repository.get(name, version)
        versions = (model.version,) if version else tuple(self.repository.versions(name))
        signature = model.signature
        return ModelMetadata(name, versions, model.platform, signature.inputs, signature.outputs, model.properties)

    async def render_metrics(self) -> bytes:
        """Return all that is counted, in Prometheus' text form."""
        return self.metrics.render()

    async def statistics(self, name: str = "", version: str = "") -> list[tuple[Servable, Statistics]]:
        """Return what models have done, without a name all, without a version all of the name.

        Raises:
            NotFound: no such model or version is served.
        """
        if name:
            versions = [version] if version else self.repository.versions(name) or [""]
            models = [self.repository.get(name, item) for item in versions]
        else:
            models = list(self.repository)
        return [(model, await model.ask_statistics()) for model in models]

    async def infer(self, request: InferRequest, protocol: str) -> InferResponse:
        """Answer one request; :meth:`submit` as a coroutine.

        Raises:
            IngotError: any of the kinds that :meth:`ingot.runtime.Model.submit` names, or NotFound.
        """
        future: asyncio.Future[InferResponse] = asyncio.get_running_loop().create_future()

        def reply(outcome: InferResponse | IngotError) -> None:
            if future.done():  # its client left in this very tick
                return
            if isinstance(outcome, IngotError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        ticket = self.submit(request, protocol, reply)
        try:
            return await future
        finally:
            ticket.cancel()  # which does nothing unless its client left

    def submit(self, request: InferRequest, protocol: str, reply: Reply) -> Ticket:
        """Take a request in, and return at once. All that a client of this process asks comes through here.

        What front processes took in came through theirs; their desks put it to the models.

        Args:
            request: the decoded request.
            protocol: ``http`` or ``grpc``, for the metrics.
            reply: called once, in a later tick of the event loop, with the response or the error.

        Returns:
            The request, which can be cancelled while it is not answered.

        Raises:
            IngotError: it is refused at once: NotFound, InvalidArgument, Unavailable.
        """
        began = time.perf_counter()
        model = self.repository.get(request.model, request.version)
        tally = self._tallies.get((model, protocol))
        if tally is None:
            tally = self._tallies[model, protocol] = _Tally(self.metrics, model, protocol)
        ticket = Ticket(self, model, request, tally, began, reply)
        try:
            ticket.start()
        except IngotError as error:
            tally.count(error.code.value, began)
            raise
        except Exception as error:
            log.exception("a request to model %s failed", request.model)
            tally.count("internal", began)
            raise wrapped(error) from error
        return ticket


class Ticket:
    """A request that was taken in, on its way to the model and back."""

    __slots__ = ("_began", "_inputs", "_model", "_pending", "_plane", "_reply", "_request", "_tally", "_wanted")

    def __init__(
        self, plane: DataPlane, model: Servable, request: InferRequest, tally: _Tally, began: float, reply: Reply
    ):
        self._plane = plane
        self._model = model
        self._request = request
        self._tally = tally
        self._began = began
        self._reply = reply

    def start(self) -> None:
        request = self._request
        self._inputs = dict(request.inputs)
        if len(self._inputs) < len(request.inputs):
            [(twice, _)] = Counter(name for name, _ in request.inputs).most_common(1)
            raise InvalidArgument(f"input '{twice}' stands twice in the request")
        self._wanted = _wanted(self._model, request)
        timeout, priority = (
            (_timeout(request.parameters), _priority(request.parameters)) if request.parameters else _NONE
        )
        self._pending = self._model.submit(self._inputs, self._settle, timeout, priority, request.key)

    def cancel(self) -> None:
        """Forget the request, as its client left; does nothing once it is answered."""
        if not self._pending.done:
            self._pending.cancel()
            self._tally.count("cancelled", self._began)

    def _settle(self, outcome: Outcome) -> None:
        if isinstance(outcome, IngotError):
            self._tally.count(outcome.code.value, self._began)
            self._reply(outcome)
            return
        model, request = self._model, self._request
        try:
            if self._plane.recorder is not None:
                self._plane.recorder.offer(model.name, model.version, self._inputs, outcome)
            outputs = tuple((spec.name, spec.dtype, outcome[spec.name]) for spec in self._wanted)
        except Exception as error:  # the other requests of the batch wait behind this one
            log.exception("an answer of model %s could not be taken", model.name)
            self._tally.count("internal", self._began)
            self._reply(wrapped(error))
            return
        self._tally.count("ok", self._began)
        self._reply(InferResponse(model.name, model.version, request.id, outputs))


def wrapped(error: Exception) -> InternalError:
    """Return what a client is told of an error that is ours."""
    return InternalError(f"{type(error).__name__}: {error}")


class _Tally:
    """What one model's requests over one protocol are counted in."""

    def __init__(self, metrics: Metrics, model: Servable, protocol: str):
        labels = (model.name, model.version, protocol)
        self._seconds = metrics.request_seconds.labels(*labels)
        self._labelled = functools.partial(metrics.requests.labels, *labels)
        self._codes: dict[str, Count] = {}

    def count(self, code: str, began: float) -> None:
        count = self._codes.get(code)
        if count is None:
            count = self._codes[code] = self._labelled(code)
        count.value += 1
        self._seconds.observe(time.perf_counter() - began)


def _wanted(model: Servable, request: InferRequest) -> tuple[TensorSpec, ...]:
    """Return the outputs that a request asks for."""
    if not request.outputs:
        return model.signature.outputs
    specs = {spec.name: spec for spec in model.signature.outputs}
    for name in request.outputs:
        if name not in specs:
            raise InvalidArgument(f"unknown output '{name}'; the model gives {', '.join(specs)}")
    if len(set(request.outputs)) < len(request.outputs):
        raise InvalidArgument("an output is asked for twice")
    return tuple(specs[name] for name in request.outputs)


def check_parameters(where: str, parameters: Parameters) -> None:
    """Refuse a tensor's parameters that would change the answer and are not supported; others may be ignored.

    Raises:
        Unsupported: names the extension.
    """
    for name, extension in _UNSUPPORTED.items():
        if name in parameters:
            raise Unsupported(f"{where} asks for {extension}, which this server does not have")


def _timeout(parameters: Parameters) -> float | None:
    """Return the request's ``timeout`` parameter, which is in microseconds, in seconds."""
    value = parameters.get("timeout")
    if value is None or value == 0:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"parameter 'timeout' is {value!r}; it must be a whole number of microseconds")
    return value / 1e6


# Far more than anybody has classes of requests; the protocol's lowest and highest are not stated.
_MAX_PRIORITY = 1 << 31


def _priority(parameters: Parameters) -> int:
    """Return the request's ``priority`` parameter as the scheduler takes it; the protocol's 1 is the most urgent."""
    value = parameters.get("priority")
    if value is None or value == 0:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_PRIORITY:
        raise InvalidArgument(f"parameter 'priority' is {value!r}; it must be a whole number, 1 for the most urgent")
    return _MAX_PRIORITY - value
