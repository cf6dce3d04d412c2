from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from ingot.quant.schemes import plan as plans
from ingot.quant.schemes import static
from ingot.quant.schemes.plan import Plan
from ingot.quant.schemes.rounding import Affine, channel_scales, to_int8
from ingot.tensors import Array
from tests.quant import graphs
from tests.quant.graphs import random, sqnr
from tests.quant.networks import BLOCKS, CONVOLUTIONS, NETWORKS, PRODUCTS, Network
from tests.support import matrix

STATIC = Plan("static int8", {})
VARIANTS: Mapping[str, Plan] = {
    "layers alone": replace(STATIC, between=False),
    "one scale per tensor": replace(STATIC, per_channel=False),
    "signed activations": replace(STATIC, activations="s8"),
    "activations of 16 bits": replace(STATIC, activations="u16"),
    "corrected": replace(STATIC, correct=True),
    "migrated": replace(STATIC, migrate=0.5),
    "corrected and migrated": replace(STATIC, correct=True, migrate=0.5),
    "percentile": replace(STATIC, method="percentile"),
}
TAKEN = {name: network for name, network in NETWORKS.items() if network.integer}


def quantized(network: Network, plan: Plan = STATIC, opset: int = 20) -> ir.Model:
    return graphs.quantized(network.model(opset), plan, network.inputs)


def noises(network: Network, model: ir.Model, opset: int = 20) -> list[float]:
    """Return the signal to noise of each output, in dB."""
    expected = graphs.answers(network.model(opset), network.inputs)
    actual = graphs.answers(model, network.inputs)
    assert list(actual) == list(expected)
    return [sqnr(expected[name], actual[name]) for name in expected]


@pytest.mark.one_case
@pytest.mark.parametrize("name", TAKEN)
def test_answers_are_the_originals_up_to_rounding_and_all_is_in_integers(name: str) -> None:
    network = TAKEN[name]
    model = quantized(network)
    assert min(noises(network, model)) > 32
    found = graphs.audited(model)
    assert found.quantized == network.integer
    assert found.floats == ()


@pytest.mark.one_case
@pytest.mark.parametrize("variant", matrix(*VARIANTS))
@pytest.mark.parametrize("name", [*BLOCKS, "perceptron", "matmul with bias", "conv in groups", "gemm turned"])
def test_every_form_of_it(name: str, variant: str) -> None:
    network, plan = NETWORKS[name], VARIANTS[variant]
    assert min(noises(network, quantized(network, plan))) > (29 if variant == "percentile" else 31)


@pytest.mark.matrix
def test_wide_activations_are_more_exact() -> None:
    # The product gains little: from 1.32 on ONNX Runtime rounds its activations to 8 bits after all, row by row.
    for name, gained in (("conv", 5), ("gemm", 2), ("residual block", 2.5)):
        narrow, wide = (quantized(NETWORKS[name], replace(STATIC, activations=kind)) for kind in ("u8", "u16"))
        assert min(noises(NETWORKS[name], wide)) > min(noises(NETWORKS[name], narrow)) + gained


@pytest.mark.parametrize("opset", matrix(10, 23, 11, 13, 17, 19, 21))
@pytest.mark.parametrize("name", ["conv", "gemm turned", "matmul with bias", "residual block"])
@pytest.mark.parametrize("activations", ["u8", "u16"])
def test_operator_sets(name: str, opset: int, activations: str) -> None:
    network = NETWORKS[name]
    plan = replace(STATIC, activations="u16" if activations == "u16" else "u8")
    model = quantized(network, plan, opset)
    assert min(noises(network, model, opset)) > 35
    if activations == "u8":
        assert graphs.audited(model).quantized == network.integer


@pytest.mark.parametrize("name", ["conv", "residual block", "inverted residual", "attention", "matmul with bias"])
def test_half_precision(name: str) -> None:
    network = NETWORKS[name].half()
    assert min(noises(network, quantized(network))) > 32
    with pytest.raises(Exception, match="nothing in this model can be quantized in this way"):
        quantized(network, opset=18) if name != "attention" else graphs.quantized(
            PRODUCTS["matmul"].half().model(18), STATIC, PRODUCTS["matmul"].half().inputs
        )


@pytest.mark.parametrize("name", ["residual block", "attention", "two matmuls with one weight"])
def test_the_types_of_values_need_not_be_noted(name: str) -> None:
    network = NETWORKS[name]
    bare = network.model(inferred=False)
    assert graphs.operators(graphs.quantized(bare, STATIC, network.inputs)) == graphs.operators(quantized(network))


