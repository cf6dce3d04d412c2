"""Requests of different sizes share a call where that costs less, without changing any answer."""

from __future__ import annotations

import math
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


def mixer(worth: float | None, paddings: Mapping[str, Padding] = PADDINGS, *, rounded: bool = False) -> PaddingPolicy:
    return PaddingPolicy(Padder(SIGNATURE, paddings), worth, request(5), rounded=rounded)


def ask(made: PaddingPolicy | None, entries: Sequence[Entry]) -> tuple[FunctionEngine, BatchRunner]:
    """Run a batch, and check that every answer equals that of the request alone."""
    engine = FunctionEngine(masked_sum, SIGNATURE)
    runner = BatchRunner(engine, SIGNATURE, made)
    for item, outcome in zip(entries, runner.run(entries), strict=True):
        assert isinstance(outcome, Mapping)
        for name, value in masked_sum(item.inputs).items():
            assert np.array_equal(outcome[name], value)
    return engine, runner


def test_lengths_whose_padding_costs_less_than_a_call_run_in_one() -> None:
    engine, runner = ask(mixer(worth=1000), [entry(3), entry(9, 2, first=50), entry(5)])
    assert engine.calls == [4]
    assert (runner.spent.elements, runner.spent.padded) == (2 * (3 + 18 + 5), 2 * 4 * 9)


def test_lengths_whose_padding_costs_more_than_a_call_run_apart() -> None:
    engine, runner = ask(mixer(worth=10), [entry(3), entry(90), entry(4), entry(88)])
    assert sorted(engine.calls) == [2, 2]
    assert runner.spent.padded == 2 * (2 * 4 + 2 * 90)


def test_equal_lengths_are_not_padded() -> None:
    engine, runner = ask(mixer(worth=10), [entry(8), entry(8)])
    assert engine.calls == [2]
    assert runner.spent.padded == runner.spent.elements


def test_one_size_is_above_another_by_less_than_double_in_a_class() -> None:
    made = mixer(worth=20)  # a call costs as much as 20 elements, which a sample of 10 has
    classes: dict[object, list[int]] = {}
    for length in range(1, 101):
        classes.setdefault(made.group(request(length)), []).append(length)
    assert list(classes.values()) == [
        list(range(1, 11)),
        list(range(11, 21)),
        list(range(21, 41)),
        [*range(41, 81)],
        [*range(81, 101)],
    ]


def test_buckets_are_both_classes_and_padded_sizes() -> None:
    made = mixer(None, {"seq": Padding({"ids": 7, "mask": 0}, (4, 16))})
    assert made.group(request(5)) == made.group(request(16)) != made.group(request(4))
    assert made.group(request(17)) not in (made.group(request(16)), made.group(request(60)))
    assert [made.target([entry(length)]) for length in (1, 4, 5, 17)] == [(4,), (4,), (16,), (17,)]
    _, runner = ask(made, [entry(5)])
    assert runner.spent.padded == 2 * 16


def test_sizes_are_rounded_for_engines_that_compile_code_for_each() -> None:
    made = mixer(None, rounded=True)
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

    made = PaddingPolicy(Padder(wide, {"seq": Padding({"x": 0})}), math.inf, inputs(5, 3, 1))
    first = made.group(inputs(5, 3, 1))
    assert made.group(inputs(9, 3, 1)) == first
    assert made.group(inputs(5, 4, 1)) != first
    assert made.group(inputs(5, 3, 2)) != first


@pytest.mark.matrix
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 4)), min_size=1, max_size=20),
    st.one_of(st.none(), st.floats(0, 1e4), st.just(math.inf)),
)
def test_any_mix_is_answered_and_costs_no_more_than_padding_all(
    sizes: list[tuple[int, int]], worth: float | None
) -> None:
    entries = [entry(length, samples, first) for first, (length, samples) in enumerate(sizes)]
    engine, runner = ask(mixer(worth), entries)
    assert sum(engine.calls) == sum(samples for _, samples in sizes)
    all_padded = 2 * max(length for length, _ in sizes) * sum(samples for _, samples in sizes)
    if worth is not None and math.isfinite(worth):
        assert runner.spent.padded + worth * runner.spent.calls <= all_padded + worth + 1e-6
    else:
        assert engine.calls == [sum(samples for _, samples in sizes)]


def test_a_request_that_fails_in_a_padded_batch_fails_alone() -> None:
    def picky(inputs: Mapping[str, Array]) -> dict[str, Array]:
        if (inputs["ids"] == 13).any():
            raise ValueError("13")
        return masked_sum(inputs)

    entries = [entry(4), entry(3, first=13), entry(5, first=20)]
    outcomes = BatchRunner(FunctionEngine(picky, SIGNATURE), SIGNATURE, mixer(1000)).run(entries)
    assert [isinstance(outcome, Mapping) for outcome in outcomes] == [True, False, True]


@pytest.mark.parametrize("kind", ["calls", "elements"])
def test_the_fixed_cost_of_a_call_is_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("ingot.runtime.profiling.profile.time.perf_counter", lambda: now)

    def timed(inputs: Mapping[str, Array]) -> dict[str, Array]:
        nonlocal now
        now += 0.02 if kind == "calls" else 2e-4 * inputs["ids"].size
        return masked_sum(inputs)

    worth = padding.measure(FunctionEngine(timed, SIGNATURE), Padder(SIGNATURE, PADDINGS), request(10), 1.0)
    assert worth is not None
    assert worth > 100 if kind == "calls" else worth < 100


def test_nothing_is_measured_where_no_time_is_given_or_no_size_is_larger() -> None:
    engine = FunctionEngine(masked_sum, SIGNATURE)
    assert padding.measure(engine, Padder(SIGNATURE, PADDINGS), request(10), 0) is None
    assert padding.measure(engine, Padder(SIGNATURE, PADDINGS), request(90), 1.0) is None
    assert engine.calls == []


def test_the_memory_of_a_call_is_that_of_its_padded_sizes() -> None:
    buckets = {"seq": Padding({"ids": 7, "mask": 0}, (64,))}
    limit = CallLimit(lambda sizes: sizes["batch"] * sizes["seq"] ** 2, 2 * 64**2, "model")
    checked = SignatureCheck(SIGNATURE, mixer(None, buckets), 8, limit).find(request(40))
    assert (checked.most, checked.peak) == (2, 64**2)
    assert SignatureCheck(SIGNATURE, mixer(None), 8, limit).find(request(40)).most == 5


def test_a_request_whose_mask_hides_a_row_runs_alone_and_unpadded() -> None:
    made = mixer(None, {"seq": Padding({"ids": 7, "mask": 0}, (8, 16), ("mask",))})
    hidden = entry(5, 3)
    hidden.inputs["mask"][1] = 0
    engine, runner = ask(made, [entry(3), hidden, entry(6)])
    assert sorted(engine.calls) == [2, 3]
    assert runner.spent.padded == 2 * (2 * 8 + 3 * 5)
