from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from ingot.quant.schemes import migration
from ingot.quant.schemes import plan as plans
from ingot.quant.schemes.plan import Plan
from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import random, sqnr
from tests.quant.networks import BLOCKS, NETWORKS

WITH_PRODUCTS = [
    "matmul",
    "gemm",
    "gemm turned",
    "perceptron",
    "matmul of texts",
    "two matmuls of one input",
    "attention",
]
NORM = """(float[batch,8] x) => (float[batch,5] y) {
    n = LayerNormalization<axis=-1>(x, g, h) a = MatMul(n, w) b = Gemm<transB=1>(n, v, c) y = Add(a, b) }"""
# One channel is fifty times as large as the others.
NORM_WEIGHTS = {
    "g": np.array([1, 1, 50, 1, 1, 1, 1, 1], np.float32),
    "h": random(8, seed=1, scale=0.1),
    "w": random(8, 5, seed=2),
    "v": random(5, 8, seed=3),
    "c": random(5, seed=4),
}
DATA = {"x": random(200, 8, seed=5)}


def migrated(model: ir.Model, data: Mapping[str, Array], alpha: float) -> tuple[ir.Model, dict[str, migration.Moved]]:
    source = graphs.source_of(model)
    result = source.model()
    layers = list(source.by_name(result).values())
    found = migration.apply(result, layers, graphs.observed(source, data), alpha)
    return result, found


@pytest.mark.one_case
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_the_function_stays_what_it_is(name: str, alpha: float) -> None:
    network = NETWORKS[name]
    result, found = migrated(network.model(), network.inputs, alpha)
    expected, actual = (graphs.answers(model, network.inputs)["y"] for model in (network.model(), result))
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)
    assert found
    halved, _ = migrated(network.half().model(), network.half().inputs, alpha)
    assert sqnr(expected, graphs.answers(halved, network.half().inputs)["y"].astype(np.float32)) > 40


@pytest.mark.matrix
def test_the_ranges_are_those_of_what_layers_take_then() -> None:
    for name in WITH_PRODUCTS:
        network = NETWORKS[name]
        result, found = migrated(network.model(), network.inputs, 0.5)
        for value in result.graph.all_nodes():
            for output in value.outputs:
                if output.name in found and not output.is_graph_output():
                    result.graph.outputs.append(output)
        answers = graphs.answers(result, network.inputs)
        seen = {key: (float(answers[key].min()), float(answers[key].max())) for key in found if key in answers}
        assert seen
        for key, ends in seen.items():
            np.testing.assert_allclose(ends, (found[key].low, found[key].high), rtol=1e-4, atol=1e-5)
            mean = answers[key].reshape(-1, answers[key].shape[-1]).mean(axis=0)
            np.testing.assert_allclose(mean, found[key].mean, rtol=1e-3, atol=1e-4)


def test_a_norm_that_only_layers_take_does_the_division_itself() -> None:
    model = graphs.graph(NORM, NORM_WEIGHTS)
    result, found = migrated(model, DATA, 0.5)
    assert graphs.operators(result) == graphs.operators(model)
    assert list(found) == ["n"]
    low, high = found["n"].low, found["n"].high
    before = graphs.observed(graphs.source_of(model), DATA)["n"]
    assert high - low < (before.high - before.low) / 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NORM.replace("y = Add(a, b)", "s = Add(a, b) t = ReduceMax(n) y = Add(s, t)"), "something else takes it"),
        (NORM.replace(" y) {", " y, float[batch,8] n) {"), "an output"),
        (NORM.replace("(float[batch,8] x)", "(float[batch,8] x, float[8] g)"), "a scale that callers can override"),
    ],
)
def test_a_norm_that_others_need_is_left(text: str, why: str) -> None:
    model = graphs.graph(text, NORM_WEIGHTS)
    inputs = {**DATA, "g": NORM_WEIGHTS["g"]} if "float[8] g" in text else DATA
    source = graphs.source_of(model)
    # The scale has no batch dimension, by which Samples are cut; the ranges are computed without it.
    plain = graphs.observed(graphs.source_of(graphs.graph(NORM, NORM_WEIGHTS)), DATA)
    result = source.model()
    found = migration.apply(result, list(source.by_name(result).values()), plain, 0.5)
    assert list(found) == ["n_migrated"], why
    assert graphs.operators(result).count("Mul") == 1
    expected, actual = (graphs.answers(item, inputs) for item in (model, result))
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-3, atol=1e-4)


def test_only_layers_that_are_quantized_take_what_was_divided() -> None:
    source = graphs.source_of(graphs.graph(NORM, NORM_WEIGHTS))
    model = source.model()
    first = next(iter(source.by_name(model).values()))
    migration.apply(model, [first], graphs.observed(source, DATA), 0.5)
    expected, actual = (graphs.answers(item, DATA)["y"] for item in (source.model(), model))
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_outliers_cost_less_after_it() -> None:
    model = graphs.graph(NORM, {**NORM_WEIGHTS, "w": NORM_WEIGHTS["w"] / NORM_WEIGHTS["g"][:, None]})
    expected = graphs.answers(model, DATA)["y"]
    plain, better = (
        sqnr(expected, graphs.answers(graphs.quantized(model, Plan("p", {}, migrate=alpha), DATA), DATA)["y"])
        for alpha in (0.0, 0.5)
    )
    assert better > plain + 3


def test_a_value_that_is_contracted_along_two_axes_is_left_alone() -> None:
    model = graphs.graph(
        """(float[batch,8,6] x) => (float[batch,3,6] a, float[batch,8,4] b) { a = Conv(x, v) b = MatMul(x, w) }""",
        {"v": random(3, 8, 1), "w": random(6, 4)},
    )
    data = {"x": random(20, 8, 6) + 1}
    source = graphs.source_of(model)
    seen = graphs.observed(source, data)
    assert seen["x"].mean is None
    expected = graphs.answers(model, data)
    plan = Plan("p", {}, migrate=0.5, correct=True).but(source.names, "static")
    actual = graphs.answers(plans.make(source, plan, seen), data)
    assert min(sqnr(expected[name], actual[name]) for name in expected) > 36


def test_convolutions_have_no_part_in_it() -> None:
    network = BLOCKS["inverted residual"]
    result, found = migrated(network.model(), network.inputs, 0.5)
    assert found == {}
    assert graphs.operators(result) == graphs.operators(network.model())


def test_biases_are_corrected_for_what_layers_take_after_a_migration() -> None:
    alone = """(float[batch,8] x) => (float[batch,5] y) {
        n = LayerNormalization<axis=-1>(x, g, h) y = Gemm<transB=1>(n, v, c) }"""
    weights = {**NORM_WEIGHTS, "h": np.arange(8, dtype=np.float32)}  # means in which a wrong factor would show
    source = graphs.source_of(graphs.graph(alone, weights))
    seen, inputs = graphs.observed(source, DATA), DATA
    expected = graphs.answers(source.model(), inputs)["y"]
    plan = Plan("migrated", dict.fromkeys(source.names, "static"), migrate=0.8)
    errors = {
        correct: float(np.abs(answer.mean(axis=0) - expected.mean(axis=0)).max())
        for correct in (False, True)
        for answer in [graphs.answers(plans.make(source, replace(plan, correct=correct), seen), inputs)["y"]]
    }
    assert errors[True] < errors[False] / 2
