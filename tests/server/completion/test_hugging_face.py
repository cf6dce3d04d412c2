"""``POST /models/NAME`` of models that write text, and ``huggingface_hub``'s client unmodified."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient

from ingot import RunningServer
from tests.server.completion import written

PROMPT = "hello there"
PATH = f"/models/{written.NAME}"


def ask(http: httpx.Client, inputs: Any = PROMPT, **parameters: Any) -> Any:
    answer = http.post(PATH, json={"inputs": inputs, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_text_follows_the_prompt(http: httpx.Client) -> None:
    assert ask(http) == [{"generated_text": PROMPT + written.text(PROMPT, 20)}]
    new = ask(http, return_full_text=False, max_new_tokens=5)
    assert new == [{"generated_text": written.text(PROMPT, 5)}]
    several = ask(http, ["one", "two"], max_new_tokens=5, num_return_sequences=2)
    assert several == [[{"generated_text": text + written.text(text, 5)}] * 2 for text in ("one", "two")]


def test_do_sample_draws_tokens(http: httpx.Client) -> None:
    greedy = ask(http)
    assert ask(http, do_sample=False) == greedy
    assert ask(http, do_sample=True, seed=5, temperature=5.0) == ask(http, temperature=5.0, seed=5) != greedy


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"do_sample": False, "temperature": 0.5}, "'parameters.temperature' is 0.5, but do_sample is false"),
        ({"grammar": {}}, "'parameters.grammar'"),
        ({"details": True}, "'parameters.details' is True; this server supports False only"),
        ({"top_p": 2}, "'parameters.top_p' is 2"),
        ({"stop": [""]}, "'parameters.stop' must have"),
        ({"colour": 1}, "'parameters.colour' is not a field"),
    ],
)
def test_other_parameters_are_refused(http: httpx.Client, parameters: dict[str, Any], message: str) -> None:
    answer = http.post(PATH, json={"inputs": PROMPT, "parameters": parameters})
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_its_own_client_gets_texts_and_streams(server: RunningServer) -> None:
    client = InferenceClient(model=f"{server.http_url}{PATH}")
    expected = written.text(PROMPT, 12)
    assert client.text_generation(PROMPT, max_new_tokens=12, return_full_text=False) == expected
    assert "".join(client.text_generation(PROMPT, max_new_tokens=12, stream=True)) == expected
    talk = InferenceClient(base_url=f"{server.http_url}/v1").chat_completion(
        [{"role": "user", "content": "hello"}], model=written.NAME, max_tokens=5
    )
    assert talk.choices[0].message.content == written.text("u:hello;a:", 5)
