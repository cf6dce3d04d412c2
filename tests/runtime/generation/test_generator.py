"""A decoder as a model that is loaded: streams, their ends, and what ends them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import DeadlineExceeded, IngotError, InvalidArgument, Unavailable, Unsupported
from ingot.model_store import Archive
from ingot.runtime import Metrics, Model, Settings
from ingot.runtime.generation.requests import Finished, GenerationRequest, Sampling, Stream, Token
from ingot.runtime.loading.source import ModelSource
from ingot.runtime.loading.trust_check import ServingTerms
from ingot.runtime.machine import memory
from ingot.runtime.settings.canary import Plan
from ingot.serving.traffic_split import TrafficSplit
from tests.runtime.generation import decoders
from tests.runtime.waiting import wait_until

PROMPT = np.array([5, 6, 7])


def made(folder: Path, *, metrics: Metrics | None = None, **settings: Any) -> Model:
    folder.mkdir(exist_ok=True)
    chosen = Settings(isolate="none", **settings)
    archive = Archive.open(decoders.archive(folder)).unpacked()
    return Model("decoder", "1", ModelSource.of_archive(archive, chosen, "decoder"), ServingTerms(chosen), metrics)


@contextlib.asynccontextmanager
async def loaded(folder: Path, *, metrics: Metrics | None = None, **settings: Any) -> AsyncIterator[Model]:
    model = made(folder, metrics=metrics, **settings)
    model.load()
    try:
        yield model
    finally:
        await model.drain()
        model.close()


async def read(stream: Stream) -> tuple[list[int], Finished]:
    *tokens, last = [item async for item in stream]
    assert isinstance(last, Finished)
    return [token.id for token in tokens if isinstance(token, Token)], last


async def test_a_stream_has_each_token_and_then_its_end(tmp_path: Path) -> None:
    expected = decoders.greedy(PROMPT.tolist(), 12)
    async with loaded(tmp_path) as model:
        tokens, end = await read(model.generate(GenerationRequest(prompt=PROMPT, max_tokens=12)))
        assert (tokens, end) == (expected, Finished("length", 3, 12))
        stop = frozenset(expected[5:6])
        tokens, end = await read(model.generate(GenerationRequest(prompt=PROMPT, max_tokens=12, stop_ids=stop)))
        assert (tokens, end.reason) == (expected[: expected.index(expected[5])], "stop")
        found = await model.infer({"prompt": PROMPT})
        assert found["tokens"].tolist()[:12] == decoders.greedy(PROMPT.tolist(), 12, (1,))
        assert model.in_flight == 0


async def test_a_seed_gives_the_same_tokens_whatever_else_runs(tmp_path: Path) -> None:
    sampling = Sampling(temperature=30, top_p=0.99, seed=7)
    request = GenerationRequest(prompt=PROMPT, max_tokens=20, sampling=sampling)
    other = GenerationRequest(prompt=PROMPT, max_tokens=40, sampling=Sampling(temperature=30))
    async with loaded(tmp_path) as model:
        alone, _ = await read(model.generate(request))
        others = [model.generate(other) for _ in range(3)]
        again, _ = await read(model.generate(request))
        assert again == alone
        different = {tuple((await read(stream))[0]) for stream in others}
        assert len(different) == 3


async def test_a_client_that_leaves_frees_its_row(tmp_path: Path) -> None:
    async with loaded(tmp_path, slots=1) as model:
        stream = model.generate(GenerationRequest(prompt=PROMPT))
        await anext(stream)
        waiting = model.generate(GenerationRequest(prompt=PROMPT, max_tokens=2))
        assert model.waiting == 1
        await stream.aclose()
        assert not any(isinstance(item, Finished) for item in [item async for item in stream])
        assert (await read(waiting))[1] == Finished("length", 3, 2)


async def test_an_answer_that_its_reader_ends_counts_as_answered(tmp_path: Path) -> None:
    async with loaded(tmp_path) as model:
        for end, answered in ((Stream.stop, 1), (Stream.aclose, 1)):
            stream = model.generate(GenerationRequest(prompt=PROMPT))
            await anext(stream)
            await end(stream)
            statistics = model.statistics()
            assert (statistics.answered.count, statistics.failed.count, model.in_flight) == (answered, 0, 0)


async def test_a_deadline_ends_a_stream_with_one_error(tmp_path: Path) -> None:
    async with loaded(tmp_path) as model:
        stream = model.generate(GenerationRequest(prompt=PROMPT, timeout=0.005))
        with pytest.raises(DeadlineExceeded, match="did not answer within"):
            await read(stream)
        assert [item async for item in stream] == []


async def test_a_model_that_is_unloaded_finishes_its_streams_first(tmp_path: Path) -> None:
    async with loaded(tmp_path) as model:
        stream = model.generate(GenerationRequest(prompt=PROMPT, max_tokens=30))
        await anext(stream)
        drained = asyncio.ensure_future(model.drain())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="draining"):
            model.generate(GenerationRequest(prompt=PROMPT))
        tokens, end = await read(stream)
        assert (len(tokens), end.completion_tokens) == (29, 30)
        await drained


async def test_a_model_that_is_closed_ends_its_streams_with_one_error(tmp_path: Path) -> None:
    model = made(tmp_path)
    model.load()
    streams = [model.generate(GenerationRequest(prompt=PROMPT)) for _ in range(3)]
    await anext(streams[0])
    await asyncio.to_thread(model.close)
    for stream in streams:
        with pytest.raises(Unavailable, match="is unloaded"):
            await read(stream)


async def test_a_candidate_answers_streams_and_is_compared(tmp_path: Path) -> None:
    greedy = GenerationRequest(prompt=PROMPT, max_tokens=10)
    async with loaded(tmp_path / "one") as current, loaded(tmp_path / "two") as candidate:
        split = TrafficSplit(current, candidate, Plan(compare=100), Metrics())
        split.weight = 100.0
        current.split(split)
        assert (await read(current.generate(greedy)))[0] == decoders.greedy(PROMPT.tolist(), 10)
        drawn = GenerationRequest(prompt=PROMPT, max_tokens=10, sampling=Sampling(temperature=30))
        await read(current.generate(drawn))
        await wait_until(lambda: split.drift.compared)
        assert (split.drift.compared, split.drift.differed) == (1, 0)
        assert split.sides[candidate].answered == 2

        stream = current.generate(GenerationRequest(prompt=PROMPT))
        await anext(stream)
        await asyncio.to_thread(candidate.close)
        with pytest.raises(Unavailable, match="has failed after its first tokens"):
            await read(stream)
        assert (await read(current.generate(greedy)))[1].completion_tokens == 10
        current.split(None)


@pytest.mark.matrix
async def test_memory_stays_as_it_is_over_many_requests(tmp_path: Path) -> None:
    drawn = random.Random(0)

    async def one(model: Model) -> None:
        prompt = np.array([drawn.randrange(2, decoders.VOCAB) for _ in range(drawn.randint(1, 60))])
        sampling = Sampling(temperature=drawn.choice((0, 5)), top_p=0.9, repetition_penalty=drawn.choice((1, 1.1)))
        given = GenerationRequest(prompt=prompt, max_tokens=drawn.randint(1, 20), sampling=sampling, logprobs=2)
        stream = model.generate(given)
        if drawn.random() < 0.2:
            await anext(stream)
            await stream.aclose()
        else:
            await read(stream)

    async with loaded(tmp_path) as model:
        held = []
        for _ in range(4):
            for _ in range(25):
                await asyncio.gather(*(one(model) for _ in range(20)))
            held.append(memory.resident())
        assert model.in_flight == 0
        assert held[3] - held[0] < 4 << 20


async def test_a_model_is_loaded_again_with_its_settings(tmp_path: Path) -> None:
    model = made(tmp_path, slots=2, context=20)
    for _ in range(2):
        model.load(parkable=True)
        assert model.engine_settings["context"] == "20"
        with pytest.raises(InvalidArgument, match="together they may have 20"):
            model.generate(GenerationRequest(prompt=PROMPT, max_tokens=18))
        assert len((await read(model.generate(GenerationRequest(prompt=PROMPT, max_tokens=17))))[0]) == 17
        await model.drain()
        model.close()


def test_a_cache_that_does_not_fit_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 1000.0)
    with pytest.raises(
        Unavailable, match=r"the cache of 16 slots of 128 tokens takes 512 KiB.*lower --slots or --context"
    ):
        made(tmp_path).load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "openvino"}, "cannot run a model that generates tokens"),
        ({"device": "cuda"}, "run on the CPU"),
        ({"instances": 2}, "a decoder has one instance"),
        ({"states": {"prompt": "tokens"}}, "a decoder keeps its own cache"),
    ],
)
def test_what_cannot_run_a_decoder_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        made(tmp_path, **settings).load()


def test_a_decoder_that_chooses_other_tokens_is_not_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = decoders.greedy
    monkeypatch.setattr(decoders, "greedy", lambda *given: [*right(*given)[:-1], 0])
    with pytest.raises(IngotError, match="does not reproduce its golden tokens: token 7 of golden case 0"):
        made(tmp_path).load()


async def test_a_model_that_is_loaded_again_goes_on_counting_tokens(tmp_path: Path) -> None:
    metrics, counted = Metrics(), []
    request = GenerationRequest(prompt=np.arange(2, 42), max_tokens=2)
    for _ in range(2):
        async with loaded(tmp_path, metrics=metrics) as model:
            await read(model.generate(request))
            await read(model.generate(request))
        counted.append([metrics.tokens.labels("decoder", "1", kind).value for kind in ("prompt", "reused", "answer")])
    assert counted == [[41, 39, 4], [82, 78, 8]]
