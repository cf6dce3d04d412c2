"""The decoder's engine with a policy in front of it: the tokens are those of each prompt alone, without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.errors import InvalidArchive
from ingot.runtime.dispatch.output_check import OutputCheck
from ingot.runtime.engines.decoder.engine import DecoderEngine
from ingot.runtime.engines.decoder.step import SIGNATURE, chunks_of, grouped
from ingot.runtime.generation import offline
from ingot.runtime.generation.requests import GREEDY, GenerationRequest, Sampling
from ingot.tensors import Array, check_inputs
from tests.runtime.generation import decoders


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecoderEngine]:
    engine = DecoderEngine(decoders.save(tmp_path_factory.mktemp("decoder")), decoders.options(), threads=1)
    yield engine
    engine.close()


def requests(count: int, **more: object) -> list[GenerationRequest]:
    random = np.random.default_rng(1)
    sizes = random.integers(1, 40, (count, 2)).tolist()
    return [
        GenerationRequest(prompt=random.integers(2, decoders.VOCAB, size), max_tokens=most, **more)  # type: ignore[arg-type]
        for size, most in sizes
    ]


def test_answers_that_share_steps_are_those_of_each_prompt_alone(engine: DecoderEngine) -> None:
    asked = requests(24, stop_ids=frozenset((7, 8, 9)))

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        check_inputs(SIGNATURE, inputs)
        return OutputCheck(SIGNATURE).checked(engine.run(inputs), 1)

    found = offline.answers(run, decoders.options(), asked)
    expected = [decoders.greedy(each.prompt.tolist(), each.max_tokens or 0, (7, 8, 9)) for each in asked]
    assert found == expected
    assert len({len(tokens) for tokens in found}) > 5


def test_prompts_that_are_read_in_one_call_have_the_tokens_of_each_alone(engine: DecoderEngine) -> None:
    random = np.random.default_rng(2)
    asked = [
        GenerationRequest(prompt=random.integers(2, decoders.VOCAB, size), max_tokens=12, sampling=sampling)
        for size in (9, 12, 20, 5, 14, 3, 1, 28)
        for sampling in (GREEDY, Sampling(repetition_penalty=1.3))
    ]
    calls: list[list[int]] = []

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        calls.extend([chunk.tokens.size for chunk in group] for group in grouped(chunks_of(inputs)))
        return engine.run(inputs)

    found = offline.answers(run, decoders.options(), asked)
    assert sum(len(call) > 1 and len({*call}) > 1 for call in calls) >= 3
    assert found == [offline.answers(engine.run, decoders.options(), [each])[0] for each in asked]
    assert found[::2] == [decoders.greedy(each.prompt.tolist(), 12) for each in asked[::2]]


def test_the_model_has_a_gap_that_makes_equal_tokens_meaningful() -> None:
    for each in requests(8):
        two = np.sort(decoders.logits(each.prompt.tolist()))[-2:]
        assert two[1] - two[0] > 1e-3


@pytest.mark.parametrize(
    ("name", "declared", "message"),
    [
        ("layers", 1, "has 1 layer more than 'generation'"),
        ("layers", 5, r"has no tensor past_key_values.2.key, and 'generation' .* \['any', .*, 'any', .*\]"),
        ("kv_heads", 7, "declares it with the sizes .'any', 7, "),
        ("head_size", 24, ", 24.$"),
        ("vocab", 9, "the tensor logits .*sizes .'any', 9.$"),
    ],
)
def test_a_graph_that_is_not_the_declared_one(tmp_path: Path, name: str, declared: int, message: str) -> None:
    options: Any = {**decoders.options(), name: declared}
    with pytest.raises(InvalidArchive, match=message):
        DecoderEngine(decoders.save(tmp_path), options)
