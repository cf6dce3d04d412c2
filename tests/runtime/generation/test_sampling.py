"""The choice of tokens, compared with the logits processors of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ingot.errors import InvalidArgument
from ingot.runtime.engines.decoder import sampling
from ingot.runtime.engines.decoder.step import KNOBS, Choice, Step
from ingot.runtime.generation.requests import Sampling
from ingot.tensors import Array

VOCAB = 5000


def logits(seed: int, spread: float = 3.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)


def probabilities(values: Array) -> Array:
    weights = np.exp(values.astype(np.float64) - values.max())
    found: Array = weights / weights.sum()
    return found


def drawn(values: Array, temperature: float, top_k: int, top_p: float, min_p: float, count: int = 4000) -> Array:
    """Return the share of each token among evenly spread numbers, which is its probability up to 1/count."""
    numbers = (np.arange(count) + 0.5) / count
    scratch = np.empty((2, VOCAB), np.float32)
    tokens = [sampling.draw(values, temperature, top_k, top_p, min_p, number, scratch) for number in numbers]
    found: Array = np.bincount(tokens, minlength=VOCAB) / count
    return found


@pytest.mark.matrix  # transformers takes seconds to import
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1, 0, 1, 0),
        (0.7, 50, 1, 0),
        (1.3, 0, 0.9, 0),
        (1, 0, 0.999, 0),
        (2, 0, 1, 0.02),
        (0.8, 40, 0.6, 0.1),
        (1, 1, 1, 0),
    ],
)
def test_tokens_are_drawn_from_the_distribution_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    import torch
    from transformers.generation import logits_process as processors

    values = logits(1)
    scores = torch.from_numpy(values)[None]
    chain: list[Any] = [processors.TemperatureLogitsWarper(float(temperature))]
    chain += [processors.TopKLogitsWarper(top_k)] if top_k else []
    chain += [processors.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [processors.MinPLogitsWarper(min_p)] if min_p else []
    for each in chain:
        scores = each(torch.zeros((1, 1), dtype=torch.long), scores)
    expected = torch.softmax(scores[0].double(), -1).numpy()
    found = drawn(values, temperature, top_k, top_p, min_p)
    assert np.abs(found - expected).max() < 1.5 / 4000
    assert not found[expected == 0].any()


def test_the_largest_values_are_found_without_a_sort() -> None:
    for seed in range(20):
        values = logits(seed).round(1) if seed % 2 else logits(seed)
        for count in (1, 7, 64, 77, 500, 4999):
            limit = np.sort(values)[-count]
            assert sampling.largest_of(values, count).tolist() == np.flatnonzero(values >= limit).tolist()


def step_inputs(choices: list[Choice], top: int = -1) -> dict[str, Array]:
    return Step(choices=choices, top=top).arrays


def choice(seed: int = 0, drawn: int = 0, *, prompt: int = 0, **knobs: float) -> Choice:
    values = vars(Sampling()) | knobs
    return Choice(tuple(float(values[name]) for name in KNOBS), seed, drawn, prompt, 100)


def chosen(
    rows: list[Array], choices: list[Choice], history: list[list[int]] | None = None, top: int = -1
) -> dict[str, Array]:
    def tokens(row: int) -> tuple[Array, int]:
        return np.array((history or [])[row], np.int32), choices[row].prompt

    return sampling.choose(np.stack(rows), step_inputs(choices, top), tokens)


def test_equal_seeds_choose_equal_tokens_whatever_the_neighbours() -> None:
    alone = [chosen([logits(1)], [choice(7, place, temperature=1)])["tokens"][0] for place in range(20)]
    rows, others = [logits(2), logits(1), logits(3)], choice(8, temperature=2, top_k=3)
    noise = np.float32(1e-6) * np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
    rows[1] = rows[1] + noise  # as batches of other sizes round
    among = [chosen(rows, [others, choice(7, place, temperature=1), choice()])["tokens"][1] for place in range(20)]
    assert among == alone
    assert len({*alone}) > 10
    assert chosen([logits(1)], [choice(8, temperature=1)])["tokens"][0] != alone[0]


def test_numbers_are_uniform_and_independent_of_one_another() -> None:
    seeds, places = (each.ravel() for each in np.meshgrid(np.arange(100), np.arange(100)))
    numbers = sampling.uniform(seeds.astype(np.uint64), places)
    counts = np.histogram(numbers, 20, (0, 1))[0]
    assert ((counts - 500) ** 2 / 500).sum() < 43.8  # the 99.9th percentile of chi-squared with 19 degrees
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.04


@pytest.mark.matrix
def test_a_penalty_of_repetition_is_that_of_transformers() -> None:
    import torch
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    for seed in range(5):
        values = logits(seed)
        history = [int(values.argmax()), int(np.argsort(values)[-2]), 5, 5]
        scores = RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([history]), torch.from_numpy(values.copy())[None])
        found = chosen([values], [choice(repetition_penalty=3.0)], [history])
        assert found["tokens"][0] == int(scores.argmax())


def test_presence_and_frequency_count_the_answer_alone() -> None:
    values = np.zeros(VOCAB, np.float32)
    values[[10, 11, 12]] = 5, 4.5, 3
    history = [10, 10, 11, 11, 11]

    def best(prompt: int, presence_penalty: float = 0, frequency_penalty: float = 0) -> int:
        given = choice(prompt=prompt, presence_penalty=presence_penalty, frequency_penalty=frequency_penalty)
        return int(chosen([values], [given], [history])["tokens"][0])

    assert best(5, presence_penalty=2) == 10
    assert best(2, presence_penalty=2) == 10
    assert best(1, presence_penalty=2) == 10  # 5 - 2 against 4.5 - 2
    assert best(1, frequency_penalty=0.6) == 10
    assert best(0, frequency_penalty=1.1) == 12


def test_probabilities_are_those_of_the_models_own_logits() -> None:
    rows = [logits(1), logits(2)]
    expected = [np.log(probabilities(each)) for each in rows]
    choices = [choice(), choice(temperature=3, repetition_penalty=2)]
    found = chosen([each.copy() for each in rows], choices, [[], [int(rows[1].argmax())]], top=4)
    for row, values in enumerate(expected):
        assert found["logprobs"][row] == pytest.approx(values[found["tokens"][row]], abs=1e-5)
        assert found["top_tokens"][row].tolist() == np.argsort(-values, kind="stable")[:4].tolist()
        np.testing.assert_allclose(found["top_logprobs"][row], np.sort(values)[::-1][:4], atol=1e-5)
    assert chosen(rows[:1], [choice()], top=-1)["logprobs"].size == 0


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("top_p", 0), ("min_p", 1.5), ("top_k", -2), ("temperature", float("nan"))]
)
def test_values_outside_of_their_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=rf"'{name}' is .*; it must be (from|at least)"):
        Sampling(**{name: value})  # type: ignore[arg-type]
