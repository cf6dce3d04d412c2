"""Requests of different sizes share a call without a change of any answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.runtime import BatchRunner, Entry
from ingot.runtime.dispatch import padding
from ingot.runtime.dispatch.padding import PaddingPolicy
from ingot.runtime.dispatch.signature_check import CallLimit, SignatureCheck
from ingot.tensors import Array, DType, Padding, Range, Signature, TensorSpec
from ingot.tensors.padding import Padder
from tests.runtime.fake_engines import FunctionEngine

IDS = TensorSpec("ids", DType.INT64, ("batch", "seq"))
MASK = TensorSpec("mask", DType.FP32, ("batch", "seq"))
SIGNATURE = Signature(
    (IDS, MASK),
    (TensorSpec("sum", DType.FP32, ("batch",)), TensorSpec("each", DType.INT64, ("batch", "seq"))),
    "batch",
    {"seq": Range(1, 100)},
)
PADDINGS = {"seq": Padding({"ids": 7, "mask": 0})}


def masked_sum(inputs: Mapping[str, Array]) -> dict[str, Array]:
    return {"sum": (inputs["ids"] * inputs["mask"]).sum(1).astype(np.float32), "each": inputs["ids"] * 2}


def request(length: int, samples: int = 1, first: int = 1) -> dict[str, Array]:
    ids = np.arange(first, first + samples * length).reshape(samples, length)
    return {"ids": ids, "mask": np.ones((samples, length), np.float32)}


def entry(length: int, samples: int = 1, first: int = 1) -> Entry:
    return Entry(request(length, samples, first), samples, lambda outcome: None, 0.0)


def policy(paddings: Mapping[str, Padding] = PADDINGS, *, rounded: bool = False) -> PaddingPolicy:
    return PaddingPolicy(Padder(SIGNATURE, paddings), (5,), rounded=rounded)


def ask(made: PaddingPolicy | None, entries: Sequence[Entry]) -> tuple[FunctionEngine, BatchRunner]:
    """Run a batch, and check that every answer equals that of the request alone."""
    engine = FunctionEngine(masked_sum, SIGNATURE)
    runner = BatchRunner(engine, SIGNATURE, made)
    for item, outcome in zip(entries, runner.run(entries), strict=True):
        assert isinstance(outcome, Mapping)
        for name, value in masked_sum(item.inputs).items():
            assert np.array_equal(outcome[name], value)
    return engine, runner


def test_lengths_of_a_batch_are_padded_to_the_longest() -> None:
    engine, runner = ask(policy(), [entry(3), entry(9, 2, first=50), entry(5)])
    assert engine.calls == [4]
    assert (runner.spent.elements, runner.spent.padded) == (2 * (3 + 18 + 5), 2 * 4 * 9)


def test_equal_lengths_are_not_padded() -> None:
    engine, runner = ask(policy(), [entry(8), entry(8)])
    assert engine.calls == [2]
    assert runner.spent.padded == runner.spent.elements


def test_buckets_are_the_sizes_to_which_samples_are_padded() -> None:
    made = policy({"seq": Padding({"ids": 7, "mask": 0}, (4, 16))})
    assert [made.target([entry(length)]) for length in (1, 4, 5, 17)] == [(4,), (4,), (16,), (17,)]
    assert [made.work((length,), 3) for length in (1, 4, 5, 17)] == [12, 12, 48, 51]
    _, runner = ask(made, [entry(5)])
    assert runner.spent.padded == 2 * 16


def test_sizes_are_rounded_for_engines_that_compile_code_for_each() -> None:
    made = policy(rounded=True)
    targets = {made.target([entry(length)])[0] for length in range(1, 101)}
    assert len(targets) <= 40
    assert all(made.target([entry(length)])[0] <= max(length + 1, length * 1.25) for length in range(1, 101))
    assert made.target([entry(100)]) == (100,)  # the model does not accept more


def test_dimensions_that_cannot_be_padded_still_separate_requests() -> None:
    wide = Signature(
        (TensorSpec("x", DType.FP32, ("batch", "seq", "width")), TensorSpec("scale", DType.FP32, (1,))),
        (TensorSpec("y", DType.FP32, ("batch", "seq", "width")),),
        "batch",
    )

    def inputs(length: int, width: int, scale: float) -> dict[str, Array]:
        return {"x": np.ones((1, length, width), np.float32), "scale": np.array([scale], np.float32)}

    made = PaddingPolicy(Padder(wide, {"seq": Padding({"x": 0})}), (5,))
    first = made.group(inputs(5, 3, 1))
    assert made.group(inputs(9, 3, 1)) == first
    assert made.group(inputs(5, 4, 1)) != first
    assert made.group(inputs(5, 3, 2)) != first


@pytest.mark.matrix
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 4)), min_size=1, max_size=20))
def test_any_mix_is_answered_as_each_alone(sizes: list[tuple[int, int]]) -> None:
    entries = [entry(length, samples, first) for first, (length, samples) in enumerate(sizes)]
    engine, _ = ask(policy(), entries)
    assert engine.calls == [sum(samples for _, samples in sizes)]


def test_a_request_that_fails_in_a_padded_batch_fails_alone() -> None:
    def picky(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if (inputs["ids"] == 13).any():
            raise ValueError("13")
        return masked_sum(inputs)

    entries = [entry(4), entry(3, first=13), entry(5, first=20)]
    outcomes = BatchRunner(FunctionEngine(picky, SIGNATURE), SIGNATURE, policy()).run(entries)
    assert [isinstance(outcome, Mapping) for outcome in outcomes] == [True, False, True]


def test_calls_are_timed_by_the_size_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ingot.runtime.dispatch.padding.time.perf_counter", lambda: now)

    def timed(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal now
        now += 0.002 + 1e-4 * inputs["ids"].size
        return masked_sum(inputs)

    engine, padder = FunctionEngine(timed, SIGNATURE), Padder(SIGNATURE, PADDINGS)
    found = padding.measure(engine, padder, policy().work, request(10), 1.0)
    assert found == {10: pytest.approx(0.003), 80: pytest.approx(0.010)}


def test_nothing_is_measured_where_no_time_is_given_or_no_size_is_larger() -> None:
    engine, padder = FunctionEngine(masked_sum, SIGNATURE), Padder(SIGNATURE, PADDINGS)
    assert padding.measure(engine, padder, policy().work, request(10), 0) == {}
    assert padding.measure(engine, padder, policy().work, request(90), 1.0) == {}
    assert engine.calls == []


def test_the_memory_of_a_call_is_that_of_its_padded_sizes() -> None:
    buckets = {"seq": Padding({"ids": 7, "mask": 0}, (64,))}
    limit = CallLimit(lambda sizes: sizes["batch"] * sizes["seq"] ** 2, 2 * 64**2, "model")
    checked = SignatureCheck(SIGNATURE, policy(buckets), 8, limit).find(request(40))
    assert (checked.most, checked.peak) == (2, 64**2)
    assert SignatureCheck(SIGNATURE, policy(), 8, limit).find(request(40)).most == 5


def test_a_request_whose_mask_hides_a_row_runs_alone_and_unpadded() -> None:
    made = policy({"seq": Padding({"ids": 7, "mask": 0}, (8, 16), ("mask",))})
    hidden = entry(5, 3)
    hidden.inputs["mask"][1] = 0
    engine, runner = ask(made, [entry(3), hidden, entry(6)])
    assert sorted(engine.calls) == [2, 3]
    assert runner.spent.padded == 2 * (2 * 8 + 3 * 5)
