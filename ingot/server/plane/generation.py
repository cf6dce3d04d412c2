"""Requests that get several answers, as models with a decoupled transaction policy give them."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping

import numpy as np

from ingot.errors import DeadlineExceeded, InvalidArgument, quoted
from ingot.protocol.requests import InferRequest, InferResponse, Parameters, Template, step_of, timeout_of
from ingot.runtime.gpu.array import reachable
from ingot.runtime.settings.repeat import Repeat
from ingot.server.plane.dataplane import DataPlane
from ingot.tensors import Array

# Parameters of the request as a whole, not of each call.
_WHOLE = frozenset(("max_steps", "sequence_end", "sequence_start", "timeout", "triton_enable_empty_final_response"))


async def answers(
    plane: DataPlane, request: InferRequest, protocol: str
) -> AsyncGenerator[tuple[InferResponse, bool], None]:
    """Yield each answer, and whether it is the last.

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
    if repeat is None:
        yield await plane.infer(request, protocol), True
        return
    parameters = dict(template.parameters)
    steps = _steps(parameters, repeat)
    timeout = timeout_of(parameters)
    limits = [seconds for seconds in (timeout, request.left) if seconds is not None]
    deadline = time.monotonic() + min(limits) if limits else None
    own = model.sequential and "sequence_id" not in parameters
    if own:
        parameters |= {"sequence_id": secrets.token_hex(16), "sequence_start": True}
    common = {name: value for name, value in parameters.items() if name not in _WHOLE}
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


def _template(template: Template, parameters: Parameters) -> Template:
    made = Template(template.model, template.version, template.outputs, parameters, None, template.deliveries)
    made.repeated = True
    return made


def _steps(parameters: Parameters, repeat: Repeat) -> int:
    steps = parameters.get("max_steps", repeat.steps)
    if isinstance(steps, bool) or not isinstance(steps, int) or not 0 < steps <= repeat.steps:
        raise InvalidArgument(
            f"parameter 'max_steps' is {quoted(steps)}; it must be a whole number from 1 to {repeat.steps}"
        )
    return steps
