"""Hugging Face's ``text-generation``, ``text2text-generation``, ``translation`` and ``summarization``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ingot.errors import InvalidField, quoted
from ingot.model_store import Generation
from ingot.runtime.generation.requests import GenerationRequest
from ingot.server.net import compression
from ingot.server.plane.apis.completing import MOST_CHOICES, answers_of, logprob
from ingot.server.plane.completion import (
    AT_ONCE,
    TRANSFORMERS_TOKENS,
    Decoder,
    Wanted,
    decoder_of,
    merged,
    pieces,
    prompt_ids,
)
from ingot.server.plane.fields import Fields, texts_of
from ingot.server.plane.handlers import Call, Events
from ingot.server.plane.sampling import choosing
from ingot.serving import ServedModel

_NAMES: Mapping[str, str] = {"translation": "translation_text", "summarization": "summary_text"}
_SAMPLES = ("temperature", "top_p", "top_k", "min_p")

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "details": (False,),
    "decoder_input_details": (False,),
    "watermark": (False,),
    "best_of": (1,),
    "typical_p": (1, 1.0),
    "top_n_tokens": (0,),
    "truncate": (),
    "grammar": (),
    "adapter_id": (),
}


async def answer(call: Call, model: ServedModel) -> list[Any] | Events:
    """Return the text behind a prompt, with the prompt unless ``return_full_text`` is false.

    Raises:
        InvalidField: a field is wrong, or asks for something that this server does not do.
        IngotError: as for :func:`pieces`.
    """
    decoder = decoder_of(model)
    fields = Fields(call.content)
    given = fields.any("inputs")
    prompts = texts_of("inputs", given, MOST_CHOICES)
    parameters = _drawn(fields.nested("parameters"), decoder.generation)
    answers = answers_of(parameters, len(prompts), "num_return_sequences")
    full, stream = parameters.flag("return_full_text"), fields.flag("stream")
    decoder.refuse_prompt("parameters.return_full_text", wanted=bool(full))
    request = _request(parameters, decoder, call, logprobs=bool(stream))
    parameters.neutral(_NEUTRAL)
    parameters.end()
    fields.end()
    encode = partial(_encoded, decoder, prompts)
    ids = await compression.run(encode, in_thread=sum(map(len, prompts)) > AT_ONCE)
    counters = call.plane.counters(decoder.model, "http")
    wanted = [
        replace(request, request=replace(request.request, prompt=np.array(row, np.int64)))
        for row in ids
        for _ in range(answers)
    ]
    found = merged([pieces(decoder, each, counters) for each in wanted])
    if stream:
        if len(wanted) > 1 or full:
            raise InvalidField("stream", "is for one answer, without its prompt; leave return_full_text out")
        return Events(_tokens(found))
    whole = full is not False and decoder.generation.encoder is None
    texts = [prompt if whole else "" for prompt in prompts for _ in range(answers)]
    async with contextlib.aclosing(found):
        async for index, piece in found:
            texts[index] += piece.text
    name = _NAMES.get(decoder.generation.task, "generated_text")
    rows = [{name: text} for text in texts]
    return rows if isinstance(given, str) else [rows[at : at + answers] for at in range(0, len(rows), answers)]


def _drawn(parameters: Fields, generation: Generation) -> Fields:
    """Return parameters in which ``do_sample`` is a temperature.

    Raises:
        InvalidField: it is false, and another parameter is for drawn tokens only.
    """
    draws, given = parameters.flag("do_sample"), parameters.rest()
    if draws is False:
        for name in _SAMPLES:
            if given.get(name) is not None:
                why = f"is {quoted(given[name])}, but do_sample is false; leave one of them out"
                raise InvalidField(f"{parameters.where}{name}", why)
        given["temperature"] = 0
    elif draws and given.get("temperature") is None:
        given["temperature"] = generation.defaults.temperature
    return Fields(given, "parameters")


def _request(parameters: Fields, decoder: Decoder, call: Call, *, logprobs: bool) -> Wanted:
    """Read what all prompts have in common."""
    chosen = choosing(parameters, decoder.generation)
    most = parameters.count("max_new_tokens", decoder.generation.defaults.max_new_tokens or TRANSFORMERS_TOKENS)
    request = GenerationRequest(
        prompt=np.zeros(1, np.int64),
        max_tokens=most,
        sampling=chosen.sampling,
        stop_ids=chosen.stop_ids,
        logprobs=0 if logprobs else None,
        client=call.client,
    )
    return Wanted(request, chosen.stops)


def _encoded(decoder: Decoder, prompts: Sequence[str]) -> list[list[int]]:
    return [prompt_ids(decoder, prompt, "inputs") for prompt in prompts]


async def _tokens(found: AsyncGenerator[Any]) -> AsyncGenerator[dict[str, Any]]:
    """Yield the pieces of an answer as text-generation-inference's events: the last one has the whole text."""
    text = ""
    async with contextlib.aclosing(found):
        async for _, piece in found:
            text += piece.text
            tokens = piece.tokens
            last = {"id": tokens[-1].id, "logprob": logprob(tokens[-1].logprob)} if tokens else {"id": 0, "logprob": 0}
            token = {**last, "text": piece.text, "special": not piece.text}
            whole = text if piece.reason else None
            yield {"index": piece.count, "token": token, "generated_text": whole, "details": None}
