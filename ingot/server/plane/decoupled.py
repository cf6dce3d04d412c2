"""Requests that get several answers, as models with a decoupled transaction policy give them."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from typing import Any, TypeVar

import numpy as np

from ingot.errors import DeadlineExceeded, IngotError, InvalidArgument, Unsupported, quoted
from ingot.protocol.requests import InferRequest, InferResponse, Parameters, Template, step_of, time_limit_of
from ingot.runtime import Model, Request
from ingot.runtime.dispatch.streams import AnswerStream
from ingot.runtime.gpu.array import reachable
from ingot.runtime.scheduling.entry import ignore
from ingot.server.plane import texts
from ingot.server.plane.dataplane import DataPlane, ModelRoute, note
from ingot.server.plane.texts import text_decoder
from ingot.tensors import Array

T = TypeVar("T", int, float)

# Parameters of the request, which its calls do not repeat.
_ONCE = frozenset(("max_steps", "sequence_end", "sequence_start", "timeout", "triton_enable_empty_final_response"))


async def answers(
    plane: DataPlane, request: InferRequest, protocol: str
) -> AsyncGenerator[tuple[InferResponse, bool], None]:
    """Yield each answer, and whether it is known to be the last: code shows that it has no more when it is asked.

    Every call is scheduled like a separate request, so calls of different clients share batches. If the model has
    states, the calls are a sequence: the client's, if the request names one, or a new one that ends with the request.

    Args:
        plane: the models.
        request: to a model that may answer several times.
        protocol: for the metrics.

    Raises:
        IngotError: as for :meth:`DataPlane.infer`; the earlier answers stand.
    """
    template = request.template
    model = plane.repository.get(template.model, template.version)
    repeat = model.repeat
    if isinstance(model, Model) and model.streams is not None:
        async with contextlib.aclosing(_of_code(plane, model, request, protocol)) as parts:
            async for part in parts:
                yield part
        return
    if (decoder := text_decoder(model, request.inputs)) is not None:
        async with contextlib.aclosing(texts.answers(decoder, request, plane.counters(model, protocol))) as pieces:
            async for piece in pieces:
                yield piece
        return
    if repeat is None:
        yield await plane.infer(request, protocol), True
        return
    parameters = dict(template.parameters)
    steps = _steps(parameters, repeat.steps)
    limit = time_limit_of(request)
    deadline = None if limit is None else time.monotonic() + limit
    own = model.sequential and "sequence_id" not in parameters
    if own:
        parameters |= {"sequence_id": secrets.token_hex(16), "sequence_start": True}
    common = {name: value for name, value in parameters.items() if name not in _ONCE}
    begun = {**common, "sequence_start": True} if parameters.get("sequence_start") else common
    first, others = (_template(template, each) for each in (begun, common))
    inputs: Mapping[str, Array] = reachable(request.inputs, {})
    try:
        for step in range(1, steps + 1):
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise DeadlineExceeded(f"the request's time was over after {step - 1} answers")
            call = InferRequest(first if step == 1 else others, inputs, request.id, left, request.client)
            response = await plane.infer(call, protocol)
            last = step == steps or (bool(repeat.until) and bool(np.all(response.arrays[repeat.until])))
            yield response, last
            if last:
                return
            inputs = {**inputs, **{name: response.arrays[output] for name, output in repeat.inputs.items()}}
    finally:
        if own or (model.sequential and parameters.get("sequence_end")):
            model.drop_sequence(step_of(common).owned_by(request.client))


async def _of_code(
    plane: DataPlane, model: Model, request: InferRequest, protocol: str
) -> AsyncGenerator[tuple[InferResponse, bool], None]:
    """Yield the answers of a model whose code yields them; all together count as one request."""
    left = _steps(request.template.parameters, math.inf)
    began, counters = time.perf_counter(), plane.counters(model, protocol)
    if plane.observer is not None:
        note(request, began)
    stream, code = None, "cancelled"
    try:
        stream, route = _opened(model, request)
        while (outputs := await stream.next()) is not None:
            left -= 1
            if last := not left:
                code = "ok"
            yield InferResponse(route, request.id, outputs), last
            if last:
                return
        code = "ok"
    except IngotError as error:
        code = error.code.value
        raise
    finally:
        if stream is not None:
            stream.close()
        counters.count(code, began)
        if (context := request.context) is not None and context.observer is not None and code != "cancelled":
            context.observer.answered(context, model.last_batch, failed=code != "ok")


def _opened(model: Model, request: InferRequest) -> tuple[AnswerStream, ModelRoute]:
    if request.template.deliveries:
        raise Unsupported(f"model '{model.name}' answers in parts: they are not classified, or put into shared memory")
    template = _template(request.template, request.template.parameters)
    route = ModelRoute(model, template, request.inputs)
    inputs, client = reachable(request.inputs, {}), request.sticky or request.client
    made = Request(inputs, ignore, time_limit_of(request), route.priority, None, client)
    return model.open_stream(made), route


def _template(template: Template, parameters: Parameters) -> Template:
    made = Template(template.model, template.version, template.outputs, parameters, None, template.deliveries)
    made.repeated = True
    return made


def _steps(parameters: Mapping[str, Any], most: T) -> int | T:
    """Return the most answers that a request gets: the parameter, by default ``most``."""
    if "max_steps" not in parameters:
        return most
    steps = parameters["max_steps"]
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 < steps <= most:
        bounds = f"from 1 to {most}" if most < math.inf else "above 0"
        raise InvalidArgument(f"parameter 'max_steps' is {quoted(steps)}; it must be a whole number {bounds}")
    return steps
