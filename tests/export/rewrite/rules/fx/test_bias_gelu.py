from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ingot.export.rewrite.rules.fx import BiasGelu
from tests.export.models import Function
from tests.export.rewrite.rules.fx.support import Each, lower, onnx_operators, operators, rewrite

X = "x:float32[batch,seq,8]"
Formula = Callable[[torch.Tensor], torch.Tensor]
ROOT = math.sqrt(2 / math.pi)

BY_ERF: tuple[Formula, ...] = (
    lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    lambda x: x * (1 + torch.erf(x * 0.7071067811865476)) / 2,
)
BY_TANH: tuple[Formula, ...] = (
    lambda x: 0.5 * x * (1.0 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),  # transformers
    lambda x: x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))),  # Megatron
    lambda x: x * torch.sigmoid(2 * ROOT * (x + 0.044715 * x**3)),
)
OTHER: tuple[Formula, ...] = (
    lambda x: x * torch.sigmoid(1.702 * x),
    lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.0447 * x**3))),
    lambda x: x * (1 + torch.erf(x / math.sqrt(2.0))) * 0.25,
    lambda x: x * 0.5 * (1 + torch.erf((x / math.sqrt(2.0)).clamp(-1, 1))),
    lambda x: x * 0.5 * (1 + torch.erf(x.flip(-1) / math.sqrt(2.0))),
    lambda x: x * 0.5 * (1 + torch.erf(x / x.shape[1])),
)


@pytest.mark.matrix
def test_every_formula_of_it_becomes_the_operator() -> None:
    functions = [*BY_ERF, *BY_TANH, lambda x: BY_TANH[0](BY_ERF[0](x) - 1)]
    graph = rewrite(BiasGelu(), Each(functions), X, matches=7)
    assert operators(graph) == {"aten.sub.Tensor": 1, "aten.gelu.default": 7}
    nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.gelu.default)
    kinds = [node.kwargs["approximate"] for node in nodes]
    assert kinds == ["none", "none", "tanh", "tanh", "tanh", "none", "tanh"]


@pytest.mark.matrix
def test_other_functions_stay() -> None:
    rewrite(BiasGelu(), Each(OTHER), X, matches=0)


class Layer(nn.Module):
    """A linear layer that adds its bias in the activation, as Megatron does."""

    def __init__(self, formula: Formula, bias: torch.Tensor | None = None):
        super().__init__()
        self.linear = nn.Linear(8, 6, bias=False)
        self.bias = nn.Parameter(torch.randn(6) if bias is None else bias)
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self.linear(x) + self.bias)


def test_a_bias_added_before_the_operator_goes_into_the_layer() -> None:
    graph = rewrite(BiasGelu(), Layer(functional.gelu), X, matches=1)
    assert operators(graph) == {"aten.linear.default": 1, "aten.gelu.default": 1}


@pytest.mark.matrix
def test_both_lower_to_onnx() -> None:
    model = lower(BiasGelu(), Layer(BY_TANH[1]), X, matches=2)
    assert onnx_operators(model)["Gelu"] == 1
    assert not onnx_operators(model).keys() & {"Tanh", "Mul"}


@pytest.mark.matrix
def test_a_sum_without_a_bias_stays() -> None:
    rewrite(BiasGelu(), Layer(functional.gelu, bias=torch.randn(3, 1, 6)), "x:float32[3,batch,8]", matches=0)
    rewrite(BiasGelu(), Layer(functional.relu), X, matches=0)
    rewrite(BiasGelu(), Layer(lambda x: functional.gelu(x) + x), X, matches=0)


def test_a_cast_within_the_formula_keeps_it() -> None:
    def mixed(x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 * (1 + torch.erf(x.float() / math.sqrt(2.0)))).to(x.dtype)

    rewrite(BiasGelu(), Function(mixed), "x:float16[batch,8]", matches=0, tolerance=1e-3)
