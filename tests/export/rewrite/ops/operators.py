"""Operators for the tests: one definition each, in a module, as users write them."""

from __future__ import annotations

import numpy as np
import onnxscript
import torch
from onnxscript import opset18 as onnx_ops
from torch import Tensor
from torch.nn import functional

import ingot

_helpers = onnxscript.values.Opset("helpers", 1)


@ingot.op("tests::gated_norm", example=(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)))
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight * torch.tanh(gate)


@ingot.op("tests::add_norm", example=(torch.ones(2, 8), torch.ones(2, 8)))
def add_norm(x: Tensor, residual: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Two results, of which the first is made of the second; a cast on the way."""
    total = x + residual
    return total * torch.rsqrt(total.float().pow(2).mean(-1, keepdim=True) + eps).to(total.dtype), total


@ingot.op("tests::shuffle", example=(torch.ones(2, 12), 3))
def shuffle(x: Tensor, groups: int) -> Tensor:
    """The formula uses the sizes of the tensor."""
    batch, width = x.shape
    mixed = x.view(batch, groups, width // groups).transpose(1, 2).reshape(batch, width)
    return functional.layer_norm(mixed, (width,))


@ingot.op("tests::mix")
def mix(
    x: Tensor,
    bias: Tensor | None,
    others: list[Tensor],
    dims: list[int],
    negate: bool = False,
    mode: str = "sum",
    to: torch.dtype = torch.float32,
) -> Tensor:
    """Every kind of parameter."""
    y = x.sum(dims, keepdim=True) if mode == "sum" else x.amax(dims, keepdim=True)
    for other in others if bias is None else (bias, *others):
        y = y + other
    return (-y if negate else y).to(to)


@ingot.op("tests::scale")
def scale(x: Tensor, factor: float) -> Tensor:
    return torch.tanh(x) * factor


@ingot.op("tests::nested")
def nested(x: Tensor) -> Tensor:
    """Uses another operator with two values of its attribute."""
    return scale(x, 2.0) + scale(x, 3.0).sum(-1, keepdim=True)


@ingot.op("tests::bias_gelu", native="com.microsoft::BiasGelu")
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return functional.gelu(x + bias)


@ingot.op("tests::quick_gelu", native="com.microsoft::QuickGelu", attributes={"sharpness": "alpha"})
def quick_gelu(x: Tensor, sharpness: float = 1.702) -> Tensor:
    return x * torch.sigmoid(sharpness * x)


@onnxscript.script(_helpers, default_opset=onnx_ops)
def _square(x):  # type: ignore[no-untyped-def]
    return onnx_ops.Mul(x, x)


@onnxscript.script(_helpers, default_opset=onnx_ops)
def _square_plus(x, offset: float):  # type: ignore[no-untyped-def]
    return onnx_ops.Add(_square(x), onnx_ops.Constant(value_float=offset))


@ingot.op("tests::square_plus", onnx=_square_plus, fake=lambda x, offset: torch.empty_like(x))
def square_plus(x: Tensor, offset: float) -> Tensor:
    """Its body is not PyTorch's, so nothing can be derived from it."""
    return torch.from_numpy(np.square(x.numpy()) + np.float32(offset))


@ingot.op("tests::opaque", fake=torch.empty_like)
def opaque(x: Tensor) -> Tensor:
    """As the one above, but without an ONNX form."""
    return torch.from_numpy(np.square(x.numpy()))


@ingot.op("tests::repeated")
def repeated(x: Tensor, times: int) -> Tensor:
    return x * times


@ingot.op("tests::bessel")
def bessel(x: Tensor) -> Tensor:
    """ONNX has nothing for this."""
    result: Tensor = torch.special.i1e(x)
    return result
