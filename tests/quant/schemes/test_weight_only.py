from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.quant.schemes import plan as plans
from ingot.quant.schemes import weight_only
from ingot.quant.schemes.plan import Plan
from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import random, sqnr
from tests.quant.networks import BLOCKS, NETWORKS, PRODUCTS, Network

WITH_PRODUCTS = [*PRODUCTS, "attention", "residual block", "embedding and pooling", "weight that is an output too"]


def quantized(model: ir.Model, scheme: Literal["int8", "int4"] = "int8", block: int = 32) -> ir.Model:
    source = graphs.source_of(model)
    return plans.make(source, Plan(scheme, {}, block=block).but(plans.fitting(source, scheme), scheme), {})


def noise(network: Network, scheme: Literal["int8", "int4"] = "int8", block: int = 32, opset: int = 20) -> float:
    model = network.model(opset)
    expected, actual = (graphs.answers(item, network.inputs) for item in (model, quantized(model, scheme, block)))
    assert list(expected) == list(actual)
    return min(sqnr(expected[name], actual[name]) for name in expected)


def unpack(packed: Array, scales: Array, bits: int, rows: int) -> Array:
    """Return the weights [columns, rows] that MatMulNBits computes with."""
    integers = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1) if bits == 4 else packed
    values = (integers.astype(np.float64) - (1 << (bits - 1))) * scales[..., None]
    return np.asarray(values.reshape(len(packed), -1)[:, :rows])


@pytest.mark.one_case
@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_answers_are_the_originals_up_to_rounding(name: str) -> None:
    for network in (NETWORKS[name], NETWORKS[name].half()):
        assert noise(network) > 37
        assert noise(network, "int4") > 15


@pytest.mark.parametrize("name", WITH_PRODUCTS)
def test_products_are_one_operator_each(name: str) -> None:
    found = graphs.audited(quantized(NETWORKS[name].model()))
    products = sum(op in ("MatMul", "Gemm") for op in graphs.operators(NETWORKS[name].model()))
    assert found.quantized == {"MatMulNBits": products - (2 if name == "attention" else 0)}


@pytest.mark.parametrize("opset", [10, 13, 17, 21, 23])
def test_operator_sets(opset: int) -> None:
    assert noise(PRODUCTS["gemm turned"], opset=opset) > 40


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_weights_that_fill_no_whole_block(scheme: Literal["int8", "int4"], block: int) -> None:
    weight, data = random(150, 7, scale=0.1), {"x": random(20, 150, seed=1)}
    network = Network("(float[batch,150] x) => (float[batch,7] y) { y = MatMul(x, w) }", {"w": weight}, data)
    assert noise(network, scheme, block) > (17 if scheme == "int4" else 38)


@given(
    st.integers(1, 5),
    st.integers(1, 70),
    st.sampled_from([16, 32, 64]),
    st.sampled_from([4, 8]),
    st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e30]),
    st.integers(0, 99),
)
def test_no_weight_is_off_by_more_than_half_a_step(
    columns: int, rows: int, block: int, bits: int, size: float, seed: int
) -> None:
    array = random(columns, rows, seed=seed) * np.float32(size)
    packed, scales = weight_only.pack(array, bits, block)
    blocks = -(-rows // block)
    assert packed.shape == (columns, blocks, block * bits // 8)
    assert packed.dtype == np.uint8
    assert scales.shape == (columns, blocks)
    found = unpack(packed, scales, bits, rows)
    steps = np.repeat(np.abs(scales), block, axis=1)[:, :rows].astype(np.float64)
    # The end of the range without a mirror image may be a whole step away.
    assert (np.abs(found - array) <= steps * (1 + 1e-4)).all()
    assert (np.abs(found - array) <= steps * (0.5 + 1e-4)).mean() > 0.5
    if size >= 1e-3:
        largest = np.take_along_axis(array, np.abs(array).argmax(axis=1)[:, None], 1)
        assert np.isclose(np.take_along_axis(found, np.abs(array).argmax(axis=1)[:, None], 1), largest).all()


def test_scales_of_half_precision_are_those_that_are_kept() -> None:
    array = random(3, 64, scale=1e-5)
    packed, scales = weight_only.pack(array, 8, 32, ir.DataType.FLOAT16)
    assert np.array_equal(scales, scales.astype(np.float16).astype(np.float32))
    assert np.abs(scales).min() > 0
    assert np.abs(unpack(packed, scales, 8, 64) - array).max() <= np.abs(scales).max() / 2 * 1.01


class TestEmbeddings:
    TEXT = "(int64[batch,n] ids) => (float[batch,n,16] y) { y = Gather(table, ids) }"
    IDS: Mapping[str, Array] = {"ids": np.array([[0, 1, -1], [4095, 2, 2]])}

    def test_rows_are_exact_to_half_their_own_step(self) -> None:
        table = random(4096, 16) * np.exp(random(4096, 1, seed=1, scale=3))
        table[2] = 0
        result = quantized(graphs.graph(self.TEXT, {"table": table}))
        found = graphs.answers(result, self.IDS)["y"]
        expected = table[self.IDS["ids"]]
        assert (np.abs(found - expected) <= np.abs(expected).max(axis=-1, keepdims=True) / 127 / 2 * 1.001).all()
        assert not found[1, 1].any()
        assert max(value.const_value.nbytes for value in result.graph.initializers.values() if value.const_value) == (
            4096 * 16
        )

    def test_half_precision(self) -> None:
        text = self.TEXT.replace("float", "float16")
        model = graphs.graph(text, graphs.halves({"table": random(4096, 16)}))
        expected, actual = (graphs.answers(item, self.IDS)["y"] for item in (model, quantized(model)))
        assert sqnr(expected, actual) > 38

    def test_small_ones_are_left_and_so_are_other_axes(self) -> None:
        small = graphs.source_of(graphs.graph(self.TEXT, {"table": random(10, 16)}))
        assert small.names
        assert plans.fitting(small, "int8") == ()
        text = "(int64[batch] ids) => (float[16,batch] y) { y = Gather<axis=1>(table, ids) }"
        assert graphs.source_of(graphs.graph(text, {"table": random(16, 5000)})).names == ()

    def test_a_table_that_is_the_last_layer_too(self) -> None:
        model = graphs.graph(
            "(int64[batch,n] ids) => (float[batch,n,5000] y) "
            "{ e = Gather(table, ids) t = Transpose<perm=[1,0]>(table) y = MatMul(e, t) }",
            {"table": random(5000, 16)},
        )
        expected, actual = (graphs.answers(item, self.IDS)["y"] for item in (model, quantized(model)))
        assert sqnr(expected, actual) > 38


def test_weights_are_made_when_they_are_written() -> None:
    result = quantized(BLOCKS["attention"].model())
    made = [
        value.const_value for name, value in result.graph.initializers.items() if name.endswith(("_int8", "_scale"))
    ]
    assert len(made) == 12
    assert all(isinstance(item, ir.LazyTensor) for item in made)
