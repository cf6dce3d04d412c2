"""The server's behaviour, independent of HTTP and gRPC; both protocols call it."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from ingot.errors import Code, IngotError, InvalidArgument, Unsupported
from ingot.faults import attempt, public_error, rate_limited_logger
from ingot.model_store import Golden
from ingot.protocol.context import CONTEXT
from ingot.protocol.regions import OFF, Reader
from ingot.protocol.requests import (
    Cancellable,
    InferRequest,
    InferResponse,
    Route,
    Template,
    outcome_of,
    priority_of,
    step_of,
    timeout_of,
)
from ingot.runtime import Model, Submitted
from ingot.runtime.dispatch.statistics import Statistics
from ingot.runtime.gpu.array import DeviceArray, Direct, TargetedInputs, reachable
from ingot.runtime.machine import devices
from ingot.runtime.scheduling.entry import Outcome, Request
from ingot.server.net import compression
from ingot.server.observation.observer import Observer
from ingot.server.plane.counters import Counters
from ingot.server.plane.recorder import Recorder
from ingot.server.plane.texts import TextTicket, check_parameters, listed_signature, text_decoder
from ingot.server.triton.logs import LogSettings
from ingot.server.triton.outputs import AT_ONCE, Deliveries
from ingot.server.triton.shared_memory import SharedMemory
from ingot.serving import Catalog, ServedModel
from ingot.serving.pipelines.run import Run
from ingot.tensors import Array, Signature, TensorSpec

_PROTOCOLS = ("http", "grpc")
_NAME = 100
_INTERNAL: Final = Code.INTERNAL
_clock: Final = time.perf_counter

log = rate_limited_logger(__name__)


Reply = Callable[[InferResponse | IngotError], None]


class DataPlane:
    """Health, metadata and inference over a catalog of models; ``recorder``, if set, keeps some requests.

    Args:
        repository: the models.
        memory: the regions of memory that clients share with this process; None to refuse them.
        logs: what is logged; by default clients cannot change it.
    """

    def __init__(
        self,
        repository: Catalog,
        memory: SharedMemory | None = None,
        logs: LogSettings | None = None,
    ):
        self.repository = repository
        self.logs = logs or LogSettings()
        self._memory = memory
        self.reader: Reader | None = None if memory is None else memory.reader
        self.recorder: Recorder | None = None
        self.observer: Observer | None = None
        self.metrics = repository.metrics
        self.draining = False
        self.sticky_header = ""
        self._counters: dict[tuple[ServedModel, str], Counters] = {}
        self.encoding_http, self.encoding_grpc = [self.metrics.encode_seconds.labels(each) for each in _PROTOCOLS]

    @property
    def ready(self) -> bool:
        """Whether every model is ready and the server accepts new requests."""
        return not self.draining and self.repository.ready

    @property
    def shares_cuda(self) -> bool:
        """Whether clients may register memory of GPUs."""
        return self._memory is not None and devices.has_cuda()

    @property
    def memory(self) -> SharedMemory:
        """The regions of memory that clients share with this process.

        Raises:
            Unsupported: there are none.
        """
        if self._memory is None:
            raise Unsupported(OFF)
        return self._memory

    def model_ready(self, name: str, version: str = "") -> bool:
        """Return whether a model is ready.

        Raises:
            NotFound: no such model or version is served.
        """
        return self.repository.get(name, version).ready and not self.draining

    def signature(self, name: str, version: str = "") -> Signature:
        """Return a model's inputs and outputs as its metadata lists them; those of a model that writes text are texts.

        Raises:
            NotFound: no such model or version is served.
            Unavailable: it is still loading.
        """
        return listed_signature(self.repository.get(name, version))

    def count_error(self, protocol: str, error: IngotError) -> None:
        """Count an error response, and log it if it is internal; both protocols call this for every error."""
        self.metrics.errors.labels(protocol, error.code).value += 1
        if error.code is _INTERNAL:
            log.error("%s: %s", protocol, error)

    def record(
        self, route: ModelRoute, inputs: Mapping[str, Array], outputs: Mapping[str, Array], pending: Submitted
    ) -> None:
        """Offer a request and its response to the recorder; see :meth:`keep`."""
        between = (pending.between if isinstance(pending, Run) else None) or {}
        case = Golden({}, between, {**inputs}, {**outputs}) if route.raw else Golden({**inputs}, {**outputs})
        self.keep(route.name, route.version, case)

    def keep(self, model: str, version: str, case: Golden) -> None:
        """Offer a case to the recorder, if there is one; its failure affects no client."""
        if self.recorder is not None:
            attempt(f"a response of model {model} could not be recorded", self.recorder.offer, model, version, case)

    def statistics(self, name: str = "", version: str = "") -> list[tuple[ServedModel, Statistics]]:
        """Return the statistics of models: of all without a name, of all versions without a version.

        Raises:
            NotFound: no such model or version is served.
        """
        if name:
            versions = [version] if version else self.repository.versions(name) or [""]
            models = [self.repository.get(name, item) for item in versions]
        else:
            models = list(self.repository)
        return [(model, model.statistics()) for model in models]

    def forget(self, model: ServedModel) -> None:
        """Drop what is kept for a model that answers no longer; its counts stay."""
        for protocol in (*_PROTOCOLS, "python"):
            self._counters.pop((model, protocol), None)

    async def infer(self, request: InferRequest, protocol: str) -> InferResponse:
        """Answer one request; :meth:`submit` as a coroutine.

        Raises:
            IngotError: as for :meth:`submit`, or what the model's engine raised.
        """
        return await outcome_of(functools.partial(self.submit, request, protocol))

    def submit(self, request: InferRequest, protocol: str, reply: Reply) -> Cancellable:
        """Submit a request, and return at once. All requests with one answer go through here.

        Generated texts and answers in parts are requests to the model itself: ``decoupled.py``, ``completion.py``.

        Args:
            request: the decoded request.
            protocol: ``http``, ``grpc`` or ``python``, for the metrics.
            reply: called once, in a later tick of the event loop, with the response or the error.

        Returns:
            The request, which can be cancelled while it is not answered.

        Raises:
            IngotError: the request is refused at once: NotFound, InvalidArgument, Unavailable, DeadlineExceeded.
        """
        began = _clock()
        if self.observer is not None:
            note(request, began)
        template = request.template
        model = self.repository.get(template.model, template.version)
        counters = self.counters(model, protocol)
        try:
            route = template.route
            if not isinstance(route, ModelRoute) or route.model is not model:
                writes = isinstance(model, Model) and model.generation is not None
                if writes and (decoder := text_decoder(model, request.inputs)) is not None:
                    return TextTicket(decoder, request, counters, reply)
                route = template.route = self._route(model, request)
            timeout = route.timeout
            if request.left is not None and (timeout is None or request.left < timeout):
                timeout = request.left
            ticket = route.ticket(self, request, counters, began, reply)
            if route.raw:
                CONTEXT.set(request.context)  # notes the times of its steps
            inputs, client = request.inputs, request.client
            if route.step is None:
                client = request.sticky or client
                part = Request(inputs, ticket.settle, timeout, route.priority, route.key, client)
                pending = model.acceptor.accepting.submit(part)
            else:
                step = route.step.owned_by(client)
                pending = model.submit_step(step, Request(inputs, ticket.settle, timeout, route.priority, None, client))
            ticket.pending = pending
            if self.recorder is not None and isinstance(pending, Run):
                pending.between = {}
        except IngotError as error:
            counters.count(error.code, began)
            raise
        except Exception as error:  # the boundary of one request: Ingot's own faults are counted too
            counters.count("internal", began)
            raise public_error(error, f"a request to model {template.model} failed") from error
        return ticket

    def counters(self, model: ServedModel, protocol: str) -> Counters:
        """Return the counters of a model's requests over one protocol."""
        found = self._counters.get((model, protocol))
        if found is None:
            found = self._counters[model, protocol] = Counters(self.metrics, model, protocol, self.keep)
        return found

    def observe(self, observer: Observer | None) -> None:
        """Report requests to an observer from now on."""
        self.observer = observer

    def _route(self, model: ServedModel, request: InferRequest) -> ModelRoute:
        template = request.template
        on_device = any(isinstance(array, DeviceArray) for array in request.inputs.values())
        if not on_device and not template.deliveries:
            return ModelRoute(model, template, request.inputs)
        # Templates with either are not remembered, so all of this concerns this request.
        direct = model.direct if self.recorder is None else Direct()
        if on_device:
            request.inputs = reachable(request.inputs, direct.inputs)
        if not template.deliveries:
            return ModelRoute(model, template, request.inputs)
        route = _DeliveryRoute(model, template, request, self._memory)
        # The calls of a request with several answers have one route.
        if not template.repeated and (targets := route.deliveries.targets(direct.outputs)):
            request.inputs = TargetedInputs(request.inputs, targets)
        return route


