from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional

from ingot.export.program import quiet
from ingot.export.rewrite.rules.fx import ConstantFolding, DequantMatmul
from tests.export.rewrite.rules.fx.support import lower, operators, rewrite, trace

pytestmark = pytest.mark.matrix  # `make test` has the twin of the rule for ONNX graphs

with quiet():  # defines the operators quantized_decomposed::*
    import torch.ao.quantization.fx._decomposed

INPUTS, OUTPUTS = 512, 256
X = f"x:float32[batch,seq,{INPUTS}]"
quantized = torch.ops.quantized_decomposed


class Layer(nn.Module):
    """A linear layer with weights in 8 bits, and one scale per output."""

    weight: torch.Tensor
    scale: torch.Tensor
    column: torch.Tensor
    zero: torch.Tensor

    def __init__(self, product: Callable[[Layer, torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.int8):
        super().__init__()
        low, high = (-128, 128) if dtype is torch.int8 else (0, 256)
        self.register_buffer("weight", torch.randint(low, high, (OUTPUTS, INPUTS)).to(dtype))
        self.register_buffer("scale", torch.rand(OUTPUTS) * 1e-3 + 1e-4)
        self.register_buffer("column", self.scale[:, None].clone())
        self.register_buffer("zero", torch.randint(-3, 4, (OUTPUTS,)))
        self.bias = nn.Parameter(torch.randn(OUTPUTS))
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(self, x)


def linear(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, layer.weight.to(x.dtype) * layer.column, layer.bias)


def with_zero(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, (layer.weight.float() - 128) * layer.column)


def transposed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x, (layer.weight.float() * layer.column).t())


def straight(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.matmul(x[..., :OUTPUTS], layer.weight.float() * 1e-3)


def per_channel(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    weight = quantized.dequantize_per_channel(layer.weight, layer.scale, layer.zero, 0, -128, 127, torch.int8)
    return functional.linear(x, weight, layer.bias)


def per_tensor(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, quantized.dequantize_per_tensor(layer.weight, 1e-3, 0, -128, 127, torch.int8))


@pytest.mark.parametrize("product", [linear, with_zero, transposed, straight, per_tensor])
def test_the_scale_is_applied_to_the_product(product: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
    dtype = torch.uint8 if product is with_zero else torch.int8
    graph = rewrite(DequantMatmul(), Layer(product, dtype), X, matches=1, tolerance=2e-5)
    found = operators(graph)
    assert found["aten.mul.Tensor"] == 1
    assert found["aten.sub.Tensor"] == (product is with_zero)
    assert not any("dequantize" in name for name in found)


@pytest.mark.matrix
def test_in_onnx_the_weights_are_integers_and_the_numbers_exact() -> None:
    model = lower(DequantMatmul(), Layer(per_channel), X, matches=1, tolerance=2e-5)
    weights = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    (integers,) = [weight for weight in weights if weight.dtype is ir.DataType.INT8]
    assert set(integers.shape) == {OUTPUTS, INPUTS}
    assert all(weight.size < 4096 for weight in weights if weight.dtype is ir.DataType.FLOAT)


def test_scales_that_are_reshaped_on_the_way_match_once_constants_are_folded() -> None:
    layer = Layer(lambda layer, x: functional.linear(x, layer.weight.to(x.dtype) * layer.scale.unsqueeze(1)))
    x = torch.randn(2, INPUTS)
    graph = trace(layer, x)
    assert DequantMatmul()(graph).matches == 0
    folded = ConstantFolding()(graph)
    assert folded.matches == 1  # the scale, not the weight
    result = DequantMatmul()(folded.graph)
    assert result.matches == 1
    torch.testing.assert_close(result.graph(x), layer(x), rtol=1e-4, atol=2e-5)


OTHER: dict[str, Callable[[Layer, torch.Tensor], torch.Tensor]] = {
    "a scale for each input": lambda layer, x: functional.linear(x, layer.weight.float() * layer.scale.repeat(2)),
    "a scale for each group": lambda layer, x: functional.linear(
        x, (layer.weight.view(OUTPUTS, 2, -1).float() * layer.column[:, :, None]).view(OUTPUTS, -1)
    ),
    "a weight of floats": lambda layer, x: functional.linear(x, layer.bias[:, None].double().float() * layer.column),
    "a scale that is computed": lambda layer, x: functional.linear(x, layer.weight.float() * x.mean()),
    "both sides dequantized": lambda layer, x: per_channel(
        layer,
        quantized.dequantize_per_tensor(
            quantized.quantize_per_tensor(x, 0.05, 0, -128, 127, torch.int8), 0.05, 0, -128, 127, torch.int8
        ),
    ),
}


@pytest.mark.parametrize("product", OTHER.values(), ids=OTHER)
def test_other_products_stay(product: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
    size = 1 if product is OTHER["a weight of floats"] else INPUTS
    graph = ConstantFolding()(trace(Layer(product), torch.randn(3, size))).graph
    assert DequantMatmul()(graph).matches == 0


def test_half_precision_stays_for_its_sums_would_overflow() -> None:
    layer = Layer(lambda layer, x: functional.linear(x, layer.weight.to(x.dtype) * layer.column.to(x.dtype)))
    for dtype, matches in ((torch.float16, 0), (torch.bfloat16, 1)):
        graph = ConstantFolding()(trace(layer, torch.randn(3, INPUTS).to(dtype))).graph
        assert DequantMatmul()(graph).matches == matches
