from __future__ import annotations

import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.fx import CommonSubexpressions
from tests.export.models import Function
from tests.export.rewrite.rules.fx.support import lower, onnx_operators, operators, rewrite, trace

pytestmark = pytest.mark.matrix  # `make test` has the twin of the rule for ONNX graphs

X = "x:float32[batch,seq]"


def test_equal_computations_are_merged() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = x.unsqueeze(-1) * torch.arange(x.shape[1]).sum()
        second = x.unsqueeze(-1) * torch.arange(x.shape[1]).sum()
        return torch.split(first.sin() + second.sin(), 1, -1)[0] + torch.split(second, 1, -1)[0]

    graph = rewrite(CommonSubexpressions(), Function(function), X, matches=5)
    assert operators(graph)["aten.mul.Tensor"] == operators(graph)["aten.sin.default"] == 1


@pytest.mark.matrix
def test_tensors_that_share_a_weight_lower_to_onnx() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu() * self.linear(x).tanh()  # type: ignore[no-any-return]

    assert onnx_operators(lower(CommonSubexpressions(), Twice(), "x:float32[batch,4]", matches=1))["Gemm"] == 1


def test_arguments_that_are_only_equal_are_not_the_same() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.full_like(x, 1, dtype=torch.int64) / 2
            + torch.full_like(x, True, dtype=torch.bool) * x.sum(0) * (x / 0.0).isinf()
            + (x / -0.0)
        )

    rewrite(CommonSubexpressions(), Function(function), X, matches=0)


def test_random_numbers_are_drawn_each_time() -> None:
    graph = trace(Function(lambda x: torch.rand_like(x) - torch.rand_like(x)), torch.zeros(3))
    result = CommonSubexpressions()(graph)
    assert result.matches == 0
    assert result.graph(torch.zeros(3)).any()


def test_reads_before_and_after_a_write_are_not_merged() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        before = y + 1
        y.view(-1)[:1].mul_(3)
        return before - (y + 1)

    rewrite(CommonSubexpressions(), Function(function), X, matches=0)


def test_equal_results_that_are_written_to_are_kept_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first, second = x + 1, x + 1
        return first.mul_(2) - second

    rewrite(CommonSubexpressions(), Function(function), X, matches=0)


@pytest.mark.matrix
def test_outputs_keep_a_node_each() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return x + 1, x + 1, (x + 1).sin()

    lower(CommonSubexpressions(), Pair(), X, matches=1)


def test_calls_that_branch_are_kept_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        choices = [torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,)) for _ in range(2)]
        return torch.stack(choices).sum(0)

    result = CommonSubexpressions()(trace(Function(function), torch.randn(3)))
    assert operators(result.graph)["cond"] == 2
