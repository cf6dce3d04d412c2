from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.fx.layer_norm import LayerNorm
from tests.export.rewrite.rules.fx.support import Each, lower, onnx_operators, operators, rewrite

pytestmark = pytest.mark.matrix  # `make test` has the twin of the rule for ONNX graphs

SIZE = 12
X = f"x:float32[batch,seq,{SIZE}]"
Formula = Callable[[torch.Tensor], torch.Tensor]


class Norm(nn.Module):
    def __init__(self, formula: Formula):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE) + 0.5)
        self.bias = nn.Parameter(torch.randn(SIZE))
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.formula(x) + self.bias


def by_squares(x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(variance + 1e-5)


def centered(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(-1, keepdim=True)


SAME: tuple[Formula, ...] = (
    by_squares,
    lambda x: centered(x) * torch.rsqrt((centered(x) * centered(x)).mean(-1, keepdim=True) + 1e-12),
    lambda x: centered(x) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6) ** 0.5,
    lambda x: centered(x) * (x.var(2, correction=0, keepdim=True) + 1e-5) ** -0.5,
)
OTHER: tuple[Formula, ...] = (
    lambda x: centered(x) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5),
    lambda x: centered(x) / (x.std(-1, keepdim=True, unbiased=False) + 1e-6),
    lambda x: (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True, correction=0) + 1),
    lambda x: (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(2, keepdim=True, correction=0) + 1),
    lambda x: x / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5),
    lambda x: (x - x.amax(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, correction=0) + 1e-5),
)


def test_formulas_of_it_become_one_operator() -> None:
    assert operators(rewrite(LayerNorm(), Norm(by_squares), X, matches=1)) == {"aten.layer_norm.default": 1}
    assert operators(rewrite(LayerNorm(), Each(SAME), X, matches=len(SAME))) == {"aten.layer_norm.default": len(SAME)}


def test_formulas_that_only_look_like_it_stay() -> None:
    rewrite(LayerNorm(), Each(OTHER), X, matches=0)


def test_it_lowers_to_one_operator_of_onnx() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Norm(by_squares), Norm(SAME[-1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(x + self.first(x))  # type: ignore[no-any-return]

    assert onnx_operators(lower(LayerNorm(), Both(), X, matches=2)) == {"LayerNormalization": 2, "Add": 1}


def test_factors_other_than_weight_and_bias_stay_outside() -> None:
    class Modulated(nn.Module):
        """As in diffusion transformers: weight and bias are computed from another input."""

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return by_squares(x) * y + y

    graph = rewrite(LayerNorm(), Modulated(), X, X.replace("x:", "y:"), matches=1)
    assert operators(graph) == {"aten.layer_norm.default": 1, "aten.mul.Tensor": 1, "aten.add.Tensor": 1}


def test_half_precision_with_the_norm_in_single_precision_keeps_its_casts() -> None:
    class Half(Norm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * by_squares(x.float()).to(x.dtype) + self.bias

    graph = rewrite(LayerNorm(), Half(by_squares).half(), X.replace("float32", "float16"), matches=1, tolerance=1e-3)
    assert operators(graph)["aten.to.dtype"] == 2
