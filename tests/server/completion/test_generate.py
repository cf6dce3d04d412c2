"""Texts of an exported decoder against ``generate()`` and ``apply_chat_template`` of transformers, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers

import ingot
from tests.export.decoder import tiny
from tests.support import RunIngot, succeeded

pytestmark = pytest.mark.matrix

PROMPTS = ["hello there", "the film", "größer 中文 🦊", "a b c d e f g"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoders") / "tiny"
    tiny.save(path, num_key_value_heads=2)
    return path


@pytest.fixture
def http(run_ingot: RunIngot, folder: Path) -> Iterator[httpx.Client]:
    archive = folder.parent / "tiny.ingot"
    succeeded(run_ingot("export", folder, "--out", archive))
    with (
        ingot.serve(str(archive), http_port=0, grpc_port=0) as server,
        httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as client,
    ):
        yield client


def test_texts_and_streams_are_those_of_generate(http: httpx.Client, folder: Path) -> None:
    auto: Any = transformers.AutoTokenizer
    tokenizer = auto.from_pretrained(folder)
    causal: Any = transformers.AutoModelForCausalLM
    model = causal.from_pretrained(folder).eval()

    def expected(given: Any) -> str:
        made = model.generate(**given, max_new_tokens=40, do_sample=False)[0][given["input_ids"].shape[1] :]
        text: str = tokenizer.decode(made, skip_special_tokens=True)
        return text

    for prompt in PROMPTS:
        whole = expected(tokenizer(prompt, return_tensors="pt"))
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 40}
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == whole
        lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x"}, {"role": "user", "content": "é"}]
    given = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = http.post("/v1/chat/completions", json={"model": "tiny", "messages": talk, "max_tokens": 40}).json()
    assert answer["choices"][0]["message"]["content"] == expected(given)
    assert answer["usage"]["prompt_tokens"] == given["input_ids"].shape[1]
