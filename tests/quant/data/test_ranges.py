from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ingot.quant.data import ranges
from ingot.quant.data.ranges import Method, Observation
from ingot.quant.data.samples import Samples
from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import random
from tests.quant.networks import BLOCKS, NETWORKS

METHODS: tuple[Method, ...] = get_args(Method)
BATCHES = st.lists(
    hnp.arrays(
        np.float32, hnp.array_shapes(min_dims=1, max_dims=3), elements=st.floats(-(2.0**127), 2.0**127, width=32)
    ),
    min_size=1,
    max_size=5,
)


def observation(*batches: Array, axis: int | None = None) -> Observation:
    seen = Observation()
    for batch in batches:
        seen.add(batch, axis)
    return seen


def rounded(values: Array, low: float, high: float) -> Array:
    """Return values after rounding to 256 steps of a range."""
    low, high = min(low, 0.0), max(high, 0.0)
    step = (high - low) / 255
    return np.asarray(np.clip(np.rint((values - low) / step), 0, 255) * step + low)


@pytest.mark.matrix
@given(BATCHES)
def test_the_least_and_the_largest_are_exact_and_no_value_is_lost(batches: list[Array]) -> None:
    seen = observation(*batches)
    flat = np.concatenate([batch.reshape(-1) for batch in batches])
    assert seen.range("minmax") == (float(flat.min()), float(flat.max()))
    assert seen.bins.sum() == flat.size
    assert seen.reach >= np.abs(flat).max()
    for method in METHODS:
        low, high = seen.range(method)
        assert np.isfinite([low, high]).all()
        assert min(flat.min(), 0) <= low <= high <= max(flat.max(), 0)
    assert seen.clipped(*seen.range("minmax")) == 0


@pytest.mark.matrix
@given(BATCHES)
def test_a_histogram_that_widens_counts_as_one_that_was_wide_from_the_start(batches: list[Array]) -> None:
    seen = observation(*batches)
    flat = np.concatenate([batch.reshape(-1) for batch in batches]).astype(np.float64)
    expected = np.histogram(flat, len(seen.bins), (-seen.reach, seen.reach))[0]
    # Values at the edge of two bins, such as zeros, may be counted in either.
    assert (
        np.abs(np.cumsum(seen.bins) - np.cumsum(expected)).max()
        <= np.isin(flat / (2 * seen.reach / len(seen.bins)), np.arange(-1024, 1025)).sum()
        + (np.abs(flat) < seen.reach * 1e-12).sum()
    )


@pytest.mark.matrix
@given(st.integers(0, 99), st.floats(0, 3), st.booleans())
def test_percentiles(seed: int, skew: float, positive: bool) -> None:
    values = np.random.default_rng(seed).standard_normal(20_000) ** 3 + skew
    values = np.abs(values) if positive else values
    seen = observation(*np.array_split(values.astype(np.float32), 7))
    low, high = seen.range("percentile")
    width = 2 * seen.reach / len(seen.bins) * 1.01
    assert abs(high - np.quantile(values, 0.9999, method="inverted_cdf")) <= width
    expected = values.min() if positive else np.quantile(values, 0.0001, method="inverted_cdf")
    assert abs(low - expected) <= width


@pytest.mark.parametrize("shape", ["normal", "heavy", "outlier", "one side", "flat"])
def test_least_squares_is_nearly_the_best_share_of_the_whole_range(shape: str) -> None:
    rng = np.random.default_rng(0)
    values = {
        "normal": rng.standard_normal(50_000),
        "heavy": rng.standard_t(2, 50_000),
        "outlier": np.append(rng.standard_normal(50_000), 300),
        "one side": np.maximum(rng.standard_normal(50_000), 0) ** 3,
        "flat": rng.uniform(-1, 2, 50_000),
    }[shape]
    seen = observation(values.astype(np.float32))

    def cost(low: float, high: float) -> float:
        return float(np.square(rounded(values, low, high) - values).mean())

    best = min(cost(share * values.min(), share * values.max()) for share in np.linspace(0.1, 1, 91))
    assert cost(*seen.range("mse")) <= best * 1.2
    if shape == "flat":
        assert seen.range("mse")[1] > 1.9


def test_entropy_drops_a_lone_outlier_and_keeps_a_flat_range() -> None:
    rng = np.random.default_rng(0)
    lone = observation(np.append(rng.standard_normal(50_000), 100).astype(np.float32))
    low, high = lone.range("entropy")
    assert -5 < low < 0 < high < 80
    flat = observation(rng.uniform(-1, 2, 50_000).astype(np.float32))
    assert flat.range("entropy")[1] > 1.8


def test_the_share_that_is_clipped() -> None:
    values = np.linspace(-1, 1, 10_001, dtype=np.float32)
    assert observation(values).clipped(-0.5, 0.5) == pytest.approx(0.5, abs=0.005)
    assert observation(values).clipped(-2, 2) == 0
    assert Observation().clipped(-1, 1) == 0