def test_weights_and_bounds_in_constant_nodes() -> None:
    model = graphs.graph(
        """(float[batch,1,5,5] x) => (float[batch,2,5,5] y) {
            w = Constant<value = float[2,1,1,1] {1.0, -2.0}>() low = Constant<value_float = 0.0>()
            high = Constant<value_float = 6.0>() c = Conv(x, w) k = Clip(c, low, high) y = Conv<group=2>(k, w) }""",
        {},
    )
    data = {"x": random(8, 1, 5, 5)}
    result = graphs.quantized(model, STATIC, data)
    assert graphs.audited(result).quantized == {"QLinearConv": 2}
    assert sqnr(graphs.answers(model, data)["y"], graphs.answers(result, data)["y"]) > 35


class TestArithmetic:
    """Compares with the same rounding in numpy."""

    @pytest.mark.parametrize("per_channel", [True, False])
    @pytest.mark.parametrize("name", ["matmul", "matmul with bias", "gemm turned", "gemm without bias"])
    def test_products(self, name: str, per_channel: bool) -> None:
        network = PRODUCTS[name]
        x, weight = network.inputs["x"], network.weights["w"]
        weight = weight.T if weight.shape[0] == 8 else weight
        axis = 1 if per_channel else None
        affine = Affine.of(float(x.min()), float(x.max()), ir.DataType.UINT8)
        scales = channel_scales(weight, axis)
        integers = to_int8(weight, scales, axis)
        activations = np.clip(np.rint(x / np.float32(affine.scale)) + affine.zero, 0, 255)
        by = scales * np.float32(affine.scale)
        expected = ((activations - affine.zero) @ integers.astype(np.float64)) * by
        if "b" in network.weights:
            expected += np.rint(network.weights["b"].astype(np.float64) / by) * by
        plan = replace(STATIC, per_channel=per_channel)
        actual = graphs.answers(quantized(network, plan), network.inputs)["y"]
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)

    def test_a_convolution(self) -> None:
        x, weight, bias = random(6, 3, 4, 4, seed=1), random(5, 3, 1, 1, seed=2), random(5, seed=3)
        network = Network(
            "(float[batch,3,4,4] x) => (float[batch,5,4,4] y) { c = Conv(x, w, b) y = Relu(c) }",
            {"w": weight, "b": bias},
            {"x": x},
        )
        floats = graphs.answers(network.model(), network.inputs)["y"]
        taken = Affine.of(float(x.min()), float(x.max()), ir.DataType.UINT8)
        given = Affine.of(0, float(floats.max()), ir.DataType.UINT8)
        scales = channel_scales(weight, 0)
        integers = to_int8(weight, scales, 0)[:, :, 0, 0].astype(np.float64)
        activations = np.clip(np.rint(x / np.float32(taken.scale)) + taken.zero, 0, 255) - taken.zero
        by = (scales * taken.scale)[:, None, None]
        sums = np.einsum("oi,bihw->bohw", integers, activations) + np.rint(bias[:, None, None] / by)
        expected = np.clip(np.rint(sums * by / given.scale), 0, 255) * given.scale
        actual = graphs.answers(quantized(network), network.inputs)["y"]
        assert np.abs(actual - expected).max() <= given.scale * 1.01  # a tie may go the other way
        assert (np.abs(actual - expected) < given.scale / 2).mean() > 0.99


