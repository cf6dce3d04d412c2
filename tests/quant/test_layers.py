from __future__ import annotations

import numpy as np
import pytest

from ingot.errors import InvalidArgument
from ingot.quant.graph import layers
from ingot.quant.graph.source import Source
from tests.quant import graphs
from tests.quant.graphs import random
from tests.quant.networks import BLOCKS, NETWORKS

NAMES = ("encoder.0.attention.query", "encoder.0.attention.key", "encoder.1.attention.query", "head", "head2", "head#2")


class TestFind:
    def test_layers_are_called_by_their_parameters(self) -> None:
        model = graphs.graph(
            """(float[batch,4,9,9] x) => (float[batch,3] y) {
                c = Conv(x, w0, b0) d = Conv(c, folded, b1) p = GlobalAveragePool(d) f = Flatten(p)
                m = MatMul(f, transposed) a = Add(m, b2) [last] y = MatMul(a, w3) }""",
            {
                "w0": random(8, 4, 3, 3),
                "b0": random(8),
                "folded": random(8, 8, 1, 1),
                "b1": random(8),
                "transposed": random(8, 5),
                "b2": random(5),
                "w3": random(5, 3),
            },
            paths={
                "w0": "features.0.weight",
                "b0": "features.0.bias",
                "b1": "features.1.bias",
                "b2": "classifier.fc.bias",
            },
        )
        found = layers.find(model)
        assert [layer.name for layer in found] == ["features.0", "features.1", "classifier.fc", "last"]
        assert [layer.operator for layer in found] == ["Conv", "Conv", "MatMul", "MatMul"]
        assert [layer.axis for layer in found] == [0, 0, 1, 1]

    def test_layers_that_share_a_weight_have_two_names(self) -> None:
        text = "(float[n,4] x) => (float[n,4] y) { h = MatMul(x, w) y = MatMul(h, w) }"
        source = graphs.source_of(graphs.graph(text, {"w": random(4, 4)}, paths={"w": "fc.weight"}))
        assert source.names == ("fc", "fc#2")
        assert list(source.by_name(source.model())) == ["fc", "fc#2"]

    def test_a_layer_without_any_name_has_that_of_its_output(self) -> None:
        assert [layer.name for layer in layers.find(NETWORKS["matmul"].model())] == ["MatMul_y"]

    def test_a_node_without_constant_float_weights_is_not_a_layer(self) -> None:
        model = graphs.graph(
            """(float[n,4] x, float[4,4] given, int32[n,4] whole) => (float[n,4] a, float[n,4] b, int32[n,4] c) {
                a = MatMul(x, given) b = MatMul(x, default) c = MatMul(whole, integers) }""",
            {"integers": np.ones((4, 4), np.int32), "default": random(4, 4)},
        )
        assert [layer.name for layer in layers.find(model)] == ["MatMul_b"]

    def test_a_default_that_callers_can_override_is_not_constant(self) -> None:
        text = "(float[n,4] x, float[4,4] w) => (float[n,4] y) { y = MatMul(x, w) }"
        assert layers.find(graphs.graph(text, {"w": random(4, 4)})) == ()

    def test_a_weight_without_values_is_not_a_layer(self) -> None:
        text = "(float[n,0] x) => (float[n,4] y) { y = MatMul(x, w) }"
        assert layers.find(graphs.graph(text, {"w": np.zeros((0, 4), np.float32)})) == ()

    def test_bodies_of_branches_and_functions_are_left_whole(self) -> None:
        assert [layer.name for layer in layers.find(BLOCKS["conv before a branch"].model())] == ["Conv_c"]

    def test_sizes(self) -> None:
        for name in ("conv", "depthwise conv", "conv in groups"):
            (layer,) = layers.find(NETWORKS[name].model())
            assert layer.size == NETWORKS[name].weights["w"].size


class TestIsQuantized:
    def test_integer_arithmetic_is_found_in_any_graph(self) -> None:
        assert not layers.is_quantized(BLOCKS["conv before a branch"].model())
        text = """(float[n,4] x, bool flag) => (float[n,4] y) {
            y = If (flag) <
                then_branch = yes () => (float[n,4] t) { q = QuantizeLinear(x, s, z) t = DequantizeLinear(q, s, z) },
                else_branch = no () => (float[n,4] f) { f = Relu(x) }> }"""
        model = graphs.graph(text, {"s": np.array(0.1, np.float32), "z": np.array(3, np.uint8)})
        assert layers.is_quantized(model)
        with pytest.raises(InvalidArgument, match="quantized already"):
            graphs.source_of(model)


class TestChoose:
    def test_by_name_or_by_a_prefix_that_ends_at_a_dot(self) -> None:
        assert layers.choose(NAMES, ["head"]) == ("head",)
        assert layers.choose(NAMES, ["encoder.0"]) == NAMES[:2]
        assert layers.choose(NAMES, ["encoder"]) == NAMES[:3]
        assert layers.choose(NAMES, ["encoder.0.attention.key", "encoder.0"]) == (NAMES[1], NAMES[0])
        assert layers.choose(NAMES, ["head#2"]) == ("head#2",)
        assert layers.choose(NAMES, []) == ()

    @pytest.mark.parametrize(
        ("wanted", "message"),
        [
            ("encoder.0.attention.qurey", r"the nearest are: encoder\.0\.attention\.query"),
            ("hed", "there is no layer 'hed' to keep; the nearest are: head"),
            ("encoder.0.att", r"nearest are: encoder\.0\.attention"),
            ("", "there is no layer ''"),
            ("zzz", r"nearest are: encoder\.0\.attention\.query, "),
        ],
    )
    def test_the_nearest_names_are_suggested(self, wanted: str, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            layers.choose(NAMES, [wanted])

    def test_a_model_without_layers(self) -> None:
        with pytest.raises(InvalidArgument, match="there is no layer 'x'"):
            layers.choose((), ["x"])


def test_a_source_finds_what_a_bare_file_does_not_say() -> None:
    noted, bare = (graphs.source_of(BLOCKS["residual block"].model(inferred=inferred)) for inferred in (True, False))
    assert isinstance(bare, Source)
    assert bare.names == noted.names
    types = [[value.dtype for node in item.model().graph for value in node.outputs] for item in (noted, bare)]
    assert types[0] == types[1]
