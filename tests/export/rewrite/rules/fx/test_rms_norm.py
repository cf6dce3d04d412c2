from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.fx.rms_norm import RmsNorm
from tests.export.rewrite.rules.fx.support import Each, lower, operators, rewrite, trace

pytestmark = pytest.mark.matrix  # `make test` has the twin of the rule for ONNX graphs

SIZE = 16
X = f"x:float32[batch,seq,{SIZE}]"
Formula = Callable[[torch.Tensor], torch.Tensor]


def llama(x: torch.Tensor) -> torch.Tensor:
    variance = x.pow(2).mean(-1, keepdim=True)
    return x * torch.rsqrt(variance + 1e-6)


class Norm(nn.Module):
    """As LLaMA has it in transformers."""

    def __init__(self, weight: torch.Tensor | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE) + 0.5 if weight is None else weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * llama(x.to(torch.float32)).to(x.dtype)


SAME: tuple[Formula, ...] = (
    llama,
    lambda x: x / torch.sqrt((x * x).mean(2, keepdim=True) + 1e-3),
    lambda x: (x.square().mean([-1], keepdim=True) + 1e-5) ** -0.5 * x,
    lambda x: x * (1 / torch.sqrt(1e-6 + torch.mean(x**2, dim=-1, keepdim=True))),
    lambda x: torch.reciprocal(torch.sqrt(torch.mean(x**2, -1, True) + 1e-6)) * x,
)
OTHER: tuple[Formula, ...] = (
    lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6),
    lambda x: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6),
    lambda x: x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6),
    lambda x: x * torch.rsqrt((x + 1).pow(2).mean(-1, keepdim=True) + 1e-6),
    lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)),
    lambda x: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), x[..., :1].abs(), alpha=2)),
    lambda x: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    lambda x: x[:, 0] * torch.rsqrt(x[:, 0].pow(2).mean(-1) + 1e-6).unsqueeze(1),
)


def test_the_formula_of_llama_becomes_one_operator_at_its_place_in_the_model() -> None:
    graph = rewrite(RmsNorm(), Norm(), X, matches=1)
    assert operators(graph) == {"aten.rms_norm.default": 1}
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.rms_norm.default)
    assert "return self.weight * llama" in node.meta["stack_trace"]
    assert "Norm" in str(node.meta["nn_module_stack"])
    assert node.meta["val"].shape[-1] == SIZE


def test_other_ways_to_write_it_match() -> None:
    graph = rewrite(RmsNorm(), Each(SAME), X, matches=len(SAME))
    assert operators(graph) == {"aten.rms_norm.default": len(SAME)}


def test_formulas_that_only_look_like_it_stay() -> None:
    rewrite(RmsNorm(), Each(OTHER), X, matches=0)


def test_two_norms_with_a_residual_are_two_matches_and_lower_to_onnx() -> None:
    lower(RmsNorm(), nn.Sequential(Norm(), nn.Linear(SIZE, SIZE), Norm()), X, matches=2)


def test_the_weight_of_gemma_is_an_expression() -> None:
    class Gemma(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return llama(x.float()) * (1.0 + self.weight.float())

    assert operators(rewrite(RmsNorm(), Gemma(), X, matches=1)) == {"aten.add.Tensor": 1, "aten.rms_norm.default": 1}


def test_a_factor_other_than_a_weight_stays_outside() -> None:
    class Gated(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return llama(x) * x.sigmoid()

    graph = rewrite(RmsNorm(), Gated(), X, matches=1)
    assert operators(graph) == {"aten.rms_norm.default": 1, "aten.sigmoid.default": 1, "aten.mul.Tensor": 1}
    for weight in (torch.rand(1), torch.rand(SIZE).double()):
        graph = rewrite(RmsNorm(), Norm(weight), X, matches=1)
        assert operators(graph) == {"aten.rms_norm.default": 1, "aten.mul.Tensor": 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_of_half_precision_stay_in_their_order(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    graph = rewrite(RmsNorm(), Norm().to(dtype), X.replace("float32", name), matches=1, tolerance=0)
    nodes = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    casts = [name for name in nodes if "assert" not in name]
    assert casts == ["aten.to.dtype", "aten.rms_norm.default", "aten.to.dtype", "aten.mul.Tensor"]


def test_results_that_something_else_needs_stay() -> None:
    class Reported(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            variance = x.pow(2).mean(-1, keepdim=True)
            return x * torch.rsqrt(variance + 1e-6), variance

    rewrite(RmsNorm(), Reported(), X, matches=0)


def test_a_dimension_whose_size_changes_is_not_normalized() -> None:
    class Last(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return llama(x)

    rewrite(RmsNorm(), Last(), "x:float32[batch,4,seq]", matches=0)


def test_an_input_that_changes_halfway_is_read_when_it_was() -> None:
    class Changing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x.add_(1)
            return x * root

    class Changed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()
            x[..., 0].add_(1)
            y = llama(x)
            return y.mul_(2)

    rewrite(RmsNorm(), Changing(), X, matches=0)
    rewrite(RmsNorm(), Changed(), X, matches=1)


def test_a_view_that_changes_the_input_halfway_counts_too() -> None:
    class Viewed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
            x.view(-1)[:3].zero_()
            return x * root

    x = torch.randn(2, 3, SIZE)
    graph = trace(Viewed(), x)
    result = RmsNorm()(graph)
    assert result.matches == 0
    assert torch.equal(result.graph(x.clone()), Viewed()(x.clone()))
