from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.fx import SiluGate
from tests.export.rewrite.rules.fx.support import Each, lower, onnx_operators, operators, rewrite

X = "x:float32[batch,seq,8]"
Formula = Callable[[torch.Tensor], torch.Tensor]

SAME: tuple[Formula, ...] = (
    lambda x: torch.sigmoid(x) * x,
    lambda x: x / (1 + torch.exp(-x)),
    lambda x: x * (1 / (torch.exp(x * -1) + 1)),
)
OTHER: tuple[Formula, ...] = (
    lambda x: x * torch.sigmoid(1.702 * x),
    lambda x: x * torch.sigmoid(x.flip(-1)),
    lambda x: x * torch.sigmoid(x + 1e-3),
    lambda x: x[:, :1] * torch.sigmoid(x),
    # Equal to it within 1e-6, but not for x = 0, and NaN where exp(x) overflows.
    lambda x: (x + 4e-7) * torch.sigmoid(x),
    lambda x: x * torch.exp(x) / (1 + torch.exp(x)),
)


def test_every_formula_of_it_becomes_the_operator() -> None:
    assert operators(rewrite(SiluGate(), Each(SAME), X, matches=3)) == {"aten.silu.default": 3}


@pytest.mark.matrix
def test_other_functions_stay() -> None:
    rewrite(SiluGate(), Each(OTHER), X, matches=0)


def test_integers_stay_as_the_operator_rejects_them() -> None:
    rewrite(SiluGate(), Each(SAME), X.replace("float32", "int64"), matches=0)


class Mlp(nn.Module):
    """As LLaMA has it, with the gate written out."""

    def __init__(self, gated: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gated(self.gate(x), self.up(x)))  # type: ignore[no-any-return]


@pytest.mark.matrix
def test_gates_are_found_in_any_order_of_their_product() -> None:
    layers = (
        Mlp(lambda gate, up: gate * torch.sigmoid(gate) * up),
        Mlp(lambda gate, up: gate * up * torch.sigmoid(gate)),
        Mlp(lambda gate, up: torch.sigmoid(gate) * (up * gate)),
    )
    graph = rewrite(SiluGate(), nn.Sequential(*layers), X, matches=3)
    assert operators(graph) == {"aten.linear.default": 9, "aten.silu.default": 3, "aten.mul.Tensor": 3}


@pytest.mark.matrix
def test_it_lowers_to_onnx() -> None:
    model = lower(SiluGate(), Mlp(lambda gate, up: gate / (1 + torch.exp(-gate)) * up), X, matches=1)
    assert onnx_operators(model)["Sigmoid"] == 1
    assert "Exp" not in onnx_operators(model)
