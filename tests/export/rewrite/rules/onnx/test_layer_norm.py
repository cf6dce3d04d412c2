from __future__ import annotations

import onnx_ir as ir
import pytest
import torch
from torch import nn

from ingot.export.rewrite.rules.onnx import LayerNorm
from tests.export.rewrite.rules.onnx.support import apply, export, floats, operators, parse, untouched


class HandWritten(nn.Module):
    """As in BERT of old."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))
        self.bias = nn.Parameter(torch.rand(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight * ((x - mean) / torch.sqrt(variance + 1e-5)) + self.bias


def norm(
    centered: str = "Sub(x, mean)",
    mean: str = "ReduceMean(x, axes)",
    variance: str = "ReduceMean(square, axes)",
    normal: str = "Div(centered, root)",
    scaled: str = "Mul(normal, scale)",
    shifted: str = "Add(scaled, bias)",
    outputs: str = "float[batch,seq,16] y",
    opset: int = 20,
) -> ir.Model:
    return parse(
        f"""g (float[batch,seq,16] x) => ({outputs})
        <int64[1] axes = {{2}}, int64[1] other = {{1}}, float epsilon = {{1e-5}}> {{
            mean = {mean}
            centered = {centered}
            square = Mul(centered, centered)
            variance = {variance}
            sum = Add(variance, epsilon)
            root = Sqrt(sum)
            normal = {normal}
            scaled = {scaled}
            y = {shifted}
        }}""",
        opset,
        {"scale": floats(16), "bias": floats(16), "full": floats(5, 16), "one": floats(1)},
    )


@pytest.mark.matrix
def test_a_hand_written_norm_becomes_the_operator() -> None:
    model = export(HandWritten(), torch.randn(2, 5, 16), seq=1)
    assert operators(apply(LayerNorm(), model, 1)) == {"LayerNormalization": 1}


def test_division_may_be_a_product_with_the_reciprocal() -> None:
    model = norm(normal="Reciprocal(root) product = Mul(normal, centered)", scaled="Mul(scale, product)")
    assert operators(apply(LayerNorm(), model, 1)) == {"LayerNormalization": 1}


def test_axes_may_be_attributes_as_they_were_before_opset_18() -> None:
    model = norm(mean="ReduceMean <axes = [-1]> (x)", variance="ReduceMean <axes = [-1]> (square)", opset=17)
    assert operators(apply(LayerNorm(), model, 1)) == {"LayerNormalization": 1}


@pytest.mark.parametrize("shifted", ["Neg(scaled)", "Add(scaled, x)", "Add(scaled, one)"])
def test_without_a_bias_what_follows_stays(shifted: str) -> None:
    found = operators(apply(LayerNorm(), norm(shifted=shifted), 1))
    assert found == {"LayerNormalization": 1, shifted.partition("(")[0]: 1}


@pytest.mark.parametrize(
    "model",
    [
        norm(centered="Sub(mean, x)", normal="Div(x, root)"),
        norm(mean="ReduceMean(x, other)"),
        norm(variance="ReduceMean(square, other)"),
        norm(mean="ReduceMax(x, axes)"),
        norm(scaled="Mul(normal, one)"),
        norm(outputs="float[batch,seq,16] y, float[batch,seq,1] variance"),
        norm(mean="ReduceMean <axes = [-1]> (x)", variance="ReduceMean <axes = [-1]> (square)", opset=16),
    ],
    ids=[
        "another x",
        "mean of another axis",
        "variance of another axis",
        "no mean",
        "another scale",
        "output",
        "opset",
    ],
)
def test_similar_graphs_are_left(model: ir.Model) -> None:
    untouched(LayerNorm(), model)


def test_a_scale_of_more_than_one_axis_is_left() -> None:
    untouched(LayerNorm(), norm(scaled="Mul(normal, full)"), sizes=({"batch": 2, "seq": 5}, {"batch": 1, "seq": 5}))