class ModelRoute(Route):
    """The model and the outputs that the data plane has resolved for the requests of one template.

    Raises:
        InvalidArgument: an output does not exist, or a parameter is wrong.
        Unavailable: the model is still loading.
        Unsupported: the model answers several times.
    """

    __slots__ = ("key", "model", "priority", "raw", "step", "timeout")

    def __init__(self, model: ServedModel, template: Template, inputs: Iterable[str]):
        steps = model.steps_for(inputs)
        known = model.signature.outputs if steps is None else steps.outputs
        super().__init__(model.name, model.version, _wanted(known, template.outputs))
        self.raw = steps is not None
        if model.decoupled and not template.repeated:
            raise Unsupported(
                f"model '{model.name}' has a decoupled transaction policy: it answers a request several times. Send it "
                "by ModelStreamInfer over gRPC, to .../generate_stream, or with 'stream': true to /models/..."
            )
        if isinstance(model, Model) and model.generation is not None:
            check_parameters(template.parameters)
        self.model = model
        self.timeout = timeout_of(template.parameters)
        self.priority = priority_of(template.parameters)
        self.key = template.key
        self.step = step_of(template.parameters) if model.sequential else None

    def ticket(self, plane: DataPlane, request: InferRequest, counters: Counters, began: float, reply: Reply) -> Ticket:
        """Return a request of this route, before it is submitted to the model."""
        return Ticket(plane, request, self, counters, began, reply)


