"""Requests of tensors to a model that writes text: a prompt as BYTES, and the text behind it as BYTES."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import numpy as np

from ingot.errors import IngotError, InvalidArgument, InvalidField
from ingot.faults import attempt, public_error
from ingot.protocol.context import CONTEXT
from ingot.protocol.requests import InferRequest, InferResponse, Route, priority_of, time_limit_of
from ingot.runtime.generation.requests import GenerationRequest
from ingot.runtime.model import Model
from ingot.server.net import compression
from ingot.server.plane.completion import AT_ONCE, OPENAI_TOKENS, Decoder, Wanted, decoder_of, note, pieces, prompt_ids
from ingot.server.plane.counters import Counters
from ingot.server.plane.fields import Fields
from ingot.server.plane.sampling import choosing
from ingot.serving import ServedModel
from ingot.tensors import DType, Signature, TensorSpec

NAMES: Mapping[str, str] = MappingProxyType({"text": "text", "text_input": "text_output"})
"""The inputs for a prompt, each with its output; the second pair is that of Triton's backends."""
_TEXT = (TensorSpec("text", DType.BYTES, (1,)),)
_SIGNATURE = Signature(_TEXT, _TEXT)
# Parameters that requests for any model have; those of a decoder also say how tokens are chosen.
_GENERAL = frozenset(("timeout", "priority", "binary_data_output", "triton_enable_empty_final_response"))

Reply = Callable[[InferResponse | IngotError], None]


def listed_signature(model: ServedModel) -> Signature:
    """Return the inputs and outputs that the metadata of a model lists: texts, if it writes text."""
    signature = model.signature
    return _SIGNATURE if isinstance(model, Model) and model.texts is not None else signature


def text_decoder(model: ServedModel, inputs: Iterable[str]) -> Decoder | None:
    """Return the model that writes text, if a request with inputs of these names has a prompt as a text for one."""
    if not isinstance(model, Model) or model.generation is None or not any(name in NAMES for name in inputs):
        return None
    return decoder_of(model)


def check_parameters(parameters: Mapping[str, object]) -> None:
    """Refuse parameters of a request for tokens of a decoder, which are chosen as its archive says.

    Raises:
        InvalidArgument: there is one that would be ignored.
    """
    if unknown := sorted(parameters.keys() - _GENERAL):
        raise InvalidArgument(
            f"parameter '{unknown[0]}' is for prompts as text, in the input 'text' or 'text_input'; "
            "a request for tokens has none: leave it out"
        )


async def answers(
    decoder: Decoder, request: InferRequest, counters: Counters
) -> AsyncGenerator[tuple[InferResponse, bool]]:
    """Yield each piece of the text behind a prompt, and whether it is the last.

    Raises:
        InvalidArgument: an input or a parameter is wrong.
        IngotError: as for :func:`pieces`.
    """
    prompt = await _read(decoder, request, streamed=True)
    note(1)
    async with contextlib.aclosing(pieces(decoder, prompt.wanted, counters)) as found:
        async for piece in found:
            yield prompt.response(piece.text), bool(piece.reason)


class TextTicket:
    """A submitted request for the whole text behind a prompt.

    Args:
        decoder: the model.
        request: has the prompt.
        counters: count it.
        reply: called once, in a later tick of the event loop, with the response or the error, unless it is cancelled.
    """

    def __init__(self, decoder: Decoder, request: InferRequest, counters: Counters, reply: Reply):
        self._task = asyncio.get_running_loop().create_task(self._run(decoder, request, counters, reply))

    def cancel(self) -> None:
        """Drop the request, as its client left; does nothing once it is answered."""
        self._task.cancel()

    async def _run(self, decoder: Decoder, request: InferRequest, counters: Counters, reply: Reply) -> None:
        CONTEXT.set(request.context)
        outcome: InferResponse | IngotError
        try:
            prompt = await _read(decoder, request, streamed=False)
            found = [piece.text async for piece in pieces(decoder, prompt.wanted, counters)]
            outcome = prompt.response(prompt.before + "".join(found))
        except Exception as error:  # noqa: BLE001 - the boundary of one request
            outcome = public_error(error, f"a request to model {decoder.model.name} failed")
        attempt("a reply failed", reply, outcome)


@dataclass(frozen=True)
class _Prompt:
    """A prompt that was read; ``before`` is the text that the answer begins with."""

    wanted: Wanted
    before: str
    route: Route
    identifier: str
    shape: tuple[int, ...]

    def response(self, text: str) -> InferResponse:
        array = np.empty(1, object)
        array[0] = text.encode()
        return InferResponse(self.route, self.identifier, {self.route.outputs[0].name: array.reshape(self.shape)})


async def _read(decoder: Decoder, request: InferRequest, *, streamed: bool) -> _Prompt:
    """Return the prompt of a request.

    Raises:
        InvalidArgument: an input, an output or a parameter is wrong.
    """
    (name, array), *others = request.inputs.items()
    if others or name not in NAMES or array.size != 1:
        known = " or ".join(f"'{each}'" for each in NAMES)
        raise InvalidArgument(f"a request for text has one input, {known}, of one element; leave the others out")
    template, output = request.template, NAMES[name]
    if template.outputs not in ((), (output,)):
        raise InvalidArgument(f"unknown output '{template.outputs[0]}'; the text behind '{name}' is '{output}'")
    item = array.reshape(-1)[0]
    try:
        text = item.decode() if isinstance(item, bytes) else str(item)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"input '{name}' is not UTF-8: {error}") from error
    fields = Fields({key: value for key, value in template.parameters.items() if key not in _GENERAL}, "parameters")
    chosen = choosing(fields, decoder.generation)
    most = fields.count("max_tokens", decoder.generation.defaults.max_new_tokens or OPENAI_TOKENS)
    if (stream := fields.flag("stream")) is not None and stream != streamed:
        raise InvalidField("parameters.stream", f"is {stream}; use {_PLACES[stream]}, or leave it out")
    without, before = fields.flag("exclude_input_in_output"), ""
    if without is False:
        if streamed:
            raise InvalidField("parameters.exclude_input_in_output", "is false, which is not for streams; leave it out")
        decoder.refuse_prompt("parameters.exclude_input_in_output", wanted=True)
        before = text
    fields.end()
    ids = await compression.run(partial(prompt_ids, decoder, text, name), in_thread=len(text) > AT_ONCE)
    wanted = GenerationRequest(
        prompt=np.array(ids, np.int64),
        max_tokens=most,
        sampling=chosen.sampling,
        stop_ids=chosen.stop_ids,
        client=request.sticky or request.client,
        timeout=time_limit_of(request),
        priority=priority_of(template.parameters),
    )
    route = Route(decoder.model.name, decoder.model.version, (TensorSpec(output, DType.BYTES, array.shape),))
    return _Prompt(Wanted(wanted, chosen.stops), before, route, request.id, array.shape)


_PLACES = {True: "generate_stream or ModelStreamInfer", False: "generate or infer"}
