from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.onnx import ConstantFolding
from tests.export.rewrite.rules.onnx.support import apply, export, floats, operators, parse, run, untouched


class Positions(nn.Module):
    """A layer whose graph, before any optimization, is mostly sizes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x).reshape(x.shape[0], 2, 4) + torch.arange(4, dtype=torch.float32) * 2
        return y


def graph(
    body: str, constants: str = "", outputs: str = "float[batch,4] y", inputs: str = "", opset: int = 20
) -> ir.Model:
    return parse(f"g (float[batch,4] x{inputs}) => ({outputs}) <{constants}> {{ {body} }}", opset, {"w": floats(4, 64)})


@pytest.mark.matrix
def test_unoptimized_exports_of_pytorch_are_folded() -> None:
    model = export(Positions(), torch.randn(2, 8), optimize=False)
    found = ConstantFolding()(model)
    assert found.matches > 3
    assert sum(operators(found.graph).values()) == sum(operators(model).values()) - found.matches
    apply(ConstantFolding(), model, found.matches)
    untouched(ConstantFolding(), found.graph)


def test_a_weight_that_is_turned_is_stored_turned() -> None:
    model = graph("t = Transpose <perm = [0, 1]> (w) y2 = MatMul(x, t) y = ReduceSum <keepdims = 1> (y2)")
    found = apply(ConstantFolding(), model, 1)
    assert operators(found) == {"MatMul": 1, "ReduceSum": 1}


def test_inputs_with_a_default_value_become_constants() -> None:
    model = graph("s = Add(w2, w2) y = Add(x, s)", "float[4] w2 = {1, 2, 3, 4}", inputs=", float[4] w2")
    assert [value.name for value in model.graph.inputs] == ["x", "w2"]
    found = ConstantFolding()(model)
    assert [value.name for value in found.graph.graph.inputs] == ["x"]
    assert operators(found.graph) == {"Add": 1}


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        (
            "e = Expand(one, large) s = ReduceMax <keepdims = 0> (e) y = Add(x, s)",
            "float one = {1}, int64[2] large = {300, 300}",
        ),
        ("e = ConstantOfShape(large) s = ReduceMax <keepdims = 0> (e) y = Add(x, s)", "int64[2] large = {300, 300}"),
        (
            "e = Range(zero, large, one) s = ReduceMax <keepdims = 0> (e) y = Add(x, s)",
            "float one = {1}, float zero = {0}, float large = {90000}",
        ),
        (
            "e = Tile(one, large) s = ReduceMax <keepdims = 0> (e) y = Add(x, s)",
            "float[1] one = {1}, int64[1] large = {90000}",
        ),
    ],
    ids=["Expand", "ConstantOfShape", "Range", "Tile"],
)
def test_the_file_does_not_grow(body: str, constants: str) -> None:
    untouched(ConstantFolding(), graph(body, constants))


def test_a_shape_that_is_too_large_for_memory_is_not_even_tried() -> None:
    model = graph(
        "e = Expand(one, large) y = Add(x, e)", "float one = {1}, int64[3] large = {1000000, 1000000, 1000000}"
    )
    assert ConstantFolding()(model).matches == 0


@pytest.mark.parametrize("draw", ["RandomNormal <shape = [4]> ()", "Bernoulli(half)", "RandomUniformLike(half)"])
def test_random_numbers_stay_random(draw: str) -> None:
    model = graph(f"r = {draw} y = Add(x, r)", "float[4] half = {0.5, 0.5, 0.5, 0.5}")
    found = ConstantFolding()(model)
    assert found.matches == 0
    assert operators(found.graph) == operators(model)


def test_quantized_weights_stay_quantized() -> None:
    constants = "int8[4] q = {1, 2, 3, 4}, float s = {0.5}, int8 z = {0}"
    untouched(ConstantFolding(), graph("d = DequantizeLinear(q, s, z) y = Mul(x, d)", constants))


def test_a_model_of_sequences_is_left() -> None:
    body = "s = SequenceConstruct(x, x) y = ConcatFromSequence <axis = 0, new_axis = 1> (s)"
    untouched(ConstantFolding(), graph(body, "float unused = {1}", "float[a,b,c] y", opset=12))


def test_an_output_that_is_constant_keeps_its_name_and_shape() -> None:
    model = graph("a = Add(c, c) y = Identity(x)", "float[2] c = {1, 2}", "float[batch,4] y, float[2] a")
    found = apply(ConstantFolding(), model, 1)
    assert run(found, {"batch": 1})["a"].tolist() == [2, 4]


def test_the_body_of_a_function_is_left() -> None:
    proto = """
        <ir_version: 10, opset_import: ["": 20, "my": 1]>
        g (float[batch,4] x) => (float[batch,4] y) { y = my.twice(x) }
        <domain: "my", opset_import: ["": 20]>
        twice (a) => (b) { one = Constant <value_float = 1.0> () two = Add(one, one) b = Mul(a, two) }
    """
    import onnx

    model = ir.from_proto(onnx.parser.parse_model(proto))
    found = apply(ConstantFolding(), model, 0)
    assert [function.name for function in found.functions.values()] == ["twice"]
