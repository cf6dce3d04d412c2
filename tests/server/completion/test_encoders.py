"""Encoder-decoders through the APIs: answers equal ``generate()``'s, whatever else the server does."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

import ingot
from ingot import RunningServer
from ingot.export.decoder.pipeline import export_decoder
from ingot.model_store import Archive, BlobFolder
from ingot.model_store.format.variant import add_variant
from tests.export.decoder import tiny
from tests.support import RunIngot

FAMILIES = ("t5", "bart")
TEXTS = ["the film", "hello there", "an answer to a question of the user and the cast was bright", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    for family in FAMILIES:
        model = tiny.save_encoder_decoder(folder / family, family)
        model.generation_config.no_repeat_ngram_size = 2
        model.generation_config.save_pretrained(folder / family)
        task: Any = "translation" if family == "t5" else "text2text-generation"
        export_decoder(folder / family, task=task).save(folder / f"{family}.ingot")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    archives = [str(folder / f"{family}.ingot") for family in FAMILIES]
    with ingot.serve(*archives, http_port=0, grpc_port=0, slots=4, context=64) as running:
        yield running


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[tuple[str, str, int], str]:
    """The texts of ``generate()``, by family, prompt and most tokens."""
    found = {}
    for family in FAMILIES:
        auto: Any = transformers.AutoModelForSeq2SeqLM
        model = auto.from_pretrained(folder / family).eval()
        words: Any = transformers.AutoTokenizer.from_pretrained(folder / family)
        for text in TEXTS:
            for most in (3, 11, 24):
                with torch.no_grad():
                    made = model.generate(**_inputs(words, text), max_new_tokens=most, do_sample=False)
                found[family, text, most] = words.decode(made[0, 1:], skip_special_tokens=True)
    return found


def _inputs(words: Any, text: str) -> Any:
    given = words(text, return_tensors="pt")
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def test_mixed_requests_at_random_times_get_the_tokens_of_generate(
    server: RunningServer, answers: dict[tuple[str, str, int], str]
) -> None:
    drawn = random.Random(0)

    async def ask(client: httpx.AsyncClient, family: str, text: str, most: int) -> str:
        await asyncio.sleep(drawn.random() / 2)
        body = {"model": family, "prompt": text, "max_tokens": most}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    async def leave(client: httpx.AsyncClient, family: str) -> None:
        await asyncio.sleep(drawn.random() / 2)
        body = {"model": family, "prompt": TEXTS[2], "max_tokens": 24, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break

    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.http_url, trust_env=False, timeout=60) as client:
            asked = [drawn.choice([*answers]) for _ in range(32)]
            leaving = [leave(client, family) for family in FAMILIES * 3]
            found = await asyncio.gather(*(ask(client, *each) for each in asked), *leaving)
        assert found[: len(asked)] == [answers[each] for each in asked]

    asyncio.run(run())


def test_each_api_has_the_answer_in_its_form(
    server: RunningServer, answers: dict[tuple[str, str, int], str], run_ingot: RunIngot
) -> None:
    expected = answers["t5", "the film", 11]
    assert len(expected) > 5
    with httpx.Client(base_url=server.http_url, trust_env=False, timeout=60) as http:
        body = {"inputs": "the film", "parameters": {"max_new_tokens": 11}}
        assert http.post("/models/t5", json=body).json() == [{"translation_text": expected}]
        other = {"inputs": "the film", "parameters": {"max_new_tokens": 11}}
        assert http.post("/models/bart", json=other).json() == [{"generated_text": answers["bart", "the film", 11]}]
        body = {"text_input": "the film", "parameters": {"max_tokens": 11}}
        assert http.post("/v2/models/t5/generate", json=body).json()["text_output"] == expected
        assert http.get("/v2/models/t5").json()["properties"]["task"] == "translation"
    shown = run_ingot("infer", server.http_url, "t5", "--input", "text=the film", "--parameter", "max_tokens=11")
    assert shown.stdout.rstrip("\n") == expected.rstrip("\n"), shown.stderr


def test_the_time_of_an_encoder_is_that_of_reading(server: RunningServer) -> None:
    def read() -> float:
        lines = httpx.get(f"{server.http_url}/metrics", trust_env=False).text.splitlines()
        [line] = [line for line in lines if name.match(line)]
        return float(line.rpartition(" ")[2])

    name = re.compile(r'ingot_decoding_seconds_count\{model="t5",.*stage="read"')
    before = read()
    body = {"model": "t5", "prompt": "the film", "max_tokens": 3}
    assert httpx.post(f"{server.http_url}/v1/completions", json=body, trust_env=False).status_code == 200
    assert read() == before + 1


@pytest.mark.parametrize("options", [(), ("--recipe", "static-int8")])
def test_its_weights_are_not_quantized(
    folder: Path, tmp_path: Path, run_ingot: RunIngot, options: tuple[str, ...]
) -> None:
    result = run_ingot("quantize", folder / "t5.ingot", *options, "-o", tmp_path / "q.ingot")
    assert result.returncode == 1
    assert "'t5' is an encoder-decoder, whose weights are not quantized" in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", {"prompt": "a", "echo": True}, "'echo' is for models that continue their prompts"),
        ("/v1/completions", {"prompt": "a" * 200}, "the encoder reads 64: shorten it, or raise --context"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 64}, "together they may have 64"),
        (
            "/models/t5",
            {"inputs": "a", "parameters": {"return_full_text": True}},
            "return_full_text' is for models",
        ),
    ],
)
def test_a_request_that_does_not_fit_is_refused(
    server: RunningServer, path: str, body: dict[str, Any], reason: str
) -> None:
    model = {"model": "t5"} if path.startswith("/v1") else {}
    response = httpx.post(server.http_url + path, json={**model, **body}, trust_env=False)
    assert response.status_code == 400, response.text
    assert reason in response.text


@pytest.mark.matrix
def test_answers_that_start_with_several_tokens_may_have_shorter_sources(folder: Path) -> None:
    exported, start = export_decoder(folder / "t5"), (1, 2, 3, 4)
    variant, blobs = exported.variant(), exported.blobs
    assert isinstance(blobs, BlobFolder)
    generation = variant.serving.generation
    assert generation is not None
    assert generation.encoder is not None
    declared = generation.model_copy(update={"encoder": generation.encoder.model_copy(update={"start": start})})
    serving = variant.serving.model_copy(update={"generation": declared})
    files = variant.step_files()
    descriptor = add_variant(blobs, serving, variant.graph, variant.weights, (), step_files=files)
    Archive.create(blobs, [descriptor]).save(folder / "start.ingot")
    auto: Any = transformers.AutoModelForSeq2SeqLM
    model = auto.from_pretrained(folder / "t5").eval()
    with ingot.serve(str(folder / "start.ingot"), http_port=0, grpc_port=0, slots=2, context=64) as server:
        for source in ([7], [7, 8, 9], [7, 8, 9, 10, 11]):
            tensors = {"input_ids": torch.tensor([source]), "attention_mask": torch.ones(1, len(source))}
            with torch.no_grad():
                made = model.generate(
                    **tensors, decoder_input_ids=torch.tensor([start]), max_new_tokens=8, do_sample=False
                )
            tensor = {"name": "prompt", "datatype": "INT64", "shape": [len(source)], "data": source}
            response = httpx.post(f"{server.http_url}/v2/models/t5/infer", json={"inputs": [tensor]}, trust_env=False)
            assert response.status_code == 200, response.text
            expected = made[0, len(start) :].tolist()
            assert response.json()["outputs"][0]["data"][: len(expected)] == expected