class Ticket:
    """A submitted request; ``pending`` is the model's part of it."""

    __slots__ = ("_began", "_counters", "_plane", "_reply", "_request", "_route", "pending")

    pending: Submitted
    _route: ModelRoute

    def __init__(
        self,
        plane: DataPlane,
        request: InferRequest,
        route: ModelRoute,
        counters: Counters,
        began: float,
        reply: Reply,
    ):
        self._plane = plane
        self._request = request
        self._route = route
        self._counters = counters
        self._began = began
        self._reply = reply

    def cancel(self) -> None:
        """Drop the request, as its client left; does nothing once it is answered."""
        if not self.pending.done:
            self.pending.cancel()
            self._counters.count("cancelled", self._began)

    def settle(self, outcome: Outcome) -> None:
        """Pass on the model's outcome."""
        route, request = self._route, self._request
        if isinstance(outcome, IngotError):
            CONTEXT.set(request.context)  # an answer logs nothing, or sets this itself
            self._counters.count(outcome.code, self._began)
            self._observe(failed=True)
            self._reply(outcome)
            return
        if self._plane.recorder is not None:
            CONTEXT.set(request.context)
            self._plane.record(route, request.inputs, outcome, self.pending)
        self._counters.succeeded(self._began)
        if self._plane.observer is not None:
            self._observe()
        self._reply(InferResponse(route, request.id, outcome))

    def _observe(self, *, failed: bool = False) -> None:
        """Note the answer, if the request is observed."""
        context, route = self._request.context, self._route
        if context is not None and context.observer is not None:
            context.model, context.version = route.name, route.version
            context.observer.answered(context, route.model.last_batch, failed=failed)


