"""The parts that OpenAI's completions and chat completions share: what is asked for, and its answer as JSON."""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from ingot.errors import InvalidArgument, InvalidField
from ingot.protocol.requests import priority_of, timeout_of
from ingot.runtime.generation.requests import GenerationRequest, Token
from ingot.server.plane.completion import Decoder, Piece, Wanted, decoder_of, merged, pieces
from ingot.server.plane.fields import Fields
from ingot.server.plane.handlers import Call, Events
from ingot.server.plane.sampling import Choosing, choosing
from ingot.steps.completion.detokenizer import TokenTexts

MOST_CHOICES = 128
"""Answers of one request."""
# JSON has no infinity; other servers send this for tokens that cannot be chosen.
_LOWEST = -9999.0

_NEUTRAL: Mapping[str, Sequence[Any]] = {"logit_bias": ({},), "service_tier": ("auto", "default"), "store": (False,)}
# Fields for OpenAI's own records.
_IGNORED = ("user", "metadata", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True)
class Asked:
    """The fields that both APIs read alike.

    Attributes:
        name: of the model, as the client wrote it.
        answers: to each prompt.
        stream: whether pieces are sent as they come.
        usage: whether the stream ends with the numbers of tokens.
        priority: as the scheduler expects it.
        timeout: seconds that the request may take; None is unlimited.
    """

    name: str
    decoder: Decoder
    answers: int
    choosing: Choosing
    stream: bool
    usage: bool
    priority: int
    timeout: float | None

    @classmethod
    def of(cls, call: Call, fields: Fields, prompts: int = 1) -> Self:
        """Read the fields, and those that change no answer.

        Raises:
            InvalidField: a value is wrong.
            IngotError: as for :func:`decoder_of`.
        """
        name = fields.text("model")
        base, _, version = name.partition(":")
        decoder = decoder_of(call.plane.repository.get(base, version))
        answers, chosen = answers_of(fields, prompts), choosing(fields, decoder.generation)
        found = cls(name, decoder, answers, chosen, *_streams(fields), *_urgency(fields))
        for ignored in _IGNORED:
            fields.any(ignored)
        fields.neutral(_NEUTRAL)
        return found


@dataclass(frozen=True)
class Job:
    """A request that was read; ``prompts`` are the tokens of each, ``logprobs`` as in a :class:`GenerationRequest`."""

    asked: Asked
    prompts: Sequence[Sequence[int]]
    max_tokens: int | None
    logprobs: int | None

    def wanted(self, call: Call) -> list[Wanted]:
        """Return the prompt of each answer; answers to one prompt have seeds that follow each other."""
        asked, sampling = self.asked, self.asked.choosing.sampling
        return [
            Wanted(
                GenerationRequest(
                    prompt=np.array(prompt, np.int64),
                    max_tokens=self.max_tokens,
                    sampling=sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + number),
                    stop_ids=asked.choosing.stop_ids,
                    logprobs=self.logprobs,
                    client=call.client,
                    timeout=asked.timeout,
                    priority=asked.priority,
                ),
                asked.choosing.stops,
            )
            for prompt in self.prompts
            for number in range(asked.answers)
        ]


