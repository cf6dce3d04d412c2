"""ONNX forms of operators that the rules make, where the exporter's own form is poor."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnxscript
from onnxscript.function_libs.torch_lib.ops import nn

from ingot.export.rewrite.rules.fx.attention import SDPA
from ingot.export.torch_internals import OpOverload

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
    """Express ``aten.scaled_dot_product_attention`` as two products and a softmax, of queries of any rank.

    The exporter's own form before opset 23 computes shapes to transpose the keys, which doubles the nodes; lets a row
    in which a Boolean mask hides everything attend to all keys, and makes a row of NaN where all scores are -inf, by a
    mask of numbers or an infinite query, where PyTorch returns zeros; and supports 4-D queries only
    (https://github.com/microsoft/onnxscript/pull/2558). It is still used for dropout.
    """
    if dropout_p:
        return nn.aten_scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (_repeated(x, query) for x in (key, value))
    rank = len(key.shape)
    product = op.MatMul(query, op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2]))
    scores = op.Mul(product, _scale(query, scale))
    if is_causal:
        attn_mask = _causal(query, key)
    least, zero = (op.CastLike(op.Constant(value_float=number), query) for number in (-math.inf, 0.0))
    if attn_mask is not None:
        if attn_mask.dtype is ir.DataType.BOOL:  # added as PyTorch does, so that a hidden NaN or infinity counts
            attn_mask = op.Where(attn_mask, zero, least)
        scores = op.Add(scores, attn_mask)
    # ONNX Runtime's ReduceMax passes over a NaN, which the sum keeps.
    largest, total = (form(scores, op.Constant(value_ints=[-1]), keepdims=1) for form in (op.ReduceMax, op.ReduceSum))
    hidden = op.And(op.Equal(largest, least), op.Equal(total, least))
    return op.Where(hidden, zero, op.MatMul(op.Softmax(scores, axis=-1), value))


def _repeated(x: Any, query: Any) -> Any:
    """Return keys or values with each of their heads repeated, so that there are as many as of the queries."""
    place = len(x.shape) - 3
    heads, groups = (op.Shape(tensor, start=place, end=place + 1) for tensor in (query, x))
    before, rest = op.Shape(x, end=place), op.Shape(x, start=place + 1)
    wide = op.Concat(before, groups, op.Div(heads, groups), rest, axis=0)
    repeated = op.Reshape(op.Expand(op.Unsqueeze(x, [place + 1]), wide), op.Concat(before, heads, rest, axis=0))
    repeated.dtype, repeated.shape = x.dtype, ir.Shape([*x.shape[:place], query.shape[place], *x.shape[place + 1 :]])
    return repeated


def _scale(query: Any, scale: float | None) -> Any:
    size = query.shape[-1]
    if scale is not None or isinstance(size, int):
        return op.CastLike(op.Constant(value_float=size**-0.5 if scale is None else scale), query)
    return op.Reciprocal(op.Sqrt(op.CastLike(op.Shape(query, start=len(query.shape) - 1), query)))


def _causal(query: Any, key: Any) -> Any:
    """Return a mask of the keys of each query: those up to its own position."""
    zero, one = op.Constant(value_int=0), op.Constant(value_int=1)
    rows, columns = (
        op.Range(zero, op.Squeeze(op.Shape(x, start=len(x.shape) - 2, end=len(x.shape) - 1)), one) for x in (query, key)
    )
    mask = op.GreaterOrEqual(op.Unsqueeze(rows, [1]), op.Unsqueeze(columns, [0]))
    mask.dtype = ir.DataType.BOOL
    return mask


TRANSLATIONS: dict[OpOverload[..., Any], Callable[..., Any]] = {SDPA: attention}
"""By operator, for the ONNX exporter's ``custom_translation_table``."""
