from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from ingot.export.lower import onnx as lower_onnx
from ingot.export.rewrite.rules.fx import TRANSLATIONS
from ingot.export.rewrite.rules.fx.attention import SDPA, Attention
from tests.export.programs import capture
from tests.export.rewrite.rules.fx.support import Session, lower, onnx_operators, operators, rewrite, trace

HEADS, SIZE = 2, 4
X = f"x:float32[batch,seq,{HEADS * SIZE}]"
MASK = "mask:bool[batch,seq]"
Formula = Callable[..., Any]


class Layer(nn.Module):
    """Self-attention as BERT has it; the formula may differ."""

    def __init__(self, formula: Formula):
        super().__init__()
        self.qkv, self.out = nn.Linear(HEADS * SIZE, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, HEADS * SIZE)
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = (part.view(batch, seq, HEADS, SIZE).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = self.formula(q, k, v)
        return self.out(y.transpose(1, 2).contiguous().view(batch, seq, width))  # type: ignore[no-any-return]


class Masked(Layer):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        formula = self.formula
        self.formula = lambda q, k, v: formula(q, k, v, mask[:, None, None, :])
        try:
            return super().forward(x)
        finally:
            self.formula = formula


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.matmul(q, k.transpose(-1, -2))


def bert(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    weights = functional.softmax(scores(q, k) / math.sqrt(SIZE), dim=-1)
    return functional.dropout(weights, 0.1, training=False) @ v


def llama(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    bias = torch.where(mask, 0.0, torch.finfo(q.dtype).min)
    weights = functional.softmax(scores(q, k) * SIZE**-0.5 + bias, dim=-1, dtype=torch.float32).to(q.dtype)
    return weights @ v


def t5(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = scores(q, k)
    found += torch.where(mask, 0.0, -1e4)
    return torch.matmul(functional.softmax(found, 3), v)


def gpt(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    found = (q @ k.transpose(2, 3)) * 0.5
    return functional.softmax(found.masked_fill(~mask, -math.inf), -1) @ v


def endless(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Returns NaN for a row that the mask hides, where the operator returns zeros."""
    return torch.softmax(scores(q, k) + torch.where(mask, 0.0, -math.inf), -1) @ v


def late(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Scales the queries, permutes the keys, and masks by ``where``."""
    found = torch.matmul(q * 0.5, k.permute(0, 1, 3, 2))
    return torch.softmax(torch.where(mask, found, torch.finfo(torch.float32).min), -1) @ v


@pytest.mark.matrix
def test_attention_without_a_mask_becomes_one_operator() -> None:
    graph = rewrite(Attention(), Layer(bert), X, matches=1)
    assert not operators(graph).keys() & {"aten.matmul.default", "aten.softmax.int", "aten.div.Tensor"}
    (node,) = graph.graph.find_nodes(op="call_function", target=SDPA)
    assert node.kwargs == {"scale": 0.5}
    assert node.meta["val"].shape[1] == HEADS


@pytest.mark.matrix
@pytest.mark.parametrize("formula", [llama, t5])
def test_masks_of_every_kind_are_added(formula: Formula) -> None:
    graph = rewrite(Attention(), Masked(formula), X, MASK, matches=1)
    assert operators(graph)[str(SDPA)] == 1


@pytest.mark.matrix
def test_it_lowers_to_two_products_in_onnx() -> None:
    found = onnx_operators(lower(Attention(), Masked(t5), X, MASK, matches=1))
    assert found["Softmax"] == 1
    assert found["MatMul"] == 4
    assert "Slice" not in found


@pytest.mark.matrix
def test_a_row_in_which_all_is_masked_stays_as_it_was() -> None:
    x, mask = torch.randn(2, 5, HEADS * SIZE), torch.zeros(2, 5, dtype=torch.bool)
    for formula, matches in ((llama, 1), (gpt, 0), (late, 0), (endless, 0)):
        layer = Masked(formula).eval()
        result = Attention()(trace(layer, x, mask))
        assert result.matches == matches
        torch.testing.assert_close(result.graph(x, mask), layer(x, mask), rtol=1e-5, atol=1e-5, equal_nan=True)


def changed(found: torch.Tensor) -> torch.Tensor:
    found.view(-1)[0].zero_()
    return found


OTHER: tuple[Formula, ...] = (
    lambda q, k, v: torch.softmax(scores(q, k), -2) @ v,
    lambda q, k, v: torch.softmax(scores(q, k) * torch.rand(HEADS, 1, 1), -1) @ v,
    lambda q, k, v: torch.softmax(scores(q, k).tanh(), -1) @ v,
    lambda q, k, v: (weights := torch.softmax(scores(q, k), -1)) @ v + weights.mean(),
    lambda q, k, v: functional.dropout(torch.softmax(scores(q, k), -1), 0.0, True) @ v,
    lambda q, k, v: torch.softmax(scores(q, k[:, :1]), -1) @ v,
    lambda q, k, v: (weights := torch.softmax(scores(q, k), -1)).mul_(2) @ v + weights[..., :1],
    lambda q, k, v: torch.softmax(changed(scores(q, k)), -1) @ v,
)
OTHER_MASKS: tuple[Formula, ...] = (
    lambda q, k, v, mask: torch.softmax(scores(q, k).masked_fill(~mask, -1e4), -1) @ v,
    lambda q, k, v, mask: torch.softmax(scores(q, k) + mask.double(), -1).float() @ v,
    lambda q, k, v, mask: torch.softmax(scores(q, k) * mask, -1) @ v,
    lambda q, k, v, mask: torch.softmax(scores(q[:1], k[:1]) + mask.float(), -1) @ v[:1],
)


@pytest.mark.parametrize(("layer", "formulas"), [(Layer, OTHER), (Masked, OTHER_MASKS)], ids=["plain", "masked"])
def test_similar_graphs_stay(layer: type[Layer], formulas: tuple[Formula, ...]) -> None:
    def all_of_them(*given: torch.Tensor) -> torch.Tensor:
        return torch.stack([formula(*given) for formula in formulas]).sum(0)

    x, mask = torch.randn(2, 3, HEADS * SIZE), torch.rand(2, 3) > 0.5
    assert Attention()(trace(layer(all_of_them), *(x, mask)[: 1 + (layer is Masked)])).matches == 0


@pytest.mark.matrix
def test_softmax_in_another_datatype_stays() -> None:
    def mixed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.softmax(scores(q, k), dim=-1, dtype=torch.float32).to(q.dtype) @ v

    given = torch.randn(2, 3, HEADS * SIZE).half()
    assert Attention()(trace(Layer(mixed).half(), given)).matches == 0
    assert Attention()(trace(Layer(bert).half(), given)).matches == 1


class Views(nn.Module):
    """Needs the memory layout of a matrix product's result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(x.shape[0], x.shape[1], HEADS, SIZE).transpose(1, 2)
        return bert(q, q, q).view(-1, SIZE)


@pytest.mark.matrix
def test_views_of_the_result_still_work() -> None:
    rewrite(Attention(), Views(), X, matches=1)


class Fused(nn.Module):
    """Calls the fused operator directly, with a Boolean mask and with one of numbers, as ``nn.Transformer`` does."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = x.view(x.shape[0], x.shape[1], HEADS, SIZE).transpose(1, 2)
        keys = mask[:, None, None, :]
        numbers = torch.zeros_like(keys, dtype=q.dtype).masked_fill(~keys, -math.inf)
        attend = functional.scaled_dot_product_attention
        one = q[:, :1]
        grouped = (attend(q, one, one, hidden, enable_gqa=True) for hidden in (keys, numbers))
        return attend(q, q, q, keys), attend(q, q, q, numbers), *grouped


@pytest.mark.matrix
def test_in_onnx_a_row_in_which_all_is_masked_is_zero_as_in_pytorch_and_one_of_infinities_is_nan() -> None:
    case = capture(Fused(), X, MASK)
    inputs = case.examples.make(case.examples.default_sizes)
    inputs["mask"][0] = False
    inputs["mask"][1], inputs["x"][1] = True, np.inf
    actual = Session(lower_onnx.lower(case.program, translations=TRANSLATIONS)).run(inputs)
    expected = case.eager.run(inputs)
    for name in expected:
        assert not actual[name][0].any()
        assert np.isnan(actual[name][1]).all()
        np.testing.assert_allclose(actual[name], expected[name], atol=1e-5)
