"""Decoders behind the ports: requests of any length share steps, and none of them leaves a slot behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import ingot
from ingot import RunningServer
from ingot.errors import InvalidArgument
from ingot.runtime.machine.memory import engine_processes
from tests.runtime.generation import decoders
from tests.server.outside import wait_until
from tests.support import matrix

CONTEXT = 64


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return decoders.archive(tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[RunningServer]:
    with ingot.serve(path, http_port=0, grpc_port=0, slots=4, context=CONTEXT) as running:
        yield running


def body(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "prompt", "datatype": "INT64", "shape": [len(prompt)], "data": prompt}], **more}


async def ask(client: httpx.AsyncClient, prompt: list[int], **more: Any) -> httpx.Response:
    return await client.post("/v2/models/decoder/infer", json=body(prompt, **more))


async def ask_all(server: RunningServer, asked: list[list[int]], seconds: float) -> list[list[int]]:
    """Return the answers to prompts that are sent at random within some seconds."""
    drawn = random.Random(1)

    async def later(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        await asyncio.sleep(drawn.random() * seconds)
        return tokens_of(await ask(client, prompt))

    async with httpx.AsyncClient(base_url=server.http_url, trust_env=False, timeout=60) as client:
        return await asyncio.gather(*(later(client, prompt) for prompt in asked))


def tokens_of(answer: httpx.Response) -> list[int]:
    (output,) = answer.json()["outputs"]
    tokens: list[int] = output["data"]
    return tokens


def slots_in_use(server: RunningServer) -> float:
    text = httpx.get(f"{server.http_url}/metrics", trust_env=False).text
    (found,) = re.findall(r"^ingot_slots_in_use\{.*\} (\S+)$", text, re.MULTILINE)
    return float(found)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    drawn = random.Random(seed)
    return [[drawn.randrange(2, decoders.VOCAB) for _ in range(drawn.randint(1, CONTEXT - 1))] for _ in range(count)]


def greedy(prompt: list[int]) -> list[int]:
    return decoders.greedy(prompt, CONTEXT - len(prompt), decoders.GENERATION.eos)


async def test_requests_that_arrive_at_random_get_the_tokens_of_each_alone(server: RunningServer) -> None:
    asked = prompts(64)
    assert await ask_all(server, asked, 0.5) == [greedy(prompt) for prompt in asked]


@pytest.mark.parametrize("family", matrix("llama", "gpt2", "qwen2", "mistral", "gpt_neox"))
def test_the_tokens_are_those_of_generate(tmp_path: Path, family: str) -> None:
    import torch

    from ingot.export.decoder.pipeline import export_decoder
    from tests.export.decoder import tiny

    grouped: dict[str, Any] = {} if family.startswith("gpt") else {"num_key_value_heads": 2}
    model = tiny.save(tmp_path / "original", family, **grouped)
    path = tmp_path / "decoder.ingot"
    export_decoder(tmp_path / "original", name="decoder").save(path)
    asked = prompts(64, seed=5)
    with ingot.serve(path, http_port=0, grpc_port=0, slots=16, context=CONTEXT) as server:
        found = asyncio.run(ask_all(server, asked, 1))
    for prompt, tokens in zip(asked, found, strict=True):
        ids = torch.tensor([prompt])
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=CONTEXT - len(prompt),
            do_sample=False,
            pad_token_id=0,
        )
        expected = answer[0, len(prompt) :].tolist()
        assert tokens == (expected[:-1] if expected[-1] == model.generation_config.eos_token_id else expected)


async def test_clients_that_leave_and_deadlines_leave_no_slot_in_use(server: RunningServer) -> None:
    drawn = random.Random(2)
    asked = prompts(500, seed=3)
    codes: list[int] = []

    async def hurried(client: httpx.AsyncClient, prompt: list[int]) -> None:
        await asyncio.sleep(drawn.random() * 3)
        leaves = drawn.random() < 0.3
        parameters = {"parameters": {"timeout": drawn.randrange(1, 400_000)}} if drawn.random() < 0.5 else {}
        with contextlib.suppress(asyncio.TimeoutError):
            answer = await asyncio.wait_for(ask(client, prompt, **parameters), drawn.random() / 5 if leaves else 60)
            codes.append(answer.status_code)
            if answer.status_code == 200:
                assert tokens_of(answer) == greedy(prompt)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.http_url, trust_env=False, timeout=60, limits=limits) as client:
        await asyncio.gather(*(hurried(client, prompt) for prompt in asked))
        assert {*codes} <= {200, 504}
        assert 50 < len(codes) < 500
        assert tokens_of(await ask(client, asked[0])) == greedy(asked[0])
    await asyncio.to_thread(wait_until, lambda: slots_in_use(server) == 0)


async def test_the_end_of_an_engine_process_ends_each_answer_once(server: RunningServer) -> None:
    prompt = [5, 6, 7]
    async with httpx.AsyncClient(base_url=server.http_url, trust_env=False, timeout=60) as client:
        running = [asyncio.ensure_future(ask(client, [*prompt, place])) for place in range(2, 90)]
        await asyncio.to_thread(wait_until, lambda: slots_in_use(server) > 0)
        for process in engine_processes():
            os.kill(int(process), signal.SIGKILL)
        answers = await asyncio.gather(*running)
        failed = [answer for answer in answers if answer.status_code != 200]
        assert failed
        assert all("the engine process of model 'decoder' ended by SIGKILL" in answer.text for answer in failed)
        await answered(client, prompt)
    assert slots_in_use(server) == 0


@pytest.mark.matrix
async def test_a_step_that_does_not_end_ends_each_answer_once(path: Path) -> None:
    before = {*engine_processes()}
    with ingot.serve(path, http_port=0, grpc_port=0, slots=4, context=CONTEXT, engine_timeout=1) as server:
        async with httpx.AsyncClient(base_url=server.http_url, trust_env=False, timeout=60) as client:
            (process,) = {*engine_processes()} - before
            running = [asyncio.ensure_future(ask(client, [5, 6, place])) for place in range(2, 90)]
            await asyncio.to_thread(wait_until, lambda: slots_in_use(server) > 0)
            os.kill(int(process), signal.SIGSTOP)  # the call neither ends nor can be asked to end
            answers = await asyncio.gather(*running)
            assert {*engine_processes()}.isdisjoint({process})
            failed = [answer for answer in answers if answer.status_code != 200]
            assert 1 <= len(failed) <= 4
            assert {answer.status_code for answer in failed} == {504}, failed[0].text
            (message,) = {answer.json()["error"] for answer in failed}
            assert message.startswith("the engine call of model 'decoder' took longer than its limit of 1s")
            await asyncio.to_thread(wait_until, lambda: slots_in_use(server) == 0)
            await answered(client, [5, 6, 7])


async def answered(client: httpx.AsyncClient, prompt: list[int]) -> None:
    """Wait until a prompt is answered, and check the answer."""
    for _ in range(200):
        answer = await ask(client, prompt)
        if answer.status_code == 200:
            break
        await asyncio.sleep(0.1)
    assert tokens_of(answer) == greedy(prompt)


@pytest.mark.matrix
async def test_reloading_by_the_command_finishes_open_streams(tmp_path: Path) -> None:
    path, management = decoders.archive(tmp_path), str(tmp_path / "management")
    with ingot.serve(path, http_port=0, grpc_port=0, management=management, slots=4, context=CONTEXT) as server:
        prompt = [5, 6, 7]
        async with httpx.AsyncClient(base_url=server.http_url, trust_env=False, timeout=60) as client:
            running = [asyncio.ensure_future(ask(client, [*prompt, place])) for place in range(2, 90)]
            await asyncio.to_thread(wait_until, lambda: slots_in_use(server) > 0)
            changed = decoders.GENERATION.model_copy(update={"eos": (2,)})
            decoders.archive(tmp_path, generation=changed)
            command = [sys.executable, "-m", "ingot", "server", "reload", "decoder", "--server", management]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.rstrip().endswith("ok")
            for place, answer in enumerate(await asyncio.gather(*running), start=2):
                assert tokens_of(answer) == greedy([*prompt, place])
            assert tokens_of(await ask(client, prompt)) == decoders.greedy(prompt, CONTEXT - 3, (2,))


def test_what_does_not_fit_is_refused_with_the_remedy(server: RunningServer, path: Path) -> None:
    with httpx.Client(base_url=server.http_url, trust_env=False) as client:
        for prompt, message in (
            ([1] * CONTEXT, f"together they may have {CONTEXT}"),
            ([decoders.VOCAB], "the model knows those from 0 to 95"),
            ([], "is 0, the model takes 1 or more"),
        ):
            answer = client.post("/v2/models/decoder/infer", json=body(prompt))
            assert answer.status_code == 400
            assert message in answer.text
    with pytest.raises(InvalidArgument, match="--context 500 is more than the 128 positions"):
        ingot.serve(path, http_port=0, grpc_port=0, context=500)
