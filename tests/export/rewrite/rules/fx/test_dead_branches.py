from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from ingot.export.program import quiet
from ingot.export.rewrite.rules.fx import ConstantFolding, DeadBranches
from tests.export.models import Function
from tests.export.rewrite.rules.fx.support import lower, onnx_operators, operators, rewrite, trace

pytestmark = pytest.mark.matrix  # `make test` has the twin of the rule for ONNX graphs

X = "x:float32[batch,4]"


class Switched(nn.Module):
    """Chooses by a buffer; ``deep`` has a choice within the choice."""

    def __init__(self, on: bool, deep: bool = False):
        super().__init__()
        self.on: torch.Tensor
        self.register_buffer("on", torch.tensor(on))
        self.deep = deep
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inner(y: torch.Tensor) -> torch.Tensor:
            return torch.cond(self.on, self.linear, torch.exp, (y,)) if self.deep else self.linear(y)  # type: ignore[no-any-return]

        return torch.cond(self.on, inner, torch.sin, (x,)) + 1  # type: ignore[no-any-return]


@pytest.mark.parametrize(("on", "kept"), [(True, "aten.linear.default"), (False, "aten.sin.default")])
def test_a_choice_by_a_constant_is_made(on: bool, kept: str) -> None:
    module = Switched(on)
    x = torch.randn(3, 4)
    graph = DeadBranches()(trace(module, x)).graph
    assert operators(graph) == {kept: 1, "aten.add.Tensor": 1}
    assert len(graph.state_dict()) == (2 if on else 0)
    assert torch.equal(graph(x), module(x))


@pytest.mark.matrix
def test_choices_within_choices_are_made() -> None:
    module = Switched(True, deep=True)
    x = torch.randn(3, 4)
    graph = DeadBranches()(trace(module, x)).graph
    assert operators(graph) == {"aten.linear.default": 1, "aten.add.Tensor": 1}
    assert torch.equal(graph(x), module(x))


def test_a_choice_by_an_expression_of_constants_is_made_once_they_are_folded() -> None:
    class Level(Switched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(self.on.sum() > 3, torch.cos, torch.sin, (x,))  # type: ignore[no-any-return]

    graph = trace(Level(True), torch.randn(3))
    assert "cond" in operators(DeadBranches()(graph).graph)
    assert operators(DeadBranches()(ConstantFolding()(graph).graph).graph) == {"aten.sin.default": 1}


def test_a_choice_by_the_input_stays_and_so_does_one_by_what_changes() -> None:
    class ByInput(Switched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, torch.cos, torch.sin, (x,))  # type: ignore[no-any-return]

    class Toggled(Switched):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.cond(self.on, torch.cos, torch.sin, (x,))
            self.on.logical_not_()
            return y  # type: ignore[no-any-return]

    for module in (ByInput(True), Toggled(True)):
        assert "cond" in operators(DeadBranches()(trace(module, torch.randn(3))).graph)


class Redundant(nn.Module):
    """As models of transformers are: casts, checks and dropout that do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.unused(x)
        y = self.linear(x.float()).to(x.dtype)[:]
        return nn.functional.dropout(y, 0.5, self.training).view(y.shape).expand(-1, 4).relu()


@pytest.mark.matrix
def test_no_ops_are_removed_and_the_rest_lowers_to_onnx() -> None:
    assert onnx_operators(lower(DeadBranches(), Redundant(), X, matches=12)) == {"Gemm": 1, "Relu": 1}


@pytest.mark.matrix
def test_the_check_of_inputs_stays() -> None:
    graph = rewrite(DeadBranches(), Redundant(), "x:float32[batch=2..7,4]", matches=12)
    calls = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
    assert calls == ["_guards_fn", "aten.linear.default", "aten.relu.default"]
    assert len(graph.state_dict()) == 2
    with pytest.raises(AssertionError, match="Guard failed"):
        graph(torch.randn(9, 4))


def test_casts_copies_and_dropout_that_do_something_stay() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        copy = x.to(x.dtype, copy=True)
        copy.add_(1)
        half = x.to(torch.float16).float()
        return copy + half[:, 1:].sum() + half[:, :1].expand(-1, 4) + nn.functional.dropout(x, 0.0, True)

    found = operators(rewrite(DeadBranches(), Function(function), X, matches=5))
    assert found["aten.to.dtype"] == 3
    assert found["aten.slice.Tensor"] == found["aten.expand.default"] + 1 == 2
    assert found["aten.dropout.default"] == 1


@pytest.mark.matrix
def test_an_output_that_is_an_input_keeps_its_node() -> None:
    class Passing(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.float(), x + 1

    lower(DeadBranches(), Passing(), X, matches=1)


def test_checks_of_values_stay_unless_they_are_true() -> None:
    def checked(graph: fx.Graph, condition: Any) -> None:
        graph.call_function(torch.ops.aten._assert_scalar.default, (condition, "message"))

    root = trace(Function(lambda x: x + 1), torch.zeros(2))
    for condition, kept in ((True, 0), (False, 1)):
        module = DeadBranches().copy(root)
        with quiet(), module.graph.inserting_before(module.graph.output_node()):
            checked(module.graph, condition)
        assert operators(DeadBranches()(module).graph)["aten._assert_scalar.default"] == kept