class TestBiases:
    """A bias of 32 bits has the scale of input times weights, which must not be too fine for it."""

    @pytest.mark.parametrize("per_channel", [True, False])
    @pytest.mark.parametrize("name", ["gemm turned", "conv"])
    def test_a_channel_without_weights_keeps_its_bias(self, name: str, per_channel: bool) -> None:
        network = NETWORKS[name]
        weight = network.weights["w"].copy()
        weight[3] = 0
        network = replace(network, weights={**network.weights, "w": weight})
        plan = replace(STATIC, per_channel=per_channel)
        actual = graphs.answers(quantized(network, plan), network.inputs)["y"]
        expected = graphs.answers(network.model(), network.inputs)["y"]
        step = float(np.ptp(expected)) / 255
        np.testing.assert_allclose(actual[:, 3], expected[:, 3], atol=step)
        assert sqnr(expected, actual) > 35

    def test_an_input_that_is_always_zero(self) -> None:
        network = replace(PRODUCTS["gemm turned"], inputs={"x": np.zeros((10, 16), np.float32)})
        actual = graphs.answers(quantized(network), network.inputs)["y"]
        np.testing.assert_allclose(actual, np.broadcast_to(network.weights["b"], (10, 8)), rtol=1e-5)
        half = network.half()
        assert np.isfinite(graphs.answers(quantized(half), half.inputs)["y"]).all()

    @pytest.mark.matrix
    def test_biases_correct_the_mean_error(self) -> None:
        for name in ("gemm", "gemm turned", "matmul with bias", "matmul of texts", "conv", "conv in groups"):
            network = NETWORKS[name]
            inputs = {"x": np.abs(network.inputs["x"]) + 1}  # where the mean is far from zero
            network = replace(network, inputs=inputs)
            axis = (0, 2, 3) if "conv" in name else tuple(range(inputs["x"].ndim - 1))
            expected = graphs.answers(network.model(), inputs)["y"]
            plain, corrected = (
                np.abs(
                    (graphs.answers(quantized(network, replace(STATIC, correct=flag)), inputs)["y"] - expected).mean(
                        axis=axis
                    )
                ).mean()
                for flag in (False, True)
            )
            assert corrected < plain / 2, name


class TestGraph:
    @pytest.mark.matrix
    def test_inputs_and_outputs_keep_their_names_and_types(self) -> None:
        for network in TAKEN.values():
            before, after = network.model().graph, quantized(network).graph
            for left, right in ((before.inputs, after.inputs), (before.outputs, after.outputs)):
                assert [(value.name, value.dtype) for value in left] == [(value.name, value.dtype) for value in right]

    @pytest.mark.matrix
    def test_unused_floating_point_weights_are_removed(self) -> None:
        for name, network in TAKEN.items():
            if name in ("weight that is an output too", "conv before a branch", "embedding and pooling"):
                continue
            kept = quantized(network).graph.initializers
            large = [
                key for key, value in kept.items() if value.dtype is ir.DataType.FLOAT and len(value.shape or ()) > 1
            ]
            assert not large, name

    def test_the_body_of_a_branch_stays_as_it_is(self) -> None:
        network = BLOCKS["conv before a branch"]
        result = quantized(network)
        branch = next(node for node in result.graph if node.op_type == "If")
        body = branch.attributes["else_branch"].as_graph()
        assert [node.op_type for node in body] == ["Conv"]
        inputs = {**network.inputs, "flag": np.array(False)}
        expected, actual = (graphs.answers(model, inputs)["y"] for model in (network.model(), result))
        assert sqnr(expected, actual) > 35

    def test_one_quantize_pair_for_all_users_of_a_value(self) -> None:
        found = graphs.operators(quantized(BLOCKS["attention"]))
        # n once for three products, then attention's result, n2 and gl
        assert found.count("QuantizeLinear") == 4

    def test_the_addition_of_a_bias_joins_the_product_only_where_it_is_one(self) -> None:
        def audited(text: str, weights: Mapping[str, Array]) -> Mapping[str, int]:
            data = {"x": random(6, 4)}
            return graphs.audited(graphs.quantized(graphs.graph(text, weights), STATIC, data)).quantized

        weights = {"w": random(4, 6), "b": random(6)}
        head = "(float[batch,4] x) => (float[batch,6] y"
        assert audited(f"{head}) {{ p = MatMul(x, w) y = Add(p, b) }}", weights) == {"QGemm": 1}
        twice = audited(f"{head}) {{ p = MatMul(x, w) s = Add(p, b) y = Mul(s, p) }}", weights)
        assert twice == {"MatMulIntegerToFloat": 1}
        assert audited(f"{head}, float[batch,6] p) {{ p = MatMul(x, w) y = Add(p, b) }}", weights) == {
            "MatMulIntegerToFloat": 1
        }

    def test_factors_of_many_sizes_stay_floats(self) -> None:
        text = """(float[batch,4,9,9] x) => (float[batch,8,7,7] y) {
            c = Conv(x, w, b) m = Mul(c, factors) y = Conv(m, v) }"""
        factors = np.exp(random(8, 1, 1, seed=1, scale=4))
        weights = {"w": random(8, 4, 3, 3), "b": random(8), "v": random(8, 8, 1, 1) / factors.reshape(1, 8, 1, 1)}
        data = CONVOLUTIONS["conv"].inputs
        model = graphs.graph(text, {**weights, "factors": factors})
        result = graphs.quantized(model, STATIC, data)
        assert "QLinearMul" not in graphs.audited(result).quantized
        assert graphs.audited(result).floats == ("Mul m",)
        even = graphs.graph(text, {**weights, "factors": np.full_like(factors, 2)})
        assert graphs.audited(graphs.quantized(even, STATIC, data)).quantized == {"QLinearConv": 2, "QLinearMul": 1}


