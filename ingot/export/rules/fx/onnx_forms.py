"""How operators that the rules make are expressed in ONNX, where the exporter has no form, or a poor one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnxscript
from onnx.defs import OpSchema
from onnxscript.function_libs.torch_lib.ops import nn
from torch._ops import OpOverload

from ingot.export.rules.fx.attention import SDPA
from ingot.export.rules.fx.rotary import ROTARY

# The methods of an opset are typed for onnxscript's own tensors, not for the symbolic ones of the exporter.
op: Any = onnxscript.opset18


def attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Express ``aten.scaled_dot_product_attention`` as two products and a softmax.

    The exporter's own form before opset 23 takes shapes apart to transpose the keys, which doubles the nodes, and it
    lets a row in which a Boolean mask hides everything attend to all keys alike, where PyTorch gives zeros. It stays in
    use for what is rare: causal attention without a mask, grouped heads, dropout, other ranks. The rule for the ONNX
    graph makes one operator of it, if wanted.
    """
    size = query.shape[-1]
    if is_causal or enable_gqa or dropout_p or len(query.shape) != 4 or not isinstance(size, int):
        return nn.aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    scale = size**-0.5 if scale is None else scale
    product = op.MatMul(query, op.Transpose(key, perm=[0, 1, 3, 2]))
    scores = op.Mul(product, op.CastLike(op.Constant(value_float=scale), query))
    if attn_mask is None:
        return op.MatMul(op.Softmax(scores, axis=-1), value)
    if attn_mask.dtype is not ir.DataType.BOOL:
        return op.MatMul(op.Softmax(op.Add(scores, attn_mask), axis=-1), value)
    least, zero = (op.CastLike(op.Constant(value_float=number), query) for number in (-math.inf, 0.0))
    weights = op.Softmax(op.Where(attn_mask, scores, least), axis=-1)
    return op.MatMul(op.Where(op.IsNaN(weights), zero, weights), value)


_KERNEL = onnxscript.values.Op(
    onnxscript.values.Opset("com.microsoft", 1),
    "RotaryEmbedding",
    OpSchema(
        "RotaryEmbedding",
        "com.microsoft",
        1,
        inputs=[
            OpSchema.FormalParameter("input", "T"),
            OpSchema.FormalParameter("position_ids", "M"),
            OpSchema.FormalParameter("cos_cache", "T"),
            OpSchema.FormalParameter("sin_cache", "T"),
        ],
        outputs=[OpSchema.FormalParameter("output", "T")],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)"], ""), ("M", ["tensor(int64)"], "")],
    ),
)


def rotary_embedding(x: Any, cos: Any, sin: Any) -> Any:
    """Express ``ingot::rotary`` by ONNX Runtime's kernel, which finds the angles of each place in a table.

    The table has a row for each place of ``cos``: for each position, and each place in the batch if they differ there.
    """
    places = op.Shape(cos, start=0, end=2)
    count = op.ReduceProd(places, keepdims=0)
    rows = op.Reshape(op.Range(op.Constant(value_int=0), count, op.Constant(value_int=1)), places)
    positions = op.Expand(rows, op.Concat(op.Shape(x, start=0, end=1), op.Shape(x, start=2, end=3), axis=0))
    table = op.Constant(value_ints=[-1, cos.shape[2]])
    return _KERNEL(x, positions, op.Reshape(cos, table), op.Reshape(sin, table))


TRANSLATIONS: dict[OpOverload[..., Any], Callable[..., Any]] = {
    SDPA: attention,
    ROTARY: rotary_embedding,
}
"""The forms by operator, for the ONNX exporter's ``custom_translation_table``."""
