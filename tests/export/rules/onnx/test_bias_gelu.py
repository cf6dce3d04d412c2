from __future__ import annotations

import math

import onnx_ir as ir
import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.onnx.bias_gelu import BiasGelu
from tests.export.rules.onnx.support import Several, apply, export, floats, operators, parse, untouched


class Mlp(nn.Module):
    def __init__(self, gelu: nn.Module):
        super().__init__()
        self.up, self.down, self.gelu = nn.Linear(16, 32), nn.Linear(32, 16), gelu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.gelu(self.up(x)))  # type: ignore[no-any-return]


class ByHand(nn.Module):
    """As in GPT-2 and BERT of old."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def gelu(
    result: str = "Mul(product, half)",
    total: str = "Add(x, bias)",
    inner: str = "Mul(total, factor)",
    product: str = "Mul(total, rest)",
    outputs: str = "float[batch,seq,16] y",
) -> ir.Model:
    return parse(
        f"""g (float[batch,seq,16] x) => ({outputs})
        <float half = {{0.5}}, float one = {{1}}, float factor = {{0.70710677}}, float other = {{0.7}}> {{
            total = {total}
            inner = {inner}
            erf = Erf(inner)
            rest = Add(one, erf)
            product = {product}
            y = {result}
        }}""",
        weights={"bias": floats(16), "single": floats(1)},
    )


@pytest.mark.parametrize("opset", [18, 20])
def test_the_gelu_of_pytorch_and_one_written_out_are_fused_with_their_bias(opset: int) -> None:
    model = export(Several(Mlp(nn.GELU()), Mlp(ByHand())), torch.randn(2, 5, 16), seq=1, opset=opset)
    found = apply(BiasGelu(), model, 2)
    assert not operators(found)["Erf"] + operators(found)["Gelu"]


def test_the_half_may_come_last() -> None:
    assert operators(apply(BiasGelu(), gelu(), 1)) == {"com.microsoft.BiasGelu": 1}


def test_the_approximate_gelu_is_left() -> None:
    untouched(BiasGelu(), gelu(result='Gelu <approximate = "tanh"> (total)'))


@pytest.mark.parametrize(
    "model",
    [
        gelu(result="Mul(product, one)"),
        gelu(inner="Mul(total, other)"),
        gelu(product="Mul(x, rest)"),
        gelu(total="Add(x, single)"),
        gelu(total="Add(x, x)"),
        gelu(total="Sub(x, bias)"),
        gelu(outputs="float[batch,seq,16] y, float[batch,seq,16] total"),
    ],
    ids=["no half", "another factor", "another product", "bias of one", "no vector", "no sum", "sum is an output"],
)
def test_what_only_looks_like_it_is_left(model: ir.Model) -> None:
    untouched(BiasGelu(), model)