class TestTakes:
    @pytest.mark.parametrize(
        ("text", "weight"),
        [
            ("y = Gemm<alpha=2.0>(x, w)", random(4, 4)),
            ("y = Gemm<beta=2.0>(x, w, x)", random(4, 4)),
            ("y = Gemm(x, w, x)", random(4, 4)),
            ("y = Gemm<transA=1>(x, w)", random(4, 4)),
            ("y = MatMul(x, w)", random(4, 4, 4)),
            ("y = Gemm(x, w, rows)", random(4, 4)),
        ],
    )
    def test_operators_without_integer_kernels_are_left(self, text: str, weight: Array) -> None:
        model = graphs.graph(f"(float[4,4] x) => (float[a,b] y) {{ {text} }}", {"w": weight, "rows": random(4, 1)})
        if len(weight.shape) == 3:
            model = graphs.graph(f"(float[4,4] x) => (float[a,b,c] y) {{ {text} }}", {"w": weight})
        source = graphs.source_of(model)
        assert len(source.names) == 1
        assert plans.fitting(source, "static") == ()

    def test_layers_of_other_kinds(self) -> None:
        source = graphs.source_of(BLOCKS["embedding and pooling"].model())
        assert [layer.operator for layer in source.layers if static.takes(layer, 20)] == ["MatMul"]


class TestBetween:
    """Operators between two convolutions: in integers where ONNX Runtime supports it, and correct in any case."""

    WEIGHTS: Mapping[str, Array] = {
        "w": random(8, 4, 3, 3),
        "b": random(8, seed=1),
        "v": random(8, 8, 1, 1, seed=2),
        "c": random(8, seed=3),
        "each": random(1, 8, 1, 1, seed=4),
        "one": np.array([1], np.int64),
        "two": np.array([2], np.int64),
        "seven": np.array([7], np.int64),
        "sizes": np.array([1, 1, 2, 2], np.float32),
        "three": np.array(3, np.float32),
        "mean": random(8, seed=5),
        "variance": np.abs(random(8, seed=6)) + 1,
    }

    @pytest.mark.one_case
    @pytest.mark.parametrize(
        ("between", "integer", "floats"),
        [
            ("m = Sigmoid(a)", ["QLinearSigmoid"], []),
            ("m = LeakyRelu<alpha=0.2>(a)", ["QLinearLeakyRelu"], []),
            ("m = AveragePool<kernel_shape=[2,2], strides=[2,2], pads=[1,1,1,1]>(a)", ["QLinearAveragePool"], []),
            ("s = Sigmoid(a) m = Mul(a, s)", ["QLinearMul", "QLinearSigmoid"], []),
            (
                "g = GlobalAveragePool(a) h = Conv(g, v) s = Sigmoid(h) m = Mul(a, s)",
                ["QLinearConv", "QLinearGlobalAveragePool", "QLinearMul", "QLinearSigmoid"],
                [],
            ),
            ("m = Add(a, a)", ["QLinearAdd"], []),
            ("m = Add(a, each)", ["QLinearAdd"], []),
            ("m = Mul(a, three)", ["QLinearMul"], []),
            ("r = Relu(a) d = Conv(r, v) m = Add(r, d)", ["QLinearAdd", "QLinearConv"], []),
            ("p = MaxPool<kernel_shape=[2,2]>(a) m = Relu(p)", [], []),
            ("r = Relu(a) m = Relu(r)", [], []),
            ("m = Slice(a, one, seven, two)", [], []),
            ("u = Unsqueeze(a, one) m = Squeeze(u, one)", [], []),
            ("d = SpaceToDepth<blocksize=3>(a) m = DepthToSpace<blocksize=3>(d)", [], None),
            ("s = Transpose<perm=[0,1,3,2]>(a) m = Transpose<perm=[0,1,3,2]>(s)", [], []),
            ("h, i = Split<axis=1, num_outputs=2>(a) m = Concat<axis=1>(h, i)", [], None),
            ("m = Resize(a, , sizes)", [], None),
            ("m = HardSwish(a)", [], None),
            ("m = PRelu(a, each)", [], None),
            ("m = BatchNormalization(a, variance, mean, mean, variance)", [], None),
            ("m = InstanceNormalization(a, mean, c)", [], ["InstanceNormalization"]),
        ],
    )
    def test_right_and_in_integers(self, between: str, integer: list[str], floats: list[str] | None) -> None:
        text = f"""(float[batch,4,9,9] x) => (float[batch,p,q,r] y) {{
            a = Conv<pads=[1,1,1,1]>(x, w, b) {between} y = Conv(m, v, c) }}"""
        words = text.replace("(", " ").replace(")", " ").replace(",", " ").split()
        weights = {name: array for name, array in self.WEIGHTS.items() if name in words}
        data = CONVOLUTIONS["conv"].inputs
        model = graphs.graph(text, weights)
        result = graphs.quantized(model, STATIC, data)
        assert sqnr(graphs.answers(model, data)["y"], graphs.answers(result, data)["y"]) > 30
        found = graphs.audited(result)
        if integer or floats is not None:
            expected = sorted([*integer, "QLinearConv", "QLinearConv"])
            assert sorted(name for name, count in found.quantized.items() for _ in range(count)) == expected
        if floats is not None:
            assert [item.partition(" ")[0] for item in found.floats] == floats


