from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import pytest

from ingot.quant.schemes import plan as plans
from ingot.quant.schemes.plan import Plan
from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import random, sqnr
from tests.quant.networks import BLOCKS, NETWORKS, PRODUCTS

PRODUCTS_IN_BLOCKS = [*PRODUCTS, "attention", "perceptron", "residual block", "embedding and pooling"]
W, R, B = random(1, 24, 5, seed=1, scale=0.4), random(1, 24, 6, seed=2, scale=0.4), random(1, 48, seed=3)
BOTH = {"w": np.concatenate([W, -W]), "r": np.concatenate([R, R / 2]), "b": np.concatenate([B, -B])}
ONE = {"w": W, "r": R, "b": B}
SEQUENCE = {"x": random(7, 3, 5, seed=4)}


def quantized(model: ir.Model, per_channel: bool = True) -> ir.Model:
    source = graphs.source_of(model)
    schemes = dict.fromkeys(plans.fitting(source, "dynamic"), "dynamic")
    return plans.make(source, Plan("dynamic int8", {}, per_channel=per_channel).but(schemes, "dynamic"), {})


def noise(model: ir.Model, inputs: Mapping[str, Array], per_channel: bool = True) -> float:
    expected, actual = (graphs.answers(item, inputs) for item in (model, quantized(model, per_channel)))
    assert list(expected) == list(actual)
    return min(sqnr(expected[name], actual[name]) for name in expected)


@pytest.mark.one_case
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("name", PRODUCTS_IN_BLOCKS)
def test_answers_are_the_originals_up_to_rounding(name: str, per_channel: bool) -> None:
    network = NETWORKS[name]
    assert noise(network.model(), network.inputs, per_channel) > 36
    half = network.half()
    assert noise(half.model(), half.inputs, per_channel) > 36


@pytest.mark.parametrize("name", PRODUCTS_IN_BLOCKS)
def test_products_and_what_stands_around_them_are_one_operator(name: str) -> None:
    found = graphs.audited(quantized(NETWORKS[name].model()))
    products = sum(op in ("MatMul", "Gemm") for op in graphs.operators(NETWORKS[name].model()))
    attention = 2 if name == "attention" else 0  # of two activations
    assert sum(found.quantized.values()) == products - attention
    assert set(found.quantized) <= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}


@pytest.mark.parametrize("opset", [11, 13, 17, 21, 23])
def test_operator_sets(opset: int) -> None:
    network = PRODUCTS["matmul with bias"]
    assert noise(network.model(opset), network.inputs) > 40


def test_an_older_operator_set_does_not_have_it() -> None:
    assert plans.fitting(graphs.source_of(PRODUCTS["matmul"].model(10)), "dynamic") == ()