class _DeliveryRoute(ModelRoute):
    """The route of one request whose outputs are returned as classes or in shared memory."""

    __slots__ = ("deliveries",)

    def __init__(self, model: ServedModel, template: Template, request: InferRequest, memory: SharedMemory | None):
        super().__init__(model, template, request.inputs)
        batch, client = model.signature.batch, request.client
        found = Deliveries(template.deliveries, self.outputs, batch, memory, client, model.labels)
        self.deliveries, self.outputs, self.placed = found, found.outputs, found.placed
        self.texts = True

    def ticket(self, plane: DataPlane, request: InferRequest, counters: Counters, began: float, reply: Reply) -> Ticket:
        return _DeliveryTicket(plane, request, self, counters, began, reply)


class _DeliveryTicket(Ticket):
    """A submitted request whose outputs are delivered in another way, in a thread if that takes long."""

    __slots__ = ("_deliveries", "_left")

    def __init__(
        self,
        plane: DataPlane,
        request: InferRequest,
        route: _DeliveryRoute,
        counters: Counters,
        began: float,
        reply: Reply,
    ):
        super().__init__(plane, request, route, counters, began, reply)
        self._deliveries = route.deliveries
        self._left = False

    def cancel(self) -> None:
        self._left = True
        super().cancel()

    def settle(self, outcome: Outcome) -> None:
        if isinstance(outcome, IngotError):
            super().settle(outcome)
            return
        route, request, deliveries = self._route, self._request, self._deliveries
        CONTEXT.set(request.context)
        if self._plane.recorder is not None:
            self._plane.record(route, request.inputs, outcome, self.pending)
        failure = f"outputs of model {route.name} could not be delivered"

        def deliver() -> dict[str, Array] | IngotError:
            return attempt(failure, deliveries.deliver, outcome)

        if sum(array.size for array in outcome.values()) <= AT_ONCE:
            self._deliver(deliver())
        else:
            future = asyncio.get_running_loop().run_in_executor(compression.threads, deliver)
            future.add_done_callback(self._delivered)

    def _delivered(self, future: asyncio.Future[dict[str, Array] | IngotError]) -> None:
        if not self._left and not future.cancelled():
            self._deliver(future.result())

    def _deliver(self, outcome: dict[str, Array] | IngotError) -> None:
        if isinstance(outcome, IngotError):
            super().settle(outcome)
        else:
            self._counters.succeeded(self._began)
            self._observe()
            self._reply(InferResponse(self._route, self._request.id, outcome))


def note(request: InferRequest, began: float) -> None:
    """Note what a request asks for, if it is observed; names that no model has are shortened: clients choose them."""
    context = request.context = request.context or CONTEXT.get()
    if context is None or context.observer is None:
        return
    template = request.template
    context.submitted = began
    context.inferences += 1
    context.model, context.version = template.model[:_NAME], template.version[:_NAME]
    first = next(iter(request.inputs.values()), None)
    context.rows += len(first) if first is not None and first.ndim else 1


def _wanted(known: tuple[TensorSpec, ...], outputs: Sequence[str]) -> tuple[TensorSpec, ...]:
    """Return the specs of the requested outputs."""
    if not outputs:
        return known
    specs = {spec.name: spec for spec in known}
    for name in outputs:
        if name not in specs:
            raise InvalidArgument(f"unknown output '{name}'; the model has {', '.join(specs)}")
    if len(set(outputs)) < len(outputs):
        [(twice, _)] = Counter(outputs).most_common(1)
        raise InvalidArgument(f"output '{twice}' already exists in request; name each output once")
    return tuple(specs[name] for name in outputs)
