"""``/v1/completions``: texts as the model alone writes them, and every parameter honoured, or refused by its name."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.completion import written

PROMPT = "hello there"


def complete(http: httpx.Client, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"model": written.NAME, "prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def events(http: httpx.Client, path: str = "/v1/completions", **body: Any) -> list[Any]:
    """Return the events of a stream; the last is its end."""
    with http.stream("POST", path, json={"model": written.NAME, "stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("prompt", [PROMPT, "a", "The film was", "x" * 60])
def test_a_text_is_the_most_likely_one(http: httpx.Client, prompt: str) -> None:
    answer = complete(http, prompt, max_tokens=30)
    expected = written.text(prompt, 30)
    assert texts(answer) == [expected]
    counted = answer["usage"]
    assert counted["prompt_tokens"] == len(prompt)
    assert counted["total_tokens"] == counted["prompt_tokens"] + counted["completion_tokens"]
    assert answer["choices"][0]["finish_reason"] == ("length" if counted["completion_tokens"] == 30 else "stop")
    assert (answer["object"], answer["model"]) == ("text_completion", written.NAME)


def test_a_request_that_says_nothing_gets_sixteen_tokens(http: httpx.Client) -> None:
    assert texts(complete(http)) == [written.text(PROMPT, 16)]


def test_prompts_may_be_several_and_tokens(http: httpx.Client) -> None:
    prompts = ["one", "two", "three"]
    expected = [written.text(prompt, 8) for prompt in prompts]
    assert texts(complete(http, prompts, max_tokens=8)) == expected
    assert texts(complete(http, [written.ids(prompt) for prompt in prompts], max_tokens=8)) == expected
    assert texts(complete(http, written.ids("one"), max_tokens=8)) == expected[:1]
    assert complete(http, prompts, max_tokens=8)["usage"]["prompt_tokens"] == len("".join(prompts))


def test_pieces_of_a_stream_join_to_the_whole(http: httpx.Client) -> None:
    found = events(http, prompt=PROMPT, max_tokens=20, stream_options={"include_usage": True})
    *pieces, last = found
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == written.text(PROMPT, 20)
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "length"
    assert {piece["usage"] for piece in pieces} == {None}
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 20)
    assert len({piece["id"] for piece in found}) == 1
    assert "usage" not in events(http, prompt=PROMPT)[0]


def test_several_answers_stream_at_once(http: httpx.Client) -> None:
    found = events(http, prompt=["one", "two"], n=2, max_tokens=6)
    joined = dict.fromkeys(range(4), "")
    for piece in found:
        [choice] = piece["choices"]
        joined[choice["index"]] += choice["text"]
    assert [*joined.values()] == [written.text("one", 6)] * 2 + [written.text("two", 6)] * 2


def test_a_stop_text_ends_an_answer_before_it(http: httpx.Client) -> None:
    whole = written.text(PROMPT, 40)
    stop = whole[9:12]
    expected = whole[: whole.index(stop)]
    answer = complete(http, max_tokens=40, stop=[stop, "never there"])
    assert (texts(answer), answer["choices"][0]["finish_reason"]) == ([expected], "stop")
    assert answer["usage"]["completion_tokens"] < 40
    pieces = events(http, prompt=PROMPT, max_tokens=40, stop=stop)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_tokens_are_those_of_the_model_and_of_the_request(http: httpx.Client) -> None:
    whole = written.text(PROMPT, 20)
    answer = complete(http, max_tokens=20, stop_token_ids=written.ids(whole[5]))
    assert (texts(answer), answer["choices"][0]["finish_reason"]) == ([whole[: whole.index(whole[5])]], "stop")
    assert texts(complete(http, max_tokens=60, ignore_eos=True)) == [written.text(PROMPT, 60, stop=False)]


def test_an_answer_may_begin_with_its_prompt(http: httpx.Client) -> None:
    expected = PROMPT + written.text(PROMPT, 5)
    assert texts(complete(http, max_tokens=5, echo=True)) == [expected]
    pieces = events(http, prompt=written.ids(PROMPT), max_tokens=5, echo=True)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == expected


def test_probabilities_name_the_tokens(http: httpx.Client) -> None:
    answer = complete(http, max_tokens=5, logprobs=3)
    found = answer["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == written.text(PROMPT, 5)
    assert found["text_offset"] == [0, 1, 2, 3, 4]
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert max(top.values()) == top[token] == value <= 0
        assert len(top) == 3
    parts = [piece["choices"][0]["logprobs"] for piece in events(http, prompt=PROMPT, max_tokens=5, logprobs=0)]
    assert [token for part in parts for token in part["tokens"]] == found["tokens"]
    assert [place for part in parts for place in part["text_offset"]] == [0, 1, 2, 3, 4]


def test_a_seed_repeats_a_drawn_text(http: httpx.Client) -> None:
    drawn = {"temperature": 3.0, "seed": 7, "max_tokens": 24, "ignore_eos": True}
    first = complete(http, **drawn, n=3)
    assert texts(complete(http, ["busy", PROMPT], **drawn))[1:] == texts(first)[:1]
    assert len({*texts(first)}) == 3
    assert texts(complete(http, **{**drawn, "seed": 8})) == texts(first)[1:2]
    assert texts(first)[0] != written.text(PROMPT, 24, stop=False)


def test_each_way_of_choosing_tokens_has_its_effect(http: httpx.Client) -> None:
    expected = written.text(PROMPT, 24, stop=False)
    base = {"max_tokens": 24, "seed": 1, "ignore_eos": True}
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert texts(complete(http, **base, temperature=5.0, **one)) == [expected]
    for other in ({"presence_penalty": 100}, {"frequency_penalty": 100}, {"repetition_penalty": 100}, {"top_k": 50}):
        more = {"temperature": 9.0} if "top_k" in other else {}
        assert texts(complete(http, **base, **other, **more)) != [expected]
    once = texts(complete(http, **base, presence_penalty=100))[0]
    assert len({*once}) == len(once)


def test_a_model_that_draws_does_so_unless_a_request_says_otherwise(http: httpx.Client) -> None:
    asked = {"model": "draws", "max_tokens": 24, "seed": 3, "ignore_eos": True}
    greedy = [written.text(PROMPT, 24, stop=False)]
    assert texts(complete(http, **asked)) != greedy
    assert texts(complete(http, **asked)) == texts(complete(http, **asked, temperature=3.0))
    assert texts(complete(http, **asked, temperature=0)) == greedy


NOTHING = {
    "n": 1, "best_of": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": None,
    "user": "me", "top_p": 1, "temperature": 0, "stop": [], "stream": False, "echo": False, "logprobs": None,
    "stream_options": None, "service_tier": "auto", "store": False, "metadata": {"a": "b"}, "top_k": -1, "min_p": 0,
    "repetition_penalty": 1.0, "ignore_eos": False, "stop_token_ids": [],
}  # fmt: skip


def test_values_that_change_nothing_are_accepted(http: httpx.Client) -> None:
    assert texts(complete(http, **NOTHING)) == [written.text(PROMPT, 16)]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"colour": 1}, "colour", "is not a field that this server knows"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "supports {} only, so leave it out"),
        ({"suffix": "end"}, "suffix", "leave it out"),
        ({"best_of": 3}, "best_of", "returns all answers"),
        ({"n": 0}, "n", "1 or more"),
        ({"n": 129}, "n", "the most of one request are 128"),
        ({"max_tokens": 0}, "max_tokens", "1 or more"),
        ({"max_tokens": "5"}, "max_tokens", "whole number"),
        ({"temperature": -1}, "temperature", "from 0 to 100"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"top_p": 0}, "top_p", "1e-06 to 1"),
        ({"top_k": -2}, "top_k", "at least 0"),
        ({"min_p": 2}, "min_p", "from 0 to 1"),
        ({"repetition_penalty": 0}, "repetition_penalty", "0.001"),
        ({"presence_penalty": 1000}, "presence_penalty", "-100 to 100"),
        ({"seed": 1.5}, "seed", "whole number"),
        ({"stop": [""]}, "stop", "1 to 1000 characters"),
        ({"stop": ["a"] * 17}, "stop", "over the limit of 16"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "list of at most 256 ids"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logprobs": 1, "echo": True}, "logprobs", "with echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "is for streams"),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other", "leave it out"),
        ({"service_tier": "flex"}, "service_tier", "'auto' or 'default'"),
        ({"prompt": None}, "prompt", "is missing"),
        ({"prompt": []}, "prompt", "must be a text"),
        ({"prompt": [[1], "a", 5]}, "prompt[2]", "must be a text"),
        ({"prompt": [96]}, "prompt", "the tokens 0 to 95"),
        ({"prompt": [-1]}, "prompt", "has token -1"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": ["a"] * 129}, "prompt", "over the limit of 128"),
        ({"priority": -1}, "priority", "is -1; it must be a whole number, 1 for the most urgent"),
        ({"timeout": 0.5}, "timeout", "is 0.5; it must be a whole number of microseconds"),
        ({"max_tokens": 1000}, None, "together they may have 128"),
        ({"model": "ids"}, "model", "no tokenizer"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_parameter_that_cannot_be_honoured_is_refused_by_its_name(
    http: httpx.Client, fields: dict[str, Any], param: str | None, message: str, stream: bool
) -> None:
    options = {"stream": True} if stream and "stream_options" not in fields else {}
    response = http.post("/v1/completions", json={"model": written.NAME, "prompt": PROMPT, **options, **fields})
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert message in error["message"]


def test_a_request_ends_at_its_own_timeout(http: httpx.Client) -> None:
    body = {"model": written.NAME, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}
    late = http.post("/v1/completions", json={**body, "timeout": 1, "priority": 1})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded"), late.text
    assert http.post("/v1/completions", json={**body, "timeout": 60_000_000}).status_code == 200


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json={"model": "other", "prompt": "x"})
    assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
    assert {model["id"] for model in http.get("/v1/models").json()["data"]} >= {written.NAME, "draws"}
