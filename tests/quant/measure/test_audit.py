from __future__ import annotations

import pytest

from ingot.quant.schemes import plan as plans
from ingot.quant.schemes.plan import Plan
from tests.quant import graphs
from tests.quant.graphs import random
from tests.quant.networks import BLOCKS, NETWORKS, PRODUCTS

STATIC = Plan("static int8", {})


@pytest.mark.matrix
def test_a_floating_point_model_has_nothing_in_integers() -> None:
    for network in NETWORKS.values():
        found = graphs.audited(network.model())
        assert found.quantized == {}
        assert found.floats == ()


def test_operators_left_between_quantized_ones_are_named() -> None:
    model = graphs.graph(
        """(float[batch,4,9,9] x) => (float[batch,5,9,9] y) {
            a = Conv(x, w, b) [gate] t = Tanh(a) [error] e = Erf(t) y = Conv(e, v, c) }""",
        {"w": random(6, 4, 1, 1), "b": random(6), "v": random(5, 6, 1, 1), "c": random(5)},
    )
    found = graphs.audited(graphs.quantized(model, STATIC, NETWORKS["conv"].inputs))
    assert found.quantized == {"QLinearConv": 2}
    assert found.floats == ()  # two of them: neither is between integers alone
    model = graphs.graph(
        """(float[batch,4,9,9] x) => (float[batch,5,9,9] y) {
            a = Conv(x, w, b) [gate] t = Tanh(a) y = Conv(t, v, c) }""",
        {"w": random(6, 4, 1, 1), "b": random(6), "v": random(5, 6, 1, 1), "c": random(5)},
    )
    found = graphs.audited(graphs.quantized(model, STATIC, NETWORKS["conv"].inputs))
    assert found.quantized == {"QLinearConv": 2}
    assert found.floats == ("Tanh gate",)


def test_a_layer_without_a_name_is_named_by_its_output() -> None:
    network = BLOCKS["residual block"]
    wide = graphs.quantized(network.model(), Plan("u16", {}, activations="u16"), network.inputs)
    found = graphs.audited(wide)
    assert found.quantized == {}
    assert "Conv a" in found.floats
    assert "Add s" in found.floats


@pytest.mark.parametrize("between", [True, False])
def test_operators_between_layers_are_in_integers_on_request(between: bool) -> None:
    network = BLOCKS["residual block"]
    plan = Plan("static int8", {}, between=between)
    found = graphs.audited(graphs.quantized(network.model(), plan, network.inputs)).quantized
    assert found["QLinearConv"] == 3
    assert found["QGemm"] == 1
    assert ("QLinearAdd" in found) is between


@pytest.mark.matrix
def test_a_large_model_is_read_without_its_weights() -> None:
    text = "(float[batch,2048] x) => (float[batch,1024] y) { y = MatMul(x, w) }"
    model = graphs.graph(text, {"w": random(2048, 1024)})
    source = graphs.source_of(model)
    result = plans.make(source, Plan("int8", {"MatMul_y": "int8"}), {})
    assert graphs.audited(result).quantized == {"MatMulNBits": 1}


def test_half_precision_has_no_integer_kernels() -> None:
    network = PRODUCTS["gemm"].half()
    assert graphs.audited(graphs.quantized(network.model(), STATIC, network.inputs)).quantized == {}
