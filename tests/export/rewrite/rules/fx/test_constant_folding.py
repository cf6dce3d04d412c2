from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from ingot.export.rewrite.rules.fx.constant_folding import GROWTH, ConstantFolding
from tests.export.rewrite.rules.fx.support import lower, onnx_operators, operators, rewrite, trace

pytestmark = pytest.mark.matrix  # `make test` has the twin of the rule for ONNX graphs

X = "x:float32[batch,8]"


class Masked(nn.Module):
    """Computes a mask and a scale on each call."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(8, 8).tril() * torch.tensor(8.0).rsqrt()
        return x @ (self.table * mask).t() + torch.arange(8)


def test_computations_without_inputs_become_constants() -> None:
    graph = rewrite(ConstantFolding(), Masked(), X, matches=2)
    assert operators(graph) == {"aten.matmul.default": 1, "aten.add.Tensor": 1}
    assert {tuple(value.shape) for value in graph.state_dict().values()} == {(8, 8), (8,)}


@pytest.mark.matrix
def test_a_parametrized_weight_becomes_a_plain_one_which_lowers_to_onnx() -> None:
    module = nn.Sequential(weight_norm(nn.Conv1d(8, 4, 3)), nn.BatchNorm1d(4)).eval()
    before = copy.deepcopy(module.state_dict())
    model = lower(ConstantFolding(), module, "x:float32[batch,8,9]", matches=1)
    assert onnx_operators(model).keys() <= {"Conv", "BatchNormalization"}
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_random_numbers_stay_random() -> None:
    class Noisy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.rand(3) * torch.ones(3) * 2

    result = ConstantFolding()(trace(Noisy(), torch.zeros(3)))
    assert operators(result.graph)["aten.rand.default"] == 1
    assert not torch.equal(result.graph(torch.zeros(3)), result.graph(torch.zeros(3)))


def test_a_buffer_that_the_graph_writes_is_not_folded() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[:1].add_(1)
            local = torch.zeros(2)
            local += x
            return x + self.calls * 2 + local

    module = Counting()
    result = ConstantFolding()(trace(module, torch.zeros(2)))
    assert result.matches == 0
    assert [result.graph(torch.ones(2)).tolist() for _ in range(2)] == [[4, 2], [6, 2]]


def test_a_constant_does_not_make_the_program_much_larger() -> None:
    size = GROWTH // 4 // 8

    class Spread(nn.Module):
        """Two large tables of small weights: one just within the limit, one beyond it."""

        def __init__(self) -> None:
            super().__init__()
            self.row = nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.row.expand(size, 8).t().contiguous(), x @ self.row.repeat(size + 1, 1).t()  # type: ignore[return-value]

    result = ConstantFolding()(trace(Spread(), torch.randn(2, 8)))
    assert result.matches == 1
    assert operators(result.graph)["aten.repeat.default"] == 1


def test_a_large_weight_is_folded_only_if_the_old_one_goes() -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool):
            super().__init__()
            self.table = nn.Embedding(1000, 64)
            self.tied = tied

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ (self.table.weight * 2).t()
            return y @ self.table.weight if self.tied else y

    for tied in (True, False):
        result = ConstantFolding()(trace(Tied(tied), torch.randn(2, 64)))
        assert result.matches == (not tied)


@pytest.mark.matrix
def test_a_constant_may_be_an_output() -> None:
    class Returned(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x + 1, torch.arange(3) * 2

    assert onnx_operators(lower(ConstantFolding(), Returned(), "x:float32[batch]", matches=1)) == {"Add": 1}