def test_the_arithmetic_is_that_of_the_operators() -> None:
    network = PRODUCTS["matmul"]
    x, weight = network.inputs["x"], network.weights["w"]
    scale = np.float32((x.max() - x.min()) / 255)
    zero = np.clip(np.rint(-x.min() / scale), 0, 255)
    integers = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    by = np.abs(weight).max(axis=0) / 127
    expected = (integers @ np.rint(weight / by).astype(np.float64)) * (scale * by)
    actual = graphs.answers(quantized(network.model()), network.inputs)["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


def test_an_input_is_quantized_once_for_all_that_take_it() -> None:
    assert graphs.operators(quantized(PRODUCTS["two matmuls of one input"].model())).count("DynamicQuantizeLinear") == 1
    assert graphs.operators(quantized(BLOCKS["attention"].model())).count("DynamicQuantizeLinear") == 4


def test_static_and_dynamic_layers_of_one_input() -> None:
    network = PRODUCTS["two matmuls of one input"]
    source = graphs.source_of(network.model())
    first, second = source.names
    plan = Plan("both", {first: "static", second: "dynamic"})
    result = plans.make(source, plan, graphs.observed(source, network.inputs))
    expected, actual = (graphs.answers(model, network.inputs)["y"] for model in (network.model(), result))
    assert sqnr(expected, actual) > 36


@pytest.mark.parametrize("inputs", [{"x": np.zeros((3, 16), np.float32)}, {"x": np.full((1, 16), 7, np.float32)}])
def test_constant_inputs(inputs: Mapping[str, Array]) -> None:
    model = PRODUCTS["gemm"].model()
    expected, actual = (graphs.answers(item, inputs)["y"] for item in (model, quantized(model)))
    np.testing.assert_allclose(actual, expected, atol=0.15)


class TestLstm:
    @pytest.mark.one_case
    @pytest.mark.parametrize("per_channel", [True, False])
    @pytest.mark.parametrize(
        ("text", "weights", "inputs"),
        [
            ("float[n,1,batch,6] y) { y = LSTM<hidden_size=6>(x, w, r, b)", ONE, {}),
            ("float[n,1,batch,6] y) { y = LSTM<hidden_size=6>(x, w, r)", ONE, {}),
            ('float[n,1,batch,6] y) { y = LSTM<hidden_size=6, direction="reverse">(x, w, r, b)', ONE, {}),
            (
                "float[n,2,batch,6] y, float[2,batch,6] h, float[2,batch,6] c) "
                '{ y, h, c = LSTM<hidden_size=6, direction="bidirectional">(x, w, r, b)',
                BOTH,
                {},
            ),
            ("float[1,batch,6] h) { , h = LSTM<hidden_size=6>(x, w, r, b)", ONE, {}),
            (
                "float[n,1,batch,6] y) { y = LSTM<hidden_size=6>(x, w, r, b, , h0, c0)",
                ONE,
                {"h0": random(1, 3, 6, seed=5), "c0": random(1, 3, 6, seed=6)},
            ),
            (
                "float[n,1,batch,6] y) { y = LSTM<hidden_size=6>(x, w, r, b, lengths)",
                ONE,
                {"lengths": np.array([3, 7, 5], np.int32)},
            ),
            (
                "float[n,1,batch,6] y) { y = LSTM<hidden_size=6>(x, w, r, b, , , , peep)",
                {**ONE, "peep": random(1, 18)},
                {},
            ),
            (
                "float[n,1,batch,6] y) { y = LSTM<hidden_size=6, clip=0.5, input_forget=1>(x, w, r, b)",
                ONE,
                {},
            ),
        ],
        ids=["plain", "no bias", "reverse", "both ways", "last state", "states", "lengths", "peepholes", "clip"],
    )
    def test_all_its_forms(
        self, text: str, weights: Mapping[str, Array], inputs: Mapping[str, Array], per_channel: bool
    ) -> None:
        more = {"h0": ", float[1,batch,6] h0", "c0": ", float[1,batch,6] c0", "lengths": ", int32[batch] lengths"}
        head = "float[n,batch,5] x" + "".join(more[name] for name in inputs)
        model = graphs.graph(f"({head}) => ({text} }}", weights)
        assert noise(model, {**SEQUENCE, **inputs}, per_channel) > 38
        result = quantized(model)
        assert graphs.audited(result).quantized == {"DynamicQuantizeLSTM": 1}
        assert [value.name for value in result.graph.outputs] == [value.name for value in model.graph.outputs]

    def test_two_that_share_weights(self) -> None:
        model = graphs.graph(
            "(float[n,batch,6] x) => (float[n,1,batch,6] y) "
            "{ a = LSTM<hidden_size=6>(x, r, r, b) s = Squeeze(a, one) y = LSTM<hidden_size=6>(s, r, r, b) }",
            {**ONE, "one": np.array([1], np.int64)},
        )
        assert noise(model, {"x": random(7, 3, 6, seed=4)}) > 38

    def test_a_layer_without_constant_weights_is_left(self) -> None:
        text = "(float[n,batch,5] x, float[1,24,6] r) => (float[n,1,batch,6] y) { y = LSTM<hidden_size=6>(x, w, r) }"
        source = graphs.source_of(graphs.graph(text, {"w": W}))
        assert [layer.operator for layer in source.layers] == ["LSTM"]
        assert plans.fitting(source, "dynamic") == ()
