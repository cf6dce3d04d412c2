from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from ingot.export.rewrite.rules.onnx import CommonSubexpressions
from tests.export.rewrite.rules.onnx.support import apply, export, floats, operators, parse, run, untouched


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * 2 + 1) + torch.sigmoid(x * 2 + 1)


def graph(body: str, outputs: str = "float[batch,4] y", constants: str = "float unused = {0}") -> ir.Model:
    return parse(f"g (float[batch,4] x) => ({outputs}) <{constants}> {{ {body} }}")


@pytest.mark.matrix
def test_repeated_computations_of_a_module_are_merged() -> None:
    model = export(Twice(), torch.randn(2, 4), optimize=False)
    assert operators(model)["Mul"] == 2
    found = operators(CommonSubexpressions()(model).graph)
    assert (found["Mul"], found["Relu"], found["Sigmoid"]) == (1, 1, 1)
    apply(CommonSubexpressions(), model, CommonSubexpressions()(model).matches)


def test_equal_weights_become_one() -> None:
    constants = "float[4] a = {1, 2, 3, 4}, float[4] b = {1, 2, 3, 4}"
    found = apply(CommonSubexpressions(), graph("s = Add(x, a) t = Add(x, b) y = Mul(s, t)", constants=constants), 2)
    assert operators(found) == {"Add": 1, "Mul": 1}


def test_two_outputs_that_are_the_same_keep_their_names_and_shapes() -> None:
    model = graph("y = Neg(x) z = Neg(x)", "float[batch,4] y, float[rows,4] z")
    assert operators(apply(CommonSubexpressions(), model, 1)) == {"Neg": 1, "Identity": 1}


def test_an_output_that_the_first_node_left_out_is_computed_by_it_too() -> None:
    weights = floats(1, 8, 2)
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r"], ["", "last"], hidden_size=2),
        helper.make_node("LSTM", ["x", "w", "r"], ["all", "unused"], hidden_size=2),
        helper.make_node("Neg", ["last"], ["y"]),
        helper.make_node("Neg", ["all"], ["z"]),
    ]
    model = ir.from_proto(
        helper.make_model(
            helper.make_graph(
                nodes,
                "g",
                [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["seq", "batch", 2])],
                [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "z")],
                [numpy_helper.from_array(weights, "w"), numpy_helper.from_array(weights + 1, "r")],
            ),
            opset_imports=[helper.make_opsetid("", 20)],
            ir_version=10,
        )
    )
    assert operators(apply(CommonSubexpressions(), model, 1)) == {"LSTM": 1, "Neg": 2}


@pytest.mark.parametrize(
    "model",
    [
        graph("a = Add(x, one) b = Sub(x, one) y = Mul(a, b)", constants="float one = {1}"),
        graph("a = Softmax <axis = 0> (x) b = Softmax <axis = 1> (x) y = Mul(a, b)"),
        graph("a = Add(x, one) b = Add(x, two) y = Mul(a, b)", constants="float one = {1}, float[1] two = {1}"),
    ],
    ids=["operators", "attributes", "shapes"],
)
def test_different_nodes_stay(model: ir.Model) -> None:
    untouched(CommonSubexpressions(), model)


def test_zeros_of_two_signs_stay_two() -> None:
    body = "a = Constant <value_float = 0.0> () b = Constant <value_float = -0.0> () y = Div(one, a) z = Div(one, b)"
    found = apply(CommonSubexpressions(), graph(body, "float y, float z", "float one = {1}"), 0)
    assert [float(array) for array in run(found, {"batch": 1}).values()] == [np.inf, -np.inf]


def test_strings_that_differ_stay_two() -> None:
    body = 'a = Constant <value = string[1] {"ab"}> () b = Constant <value = string[1] {"cd"}> () '
    model = graph(f"{body} y = Identity(a) z = Identity(b)", "string[1] y, string[1] z")
    found = CommonSubexpressions()(model).graph
    assert [array.tolist() for array in run(found, {"batch": 1}).values()] == [["ab"], ["cd"]]


@pytest.mark.parametrize("draw", ["RandomNormalLike(x)", "Bernoulli(half)"])
def test_two_draws_stay_two(draw: str) -> None:
    model = graph(f"half = Sigmoid(x) a = {draw} b = {draw} y = Sub(a, b)")
    assert CommonSubexpressions()(model).matches == 0