@pytest.mark.matrix
@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min), -1e4])
def test_masks_of_attention(hidden: float) -> None:
    mask = np.triu(np.full((6, 6), hidden), 1).astype(np.float32)
    network = Network(
        """(float[batch,6,16] x) => (float[batch,6,8] y) {
            q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) kt = Transpose<perm=[0,2,1]>(k)
            s = MatMul(q, kt) sm = Add(s, mask) p = Softmax<axis=-1>(sm) o = MatMul(p, v) y = MatMul(o, wo) }""",
        {
            "wq": random(16, 8, scale=0.2),
            "wk": random(16, 8, seed=1, scale=0.2),
            "wv": random(16, 8, seed=2),
            "wo": random(8, 8, seed=3),
            "mask": mask,
        },
        {"x": random(9, 6, 16, seed=4)},
    )
    for plan in (STATIC, *VARIANTS.values()):
        assert min(noises(network, quantized(network, plan))) > 28
    model = quantized(network)
    # The first row sees only itself, whatever the others are.
    other = network.inputs["x"].copy()
    other[:, 1:] += 1
    before, after = (graphs.answers(model, {"x": x})["y"] for x in (network.inputs["x"], other))
    np.testing.assert_array_equal(before[:, 0], after[:, 0])


def test_functions_are_left_whole() -> None:
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 18, "local" : 1]>
        g (float[batch,16] x) => (float[batch,8] y) { h = local.scaled(x) y = MatMul(h, w) }
        <opset_import: ["" : 18], domain: "local">
        scaled (a) => (b) { c = Constant<value = float[1] {2.0}>() d = Mul(a, c) b = Relu(d) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(random(16, 8), "w"))
    model = ir.serde.deserialize_model(proto)
    data = {"x": random(20, 16)}
    result = graphs.quantized(model, STATIC, data)
    assert [node.op_type for function in result.functions.values() for node in function] == ["Constant", "Mul", "Relu"]
    assert sqnr(graphs.answers(model, data)["y"], graphs.answers(result, data)["y"]) > 38


@pytest.mark.parametrize("name", ["matmul with bias", "gemm", "residual block", "attention"])
def test_a_batch_of_nothing(name: str) -> None:
    network = NETWORKS[name]
    empty = {key: array[:0] for key, array in network.inputs.items()}
    (expected,) = graphs.answers(network.model(), empty).values()
    (actual,) = graphs.answers(quantized(network), empty).values()
    assert actual.shape == expected.shape


@pytest.mark.parametrize("size", [1e-20, 1e-3, 1e37])
def test_sizes_of_values(size: float) -> None:
    model = graphs.graph(PRODUCTS["gemm without bias"].text, PRODUCTS["gemm without bias"].weights)
    data = {"x": random(40, 16, seed=2) * np.float32(size)}
    result = graphs.quantized(model, STATIC, data)
    actual = graphs.answers(result, data)["y"]
    assert np.isfinite(actual).all()
    if size >= 1e-3:
        assert sqnr(graphs.answers(model, data)["y"] / size, actual / size) > 38
