"""Products with dequantized 8-bit weights multiply by the integers and scale the result.

``x @ (q * scale).T`` equals ``(x @ q.T) * scale`` with one scale per output. Keeping the dequantization as an operator
(DequantizeLinear in ONNX) would not be exact: ONNX Runtime 1.31 fuses it with the product into a kernel that also
rounds the inputs to 8 bits, with an error of 6e-3 of the largest output. As integers, which are cast when the session
loads, the weights need a quarter of the space and cost nothing at run time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, aten, insert, insert_constant, tensor
from ingot.export.rewrite.passes.fx_pattern import ANY, Either, Match, Number, Op, PatternPass, Var
from ingot.export.torch_internals import OpOverload

WEIGHT = Var("weight")
SCALE, ZERO = (Either(Var(name), Number(name)) for name in ("scale", "zero"))
INTEGERS = Op(aten.to.dtype, WEIGHT, ANY)
DEQUANTIZED = Either(
    Op(aten.mul.Tensor, INTEGERS, SCALE),
    Op(aten.mul.Tensor, Op(aten.sub.Tensor, INTEGERS, ZERO), SCALE),
    Op("quantized_decomposed::dequantize_per_tensor", WEIGHT, SCALE, ZERO, ANY, ANY, ANY, out_dtype=ANY),
    Op(
        "quantized_decomposed::dequantize_per_channel",
        *(WEIGHT, SCALE, Either(ZERO, None), Number("axis"), ANY, ANY, ANY),
        out_dtype=ANY,
    ),
)
TRANSPOSED = Either(Op(aten.transpose.int, DEQUANTIZED, ANY, ANY), Op((aten.t.default, aten.mT.default), DEQUANTIZED))
# In half precision, the sum of unscaled products could overflow.
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class DequantMatmul(PatternPass):
    """Replaces ``linear(x, (q - zero) * scale)`` and the same products by matmul, with one scale per output.

    A product whose input is also dequantized is left, because an engine can compute it in integers.
    """

    name = "dequant-matmul"
    pattern = Either(
        Op(aten.linear.default, Var("x"), DEQUANTIZED, Either(None, Var("bias"))),
        Op(aten.matmul.default, Var("x"), TRANSPOSED, name="turned"),
        Op(aten.matmul.default, Var("x"), DEQUANTIZED, name="straight"),
    )

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        result, x, axis = tensor(root), match["x"], match.values.get("axis")
        weight, scale, zero = (_constant(match.values.get(name), memory) for name in ("weight", "scale", "zero"))
        if result is None or weight is None or scale is None or (zero is None and "zero" in match.values):
            return None
        if weight.dtype not in (torch.int8, torch.uint8) or weight.dim() != 2 or result.dtype not in DTYPES:
            return None
        if isinstance(x.target, OpOverload) and x.target.namespace == "quantized_decomposed":
            return None
        outputs = 1 if "straight" in match.values else 0
        scale = _as_matrix(scale, axis)
        if scale.dim() != 2 or scale.shape[1 - outputs] != 1:
            return None
        base = match["weight"].target
        factors = insert_constant(root, f"{base}_scale", scale.flatten().to(result.dtype))
        fake = match["weight"].meta["val"].to(result.dtype)
        numbers = insert(root, aten.to.dtype, match["weight"], result.dtype, val=fake)
        if zero is not None and zero.any():
            offset = insert_constant(root, f"{base}_zero", _as_matrix(zero, axis).to(result.dtype))
            numbers = insert(root, aten.sub.Tensor, numbers, offset, val=fake)
        if "turned" in match.values:
            numbers = insert(root, aten.transpose.int, numbers, 0, 1, val=fake.transpose(0, 1))
        product = insert(root, root.target, x, numbers)
        scaled = insert(root, aten.mul.Tensor, product, factors)
        return insert(root, aten.add.Tensor, scaled, match["bias"]) if "bias" in match.values else scaled


def _constant(value: Any, memory: Memory) -> torch.Tensor | None:
    return memory.constant(value) if not isinstance(value, int | float) else torch.tensor(value, dtype=torch.float64)


def _as_matrix(value: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return scales or zero points, one per index of ``axis`` or one in all, in a shape that broadcasts to a weight."""
    if axis is None:
        return value.reshape((1,) * (2 - value.dim()) + tuple(value.shape))
    return value.reshape((-1, 1) if axis % 2 == 0 else (1, -1))