class Form(ABC):
    """An API's JSON of answers; an object for one request.

    Args:
        texts: the model's.
        logprobs: whether the request asks for probabilities.
    """

    kind: str
    chunk: str
    prefix: str

    def __init__(self, texts: TokenTexts, *, logprobs: bool):
        self.texts = texts
        self.logprobs = logprobs

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the part of an answer before its first piece; None without one."""

    @abstractmethod
    def part(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return a piece of an answer, without its end."""

    @abstractmethod
    def whole(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        """Return an answer, without its end."""


async def answer(call: Call, job: Job, form: Form) -> dict[str, Any] | Events:
    """Return the answers to a request, or the events of a stream.

    Raises:
        IngotError: as for :func:`pieces`.
    """
    asked = job.asked
    counters = call.plane.counters(asked.decoder.model, "http")
    answers = merged([pieces(asked.decoder, wanted, counters) for wanted in job.wanted(call)])
    head = {"id": f"{form.prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": asked.name}
    if asked.stream:
        return Events(_chunks(job, form, answers, {**head, "object": form.chunk}), b"data: [DONE]\n\n")
    found: dict[int, list[Piece]] = {index: [] for index in range(len(job.prompts) * asked.answers)}
    async with contextlib.aclosing(answers):
        async for index, piece in answers:
            found[index].append(piece)
    choices = [
        {**form.whole(index, "".join(each.text for each in read), _tokens(read)), "finish_reason": read[-1].reason}
        for index, read in found.items()
    ]
    usage = _usage(job, sum(read[-1].count for read in found.values()))
    return {**head, "object": form.kind, "choices": choices, "usage": usage}


async def _chunks(
    job: Job, form: Form, answers: AsyncGenerator[tuple[int, Piece]], head: dict[str, Any]
) -> AsyncGenerator[dict[str, Any]]:
    counts: dict[int, int] = {}
    head = {**head, "usage": None} if job.asked.usage else head
    async with contextlib.aclosing(answers):
        async for index, piece in answers:
            if index not in counts and (opening := form.opening(index)) is not None:
                yield {**head, "choices": [{**opening, "finish_reason": None}]}
            counts[index] = piece.count
            part = form.part(index, piece.text, piece.tokens)
            yield {**head, "choices": [{**part, "finish_reason": piece.reason or None}]}
    if job.asked.usage:
        yield {**head, "choices": [], "usage": _usage(job, sum(counts.values()))}


def _tokens(read: Sequence[Piece]) -> list[Token]:
    return [token for piece in read for token in piece.tokens]


def _usage(job: Job, count: int) -> dict[str, int]:
    prompts = sum(map(len, job.prompts))
    return {"prompt_tokens": prompts, "completion_tokens": count, "total_tokens": prompts + count}


def logprob(value: float) -> float:
    """Return a logarithm of a probability for JSON."""
    return max(value, _LOWEST)


def check_ids(prompts: Sequence[Sequence[int]], vocab: int, field: str) -> None:
    """Refuse a prompt with tokens that the model does not have.

    Raises:
        InvalidField: there is one.
    """
    for ids in prompts:
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise InvalidField(field, f"has token {wrong}; the model has the tokens 0 to {vocab - 1}")


def answers_of(fields: Fields, prompts: int = 1, name: str = "n") -> int:
    """Read how many answers each prompt gets.

    Raises:
        InvalidField: there are too many in all.
    """
    count = fields.count(name, 1)
    if count * prompts > MOST_CHOICES:
        raise InvalidField(
            fields.where + name, f"makes {count * prompts} answers; the most of one request are {MOST_CHOICES}"
        )
    return count


def _streams(fields: Fields) -> tuple[bool, bool]:
    """Read whether pieces are sent as they come, and whether the numbers of tokens follow them.

    Raises:
        InvalidField: a value is wrong.
    """
    stream = bool(fields.flag("stream"))
    given = fields.any("stream_options")
    if given is not None and not stream:
        raise InvalidField("stream_options", "is for streams; set stream, or leave it out")
    options = Fields({"stream_options": given}).nested("stream_options")
    usage = bool(options.flag("include_usage"))
    options.neutral({"include_obfuscation": (False,)})
    options.end()
    return stream, usage


def _urgency(fields: Fields) -> tuple[int, float | None]:
    """Read the ``priority`` and the ``timeout`` of a request, which mean the same as in the protocol.

    Raises:
        InvalidField: a value is wrong.
    """
    given = {name: fields.any(name) for name in ("priority", "timeout")}
    try:
        return priority_of(given), timeout_of(given)
    except InvalidArgument as error:
        _, name, message = str(error).split("'", 2)
        raise InvalidField(name, message.strip()) from error
