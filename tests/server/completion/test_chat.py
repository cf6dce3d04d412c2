"""``/v1/chat/completions``: the model's own template, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.server.completion import written
from tests.server.completion.test_completions import NOTHING, events

TALK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
PROMPT = "s:be kind;u:hello;a:"
PATH = "/v1/chat/completions"


def chat(http: httpx.Client, messages: Any = TALK, **fields: Any) -> dict[str, Any]:
    response = http.post(PATH, json={"model": written.NAME, "messages": messages, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_message_is_the_text_behind_the_templates_prompt(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=20)
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": written.text(PROMPT, 20), "refusal": None}
    assert (answer["object"], choice["logprobs"]) == ("chat.completion", None)
    assert answer["usage"]["prompt_tokens"] == len(PROMPT)
    assert chat(http, max_completion_tokens=20)["choices"] == answer["choices"]


def test_without_a_limit_a_message_may_fill_the_context(http: httpx.Client) -> None:
    answer = chat(http, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 128
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_stream_has_the_role_the_pieces_and_the_numbers(http: httpx.Client) -> None:
    found = events(http, PATH, messages=TALK, max_tokens=12, stream_options={"include_usage": True})
    first, *pieces, usage = found
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == written.text(PROMPT, 12)
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert {piece["object"] for piece in found} == {"chat.completion.chunk"}
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], len(PROMPT) + 12)


def test_contents_may_be_parts_and_templates_have_options(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    talk = [TALK[0], {"role": "user", "content": parts}]
    found = chat(http, talk, max_tokens=9)["choices"][0]["message"]["content"]
    assert found == written.text("s:be kind;u:hel\nlo;a:", 9)
    loud = chat(http, max_tokens=9, chat_template_kwargs={"shout": True})
    assert loud["choices"][0]["message"]["content"] == written.text("s:be kind!;u:hello!;a:", 9)


def test_probabilities_have_the_bytes_of_tokens(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=4, logprobs=True, top_logprobs=2)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == written.text(PROMPT, 4)
    assert [bytes(token["bytes"]).decode() for token in content] == [token["token"] for token in content]
    assert all(token["top_logprobs"][0]["logprob"] == token["logprob"] <= 0 for token in content)
    assert {len(token["top_logprobs"]) for token in content} == {2}
    pieces = events(http, PATH, messages=TALK, max_tokens=4, logprobs=True)
    streamed = [piece["choices"][0]["logprobs"] for piece in pieces]
    assert [token["token"] for each in streamed if each for token in each["content"]] == [
        token["token"] for token in content
    ]


def test_values_that_change_nothing_are_accepted(http: httpx.Client) -> None:
    fields = {name: value for name, value in NOTHING.items() if name not in ("suffix", "best_of", "echo")}
    more = {
        "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "response_format": {"type": "text"},
        "modalities": ["text"], "top_logprobs": None, "functions": None, "safety_identifier": "me",
    }  # fmt: skip
    talk = [{"role": "user", "content": "hello", "name": "me"}, {"role": "assistant", "content": "x", "tool_calls": []}]
    found = chat(http, talk, **fields, **more, max_tokens=5)
    assert found["choices"][0]["message"]["content"] == written.text("u:hello;a:x;a:", 5)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "supports [] only"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'type': 'text'"),
        ({"tool_choice": "required"}, "tool_choice", "'none' or 'auto'"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "leave it out"),
        ({"best_of": 2}, "best_of", "not a field"),
        ({"prompt": "x"}, "prompt", "not a field"),
        ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens", "the same as max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs"),
        ({"logprobs": 2}, "logprobs", "true or false"),
        ({"messages": []}, "messages", "one message or more"),
        ({"messages": "hi"}, "messages", "one message or more"),
        ({"messages": ["hi"]}, "messages[0]", "an object with role and content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "not a field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            "must be one of: text",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "refuses the messages: no tools here"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, None, "together they may have 128"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "none of add_generation_prompt"),
        ({"model": "plain"}, "model", "has no chat template; send its prompt to /v1/completions"),
    ],
)
def test_a_parameter_that_cannot_be_honoured_is_refused_by_its_name(
    http: httpx.Client, fields: dict[str, Any], param: str | None, message: str
) -> None:
    response = http.post(PATH, json={"model": written.NAME, "messages": TALK, **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert message in error["message"]
