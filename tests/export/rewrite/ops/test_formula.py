"""The rule of an operator finds its formula in a captured model, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn import functional

import ingot
from ingot.errors import InvalidArgument
from ingot.export.program import quiet
from ingot.export.rewrite.passes.manager import FxPass, PassManager, PassRecord
from tests.export.models import Function
from tests.export.rewrite.ops import operators as ops

gated: Callable[..., Tensor] = ops.gated_norm.body
X = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
W = torch.arange(6.0)
GATED = ops.gated_norm.rule()


def rewrite(
    function: Callable[..., Any], rule: FxPass, x: Tensor = X, dynamic: bool = True
) -> tuple[list[dict[str, Any]], PassRecord]:
    """Return the arguments of the operators that a rule inserted into a function's graph, and its record."""
    axes = {0: torch.export.Dim("batch")} if dynamic else {}
    with quiet(), torch.no_grad():
        graph = torch.export.export(Function(function), (x,), dynamic_shapes=(axes,)).module()

        def proof(rewritten: fx.GraphModule) -> float:
            pairs = zip(_flat(rewritten(x)), _flat(function(x)), strict=True)
            return max(float((left - right).abs().max()) for left, right in pairs)

        rewritten, (record,) = PassManager([rule], proof).run(graph)
    rewritten.graph.lint()
    return [dict(node.kwargs) for node in rewritten.graph.nodes if str(node.target).startswith("tests.")], record


def _flat(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if torch.is_tensor(leaf)]


def test_it_is_named_as_the_operator() -> None:
    assert ops.gated_norm.rule().name == "tests::gated_norm"


@pytest.mark.matrix
def test_every_place_is_found_with_its_own_numbers() -> None:
    found, record = rewrite(lambda x: gated(gated(x, x + 1, W, 1e-3), x + 2, W.repeat(1), 0.5), GATED)
    assert [call["eps"] for call in found] == [1e-3, 0.5]
    assert (record.matches, record.error, record.rejected) == (2, 0, "")


@pytest.mark.parametrize("x", [X[:, None].repeat(1, 4, 1), X.half()], ids=["rank", "type"])
def test_tensors_may_have_other_ranks_and_types_than_the_example(x: Tensor) -> None:
    found, _ = rewrite(lambda x: gated(x, x + 1, W.to(x.dtype), 1e-3), GATED, x)
    assert len(found) == 1


@pytest.mark.matrix
def test_casts_and_several_results() -> None:
    def chain(x: Tensor) -> Tensor:
        normed, total = ops.add_norm.body(x, x * 2, 1e-5)
        normed, total = ops.add_norm.body(normed * 3, total)
        return normed + total

    found, record = rewrite(chain, ops.add_norm.rule())
    assert ([call["eps"] for call in found], record.error) == ([1e-5, 1e-6], 0)


@pytest.mark.matrix
@pytest.mark.parametrize("dynamic", [True, False])
def test_sizes_in_the_formula_may_be_fixed_or_dynamic(dynamic: bool) -> None:
    found, record = rewrite(lambda x: ops.shuffle.body(x, 3), ops.shuffle.rule(), dynamic=dynamic)
    assert ([call["groups"] for call in found], record.error) == ([3], 0)


@pytest.mark.parametrize(
    ("function", "rule"),
    [
        (lambda x: gated(x, x + 1, 2.0, 1e-3), GATED),
        (lambda x: gated(x, x + 1, W, W[0]), GATED),
        (lambda x: W * x * torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3) * torch.tanh(x + 1), GATED),
        (lambda x: (scale := torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3), x * scale * W * torch.tanh(x + 1)), GATED),
        (lambda x: ops.shuffle.body(x, 2), ops.shuffle.rule()),
    ],
    ids=["number-for-tensor", "tensor-for-number", "another-order", "inner-result-used", "another-integer"],
)
def test_similar_graphs_are_left(function: Callable[..., Any], rule: FxPass) -> None:
    assert rewrite(function, rule) == ([], PassRecord(rule.name, "fx", 0))


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "formula", "other"),
    [
        ("number", lambda x: torch.clamp(x, max=x.shape[1]), lambda x: torch.clamp(x, max=100)),
        ("dimension", lambda x: torch.clamp(x, max=x.shape[1]), lambda x: torch.clamp(x, max=x.shape[0])),
        (
            "expression",
            lambda x: torch.clamp(x, max=x.shape[1] // 2),
            lambda x: torch.clamp(x, max=x.shape[1] - 1),
        ),
    ],
)
def test_another_number_in_the_place_of_a_size_is_left(
    name: str, formula: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]
) -> None:
    @ingot.op(f"tests::sized_{name}", example=(X,))
    def sized(x: Tensor) -> Tensor:
        return formula(x)

    assert len(rewrite(formula, sized.rule())[0]) == 1
    assert rewrite(other, sized.rule())[0] == []


def test_a_write_in_between_prevents_the_rewrite() -> None:
    def written(x: Tensor) -> Tensor:
        x = x + 1
        scale = torch.rsqrt(x.pow(2).mean(-1, True) + 1e-3)
        x.mul_(2)
        return x * scale * W * torch.tanh(x)

    assert rewrite(written, GATED) == ([], PassRecord(GATED.name, "fx", 0))


@pytest.mark.matrix
def test_another_spelling_is_found_if_it_is_given() -> None:
    def other(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch.tanh(gate) * functional.rms_norm(x, x.shape[-1:], weight, eps)

    @ingot.op("tests::spelt", example=ops.gated_norm.example, spellings=[other])
    def spelt(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
        return gated(x, gate, weight, eps)

    found, _ = rewrite(lambda x: other(x, x + 1, W, 1e-3) + gated(x, x + 1, W), spelt.rule())
    assert sorted(call["eps"] for call in found) == [1e-6, 1e-3]


def test_constants_of_the_formula_must_be_the_same() -> None:
    @ingot.op("tests::times", example=(X,))
    def times(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2, 3, 4, 5, 6])

    assert len(rewrite(times.body, times.rule())[0]) == 1
    assert rewrite(lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 7]), times.rule())[0] == []


@pytest.mark.matrix
def test_a_number_that_is_computed_with_matches_by_its_own_value() -> None:
    @ingot.op("tests::computed", example=(X,))
    def computed(x: Tensor, factor: float = 2.0) -> Tensor:
        return torch.tanh(x) * (factor + 1)

    assert [call["factor"] for call in rewrite(computed.body, computed.rule())[0]] == [2.0]
    assert rewrite(lambda x: computed.body(x, 5.0), computed.rule())[0] == []


def test_without_an_example_there_is_no_rule() -> None:
    with pytest.raises(InvalidArgument, match=r"'tests::scale' has no example; add one: @ingot\.op"):
        ops.scale.rule()


def test_a_tensor_that_the_formula_does_not_use_cannot_be_found() -> None:
    @ingot.op("tests::lazy", example=(X, X))
    def lazy(x: Tensor, y: Tensor) -> Tensor:
        return x * 2

    _, record = rewrite(lambda x: x * 2, lazy.rule())
    assert "does not use the values of all of its tensors" in record.rejected
