"""OpenAI's ``/v1/chat/completions``: the next message of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ingot.errors import InvalidArgument, InvalidField, quoted
from ingot.runtime.generation.requests import Token
from ingot.server.net import compression
from ingot.server.plane.apis.completing import (
    Asked,
    Form,
    Job,
    answer,
    check_ids,
    logprob,
)
from ingot.server.plane.fields import Fields, check_count
from ingot.server.plane.handlers import Call, Events
from ingot.server.plane.sampling import top_count

_MOST_MESSAGES = 2048
# Variables of a template that requests do not set.
_RESERVED = frozenset(("add_generation_prompt", "documents", "messages", "tools"))

_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_OF_MESSAGES: Mapping[str, Sequence[Any]] = {"tool_calls": ([],), "function_call": (), "refusal": (), "audio": ()}


async def chat(call: Call) -> dict[str, Any] | Events:
    """Write the next message.

    Raises:
        InvalidField: a field is wrong, or asks for something that this server does not do.
        IngotError: as for :func:`ingot.server.plane.completion.pieces`.
    """
    fields = Fields(call.content)
    asked = Asked.of(call, fields)
    name, decoder = asked.name, asked.decoder
    if not decoder.texts.chats:
        raise InvalidField("model", f"is '{name}', which has no chat template; send its prompt to /v1/completions")
    messages = _messages(fields.any("messages"))
    options = _options(fields)
    max_tokens = _max_tokens(fields, decoder.generation.defaults.max_new_tokens)
    logprobs = _logprobs(fields)
    fields.neutral(_NEUTRAL)
    fields.end()
    try:
        # A template is a program, so it never runs in the event loop.
        ids = await compression.run(partial(decoder.texts.chat, messages, options), in_thread=True)
    except InvalidArgument as error:
        raise InvalidField("messages", f"make no prompt: {error}") from error
    check_ids([ids], decoder.generation.vocab, "messages")
    job = Job(asked, [ids], max_tokens, logprobs)
    return await answer(call, job, _Messages(decoder.texts.tokens, logprobs=logprobs is not None))


class _Messages(Form):
    kind = "chat.completion"
    chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}

    def part(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(tokens)}

    def whole(self, index: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens)}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            {
                **self._named(token.id, token.logprob),
                "top_logprobs": [self._named(number, value) for number, value in token.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _named(self, token: int, value: float) -> dict[str, Any]:
        text = self.texts.alone(token)
        return {"token": text, "logprob": logprob(value), "bytes": [*text.encode()]}


def _messages(given: Any) -> list[dict[str, Any]]:
    check_count("messages", given, _MOST_MESSAGES)
    if not isinstance(given, list) or not given:
        raise InvalidField("messages", f"is {quoted(given)}; it must be a list of one message or more")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(given)]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise InvalidField(where, f"is {quoted(given)}; it must be an object with role and content")
    fields = Fields(given, where)
    found = {"role": fields.text("role"), "content": _content(fields.any("content"), f"{where}.content")}
    found |= {name: text for name in ("name", "reasoning_content") if (text := fields.text(name, ""))}
    fields.neutral(_OF_MESSAGES)
    fields.end()
    return found


def _content(given: Any, where: str) -> str:
    """Return a content as one text; parts of it are lines."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise InvalidField(where, f"is {quoted(given)}; it must be a text, or a list of parts of the type text")
    parts = []
    for index, part in enumerate(given):
        fields = Fields(part if isinstance(part, dict) else {}, f"{where}[{index}]")
        fields.text("type", among=("text",))
        parts.append(fields.text("text"))
        fields.end()
    return "\n".join(parts)


def _options(fields: Fields) -> dict[str, Any]:
    """Return further variables of the template."""
    given = fields.any("chat_template_kwargs")
    if given is None:
        return {}
    if not isinstance(given, dict) or not _RESERVED.isdisjoint(given) or not all(map(str.isidentifier, given)):
        reserved = ", ".join(sorted(_RESERVED))
        raise InvalidField("chat_template_kwargs", f"must be an object of variables, none of {reserved}")
    return given


def _max_tokens(fields: Fields, default: int | None) -> int | None:
    found = {name: fields.count(name) for name in ("max_completion_tokens", "max_tokens")}
    if all(found.values()):
        raise InvalidField("max_tokens", "is the same as max_completion_tokens; leave one of them out")
    return max(found.values()) or default


def _logprobs(fields: Fields) -> int | None:
    asked, top = fields.flag("logprobs"), top_count(fields, "top_logprobs")
    if top and not asked:
        raise InvalidField("top_logprobs", "is for requests with logprobs; set logprobs, or leave it out")
    return (top or 0) if asked else None
