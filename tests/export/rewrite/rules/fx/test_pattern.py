"""Guarantees of the pattern API to user-defined rules."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, aten, insert
from ingot.export.rewrite.passes.fx_pattern import Dim, Match, Number, Op, Pattern, PatternPass, Var
from tests.export.models import Function
from tests.export.rewrite.rules.fx.support import Each, lower, onnx_operators, operators, rewrite, trace

X = "x:float32[batch,4]"
GATE = Op(aten.clamp.default, Op(aten.add.Tensor, Var("x"), 3), 0, 6)


class HardSwish(PatternPass):
    """Replaces ``x * clamp(x + 3, 0, 6) / 6``."""

    name = "hard-swish"
    pattern = Op(aten.div.Tensor, Op(aten.mul.Tensor, Var("x"), GATE), 6)

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        return insert(root, aten.hardswish.default, match["x"])


@pytest.mark.matrix
def test_a_rule_is_a_pattern_and_what_replaces_it() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (3 + x.float()).clamp(0, 6) * x / 6

    assert onnx_operators(lower(HardSwish(), Function(function), X, matches=1)) == {"HardSwish": 1}


@pytest.mark.matrix
def test_arguments_that_a_pattern_does_not_name_must_have_their_defaults() -> None:
    functions = (
        lambda x: x * torch.add(x, 3, alpha=2).clamp(0, 6) / 6,
        lambda x: torch.div(x * (x + 3).clamp(0, 6), 6, rounding_mode="floor"),
        lambda x: x * (x + 3).clamp(0) / 6,
        lambda x: x * (x + 3).clamp(0, 6) / 6.5,
        lambda x: x.sin() * (x + 3).clamp(0, 6) / 6,
    )
    rewrite(HardSwish(), Each(functions), X, matches=0)


class Declining(HardSwish):
    """Accepts or declines each match."""

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        return super().replace(root, match, memory) if match["x"].op == "placeholder" else None


@pytest.mark.matrix
def test_a_rule_may_leave_a_match_as_it_is() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * (x + 3).clamp(0, 6) / 6
        return y * (y + 3).clamp(0, 6) / 6

    assert operators(rewrite(Declining(), Function(function), X, matches=1))["aten.clamp.default"] == 1
    assert operators(rewrite(HardSwish(), Function(function), X, matches=2)) == {"aten.hardswish.default": 2}


def found(pattern: Pattern, graph: fx.GraphModule) -> list[Match]:
    return [match for node in graph.graph.nodes for match in pattern.find(node, None, Match())]


def test_a_dimension_may_be_counted_from_either_end() -> None:
    graph = trace(Function(lambda x: (x.sum(1) + x.sum((-1,))) * x.sum(0)), torch.zeros(3, 3))
    assert len(found(Op(aten.sum.dim_IntList, Var("x"), Dim(-1)), graph)) == 2


def test_numbers_do_not_match_flags() -> None:
    graph = trace(Function(lambda x: x.sum(0, keepdim=True) * 2), torch.zeros(3))
    assert not found(Op(aten.sum.dim_IntList, Var("x"), [0], Number("keepdim")), graph)
    assert [match["factor"] for match in found(Op(aten.mul.Tensor, Var("x"), Number("factor")), graph)] == [2]


@pytest.mark.parametrize(
    ("write", "changed"),
    [
        (lambda x, y: y.add_(1), {"y"}),
        (lambda x, y: y.view(-1)[0].zero_(), {"y"}),
        (lambda x, y: x.copy_(y), {"x"}),
        (lambda x, y: torch.dropout(y, 0.5, False).add_(1), {"y"}),
        (lambda x, y: y.split(1)[0].mul_(2), {"y"}),
        (lambda x, y: torch.einsum("i->i", y).mul_(2), {"y"}),
        (lambda x, y: y.sin().add_(1), set()),
        (lambda x, y: y.detach_(), set()),
    ],
)
def test_writes_are_found_through_views(write: object, changed: set[str]) -> None:
    class Writing(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            write(x, y)  # type: ignore[operator]
            return x + y

    graph = trace(Writing(), torch.zeros(3), torch.zeros(3)).graph
    memory = Memory(graph)
    assert {node.name for node in graph.find_nodes(op="placeholder") if memory.writers(node)} == changed
