"""OpenAI's ``/v1/completions``: the continuation of a prompt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from ingot.errors import InvalidField, quoted
from ingot.runtime.generation.requests import Token
from ingot.server.net import compression
from ingot.server.plane.apis.completing import (
    MOST_CHOICES,
    Asked,
    Form,
    Job,
    answer,
    check_ids,
    logprob,
)
from ingot.server.plane.completion import AT_ONCE, OPENAI_TOKENS, Decoder, prompt_ids
from ingot.server.plane.fields import Fields, check_count
from ingot.server.plane.handlers import Call, Events
from ingot.server.plane.sampling import top_count
from ingot.steps.completion.detokenizer import TokenTexts


async def completions(call: Call) -> dict[str, Any] | Events:
    """Continue each prompt.

    Raises:
        InvalidField: a field is wrong, or asks for something that this server does not do.
        IngotError: as for :func:`ingot.server.plane.completion.pieces`.
    """
    fields = Fields(call.content)
    prompts = _prompts(fields.any("prompt"))
    asked = Asked.of(call, fields, len(prompts))
    answers, decoder = asked.answers, asked.decoder
    if (best := fields.whole("best_of")) not in (None, answers):
        raise InvalidField("best_of", f"is {best}, and n is {answers}; this server returns all answers: leave it out")
    max_tokens = fields.count("max_tokens", OPENAI_TOKENS)
    logprobs, echo = top_count(fields, "logprobs"), bool(fields.flag("echo"))
    decoder.refuse_prompt("echo", wanted=echo)
    if echo and logprobs is not None:
        raise InvalidField("logprobs", "with echo needs those of the prompt, which this server does not return")
    fields.neutral({"suffix": ("",)})
    fields.end()
    encode = partial(_encoded, decoder, prompts)
    ids = await compression.run(encode, in_thread=sum(map(len, prompts)) > AT_ONCE)
    check_ids(ids, decoder.generation.vocab, "prompt")
    job = Job(asked, ids, max_tokens, logprobs)
    texts = decoder.texts.tokens
    form = _Texts(texts, logprobs=logprobs is not None)
    if echo:
        many = sum(map(len, prompts)) > AT_ONCE
        before = await compression.run(partial(_texts, texts, prompts), in_thread=many)
        form.before = [text for text in before for _ in range(answers)]
    return await answer(call, job, form)


class _Texts(Form):
    kind = chunk = "text_completion"
    prefix = "cmpl"
    before: Sequence[str] = ()
    """The text of each answer's prompt, if answers begin with it."""

    def __init__(self, texts: TokenTexts, *, logprobs: bool):
        super().__init__(texts, logprobs=logprobs)
        self._places: dict[int, int] = defaultdict(int)

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._choice(index, self.before[index], ()) if self.before else None

    def part(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return self._choice(index, text, tokens)

    def whole(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return self._choice(index, self.before[index] + text if self.before else text, tokens)

    def _choice(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, tokens) if self.logprobs else None}

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any]:
        names = [self.texts.alone(token.id) for token in tokens]
        places = []
        for name in names:
            places.append(self._places[index])
            self._places[index] += len(name)
        tops = [
            {self.texts.alone(number): logprob(value) for number, value in (*token.top, (token.id, token.logprob))}
            for token in tokens
        ]
        return {
            "tokens": names,
            "token_logprobs": [logprob(token.logprob) for token in tokens],
            "top_logprobs": tops if any(token.top for token in tokens) else None,
            "text_offset": places,
        }


def _prompts(given: Any) -> list[str | list[int]]:
    """Return the prompts: a text or a list of ids, or a list of either.

    Raises:
        InvalidField: they are something else.
    """
    if given is None:
        raise InvalidField("prompt", "is missing")
    rows = given if isinstance(given, list) and given and not _is_id(given[0]) else [given]
    check_count("prompt", rows, MOST_CHOICES)
    for index, row in enumerate(rows):
        where = "prompt" if rows is not given else f"prompt[{index}]"
        if not isinstance(row, str) and not (isinstance(row, list) and row and all(map(_is_id, row))):
            raise InvalidField(where, f"is {quoted(row)}; it must be a text, a list of ids, or a list of either")
    return rows


def _is_id(value: object) -> bool:
    return type(value) is int


def _texts(texts: TokenTexts, prompts: Sequence[str | list[int]]) -> list[str]:
    return [prompt if isinstance(prompt, str) else texts.of(prompt) for prompt in prompts]


def _encoded(decoder: Decoder, prompts: Sequence[str | list[int]]) -> list[list[int]]:
    return [prompt_ids(decoder, prompt, "prompt") if isinstance(prompt, str) else prompt for prompt in prompts]