@pytest.mark.matrix
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=4), st.integers(0, 2))
def test_channels_are_exact(sizes: list[tuple[int, int]], axis: int) -> None:
    batches = []
    for seed, (first, second) in enumerate(sizes):
        shape = [first, second]
        shape.insert(axis, 3)
        batches.append(random(*shape, seed=seed))
    seen = observation(*batches, axis=axis - 3)
    rows = np.concatenate([np.moveaxis(batch, axis, -1).reshape(-1, 3) for batch in batches])
    assert seen.mean is not None
    np.testing.assert_array_equal(seen.lows, rows.min(axis=0))
    np.testing.assert_array_equal(seen.highs, rows.max(axis=0))
    np.testing.assert_allclose(seen.mean, rows.mean(axis=0), atol=1e-5)


class TestOddValues:
    @pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 1e-38, 1e-45, 3.4e38, -3.4e38])
    @pytest.mark.parametrize("method", METHODS)
    def test_constants(self, value: float, method: Method) -> None:
        low, high = observation(np.full((4, 5), value, np.float32)).range(method)
        assert np.isfinite([low, high]).all()
        assert abs(low) <= abs(np.float32(value))
        assert abs(high) <= abs(np.float32(value))

    @pytest.mark.parametrize("method", METHODS)
    def test_infinity_and_nan_count_for_nothing(self, method: Method) -> None:
        array = random(100, 4)
        array[::7] = -np.inf
        array[1::7] = np.nan
        seen = observation(array, axis=1)
        low, high = seen.range(method)
        assert -4 < low < 0 < high < 4
        assert seen.mean is not None
        assert np.isfinite(seen.mean).all()

    @pytest.mark.parametrize("method", METHODS)
    def test_nothing_at_all(self, method: Method) -> None:
        seen = observation(np.zeros((0, 4), np.float32), axis=1)
        assert seen.range(method) == Observation().range(method)
        assert seen.mean is None

    def test_a_sample_of_a_large_array_meets_all_channels(self) -> None:
        for width in (2, 48, 64, 100, 768):
            array = np.zeros((400_000 // width + 1, width), np.float32)
            array[:, width // 2] = 1
            seen = observation(array)
            assert seen.bins[-1] / seen.bins.sum() == pytest.approx(1 / width, rel=0.1)


class TestObserve:
    def test_batches_of_several_sizes(self) -> None:
        source = graphs.source_of(NETWORKS["matmul of texts"].model())
        cases = [{"x": random(rows, length, 16, seed=length)} for rows, length in ((3, 4), (5, 9), (1, 1))]
        samples = Samples.read(source.signature, cases)
        steps: list[tuple[int, int]] = []
        seen = ranges.observe(source.model(), ["x", "y"], {"x": -1}, samples, progress=lambda *step: steps.append(step))
        flat = np.concatenate([case["x"].reshape(-1, 16) for case in cases])
        assert seen["x"].range("minmax") == (float(flat.min()), float(flat.max()))
        assert seen["x"].count == len(flat)
        np.testing.assert_allclose(seen["x"].mean, flat.mean(axis=0), atol=1e-5)  # type: ignore[arg-type]
        outputs = np.concatenate([graphs.answers(source.model(), case)["y"].reshape(-1) for case in cases])
        assert seen["y"].range("minmax") == pytest.approx((float(outputs.min()), float(outputs.max())), rel=1e-5)
        assert seen["y"].lows is None
        assert steps[-1] == (9, 9)

    def test_values_inside_and_the_model_stays_as_it_is(self) -> None:
        network = BLOCKS["embedding and pooling"]
        source = graphs.source_of(network.model())
        model = source.model()
        seen = ranges.observe(model, ["e", "p", "mask"], {}, Samples.read(source.signature, network.inputs))
        assert [value.name for value in model.graph.outputs] == ["y"]
        table = network.weights["table"][network.inputs["ids"]]
        assert seen["e"].range("minmax") == (float(table.min()), float(table.max()))
        assert seen["mask"].range("minmax") == (0, 1)

    def test_few_rows_at_once_where_activations_are_large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        network = NETWORKS["residual block"]
        source = graphs.source_of(network.model())
        samples = Samples.read(source.signature, network.inputs)
        whole = ranges.observe(source.model(), ["ar"], {"ar": 1}, samples)
        monkeypatch.setattr(ranges, "_AT_ONCE", 5 * 6 * 81 * 4)
        steps: list[int] = []
        parts = ranges.observe(source.model(), ["ar"], {"ar": 1}, samples, progress=lambda done, _: steps.append(done))
        assert max(np.diff([0, *steps])) <= 4
        assert parts["ar"].range("minmax") == pytest.approx(whole["ar"].range("minmax"))
        np.testing.assert_allclose(parts["ar"].mean, whole["ar"].mean, rtol=1e-5)  # type: ignore[arg-type]
