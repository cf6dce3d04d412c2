"""Scaled dot-product attention becomes one operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from ingot.export.rewrite.passes.onnx import (
    Dims,
    PatternRule,
    Replacement,
    constant,
    dims,
    producer,
    same,
    scalar,
    shape_of,
)

# The operator set that has an operator for it.
_OPSET = 23


class _Attention:
    """``softmax(q k^T * scale + mask) v`` for q [B, H, S, D], k [B, H, T, D], v [B, H, T, D]."""

    def __init__(self, opset: int):
        self._opset = opset

    def pattern(self, op: Any, q: Any, k: Any, v: Any, mask: Any, by_q: Any, by_k: Any, by: Any) -> Any:
        flat = op.Transpose(op.Reshape(k, _allow_other_inputs=True, _outputs=["flat"]), perm=[0, 2, 1])
        turned = pattern.OrValue(
            [
                op.Transpose(k, perm=[0, 1, 3, 2]),
                op.Transpose(k, perm=[0, 2, 3, 1], _outputs=["late"]),  # k is [B, T, H, D]
                op.Reshape(flat, _allow_other_inputs=True, _outputs=["turned"]),  # what the exporter makes of SDPA
            ],
            tag_var="layout",
        )
        scores = _scaled(op, op.MatMul(_scaled(op, q, by_q, "q"), _scaled(op, turned, by_k, "k")), by, "scores")
        masked = pattern.OrValue([op.Add(scores, mask), scores], tag_var="masking")
        weights = op.Softmax(masked, _outputs=["weights"])
        checked = op.Where(op.IsNaN(weights), 0.0, weights, _outputs=["checked"])
        return op.MatMul(pattern.OrValue([checked, weights], tag_var="checking"), v)

    def check(self, context: Any, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value | None, **found: Any) -> bool:
        queries, keys, values = dims(q), dims(k), dims(v)
        if queries is None or keys is None or values is None or not len(queries) == len(keys) == len(values) == 4:
            return False
        if "late" in found:
            keys = (keys[0], keys[2], keys[1], keys[3])
        (batch, heads, length, size), total = queries, keys[2]
        return (
            q.dtype is k.dtype is v.dtype is ir.DataType.FLOAT
            and isinstance(heads, int)
            and _equal(keys, (batch, heads, total, size))
            and _equal(values, (batch, heads, total, size))
            and producer(found["weights"]).attributes.get_int("axis", -1) in (-1, 3)
            and ("turned" not in found or _is_transposition(found["flat"], found["turned"], keys))
            and _factor(found) > 0
            and (mask is None or _broadcasts(dims(mask), (batch, heads, length, total)))
            and (mask is None or "checked" not in found or _is_finite(mask))
        )

    def rewrite(self, op: Any, q: ir.Value, k: ir.Value, v: ir.Value, mask: ir.Value | None, **found: Any) -> Any:
        if "late" in found:
            k = op.Transpose(k, perm=[0, 2, 1, 3])
        masks = []
        if mask is not None:
            ones = op.Constant(value_ints=[1])
            masks = [op.Expand(mask, op.Concat(ones, ones, op.Shape(q, start=2, end=3), ones, axis=0))]
        if self._opset >= _OPSET:
            return op.Attention(q, k, v, *masks, scale=_factor(found))
        heads = (dims(q) or ())[1]
        rows = op.Reshape(op.Transpose(q, perm=[0, 2, 1, 3]), op.Constant(value_ints=[0, 0, -1]))  # [B, S, H * D]
        optional = (None, None, *masks) if masks else ()  # bias and padding come first
        out = op.MultiHeadAttention(
            rows, k, v, *optional, num_heads=heads, scale=_factor(found), _domain="com.microsoft"
        )
        return op.Transpose(op.Reshape(out, op.Constant(value_ints=[0, 0, heads, -1])), perm=[0, 2, 1, 3])


def _scaled(op: Any, value: Any, by: Any, name: str) -> Any:
    """A value, or the value multiplied or divided by another; the tag ``<name>_scaling`` says which."""
    choices = [op.Mul(value, by), op.Div(value, by), value]
    return pattern.OrValue(choices, tag_var=f"{name}_scaling", tag_values=[1, -1, 0])


def _factor(found: dict[str, Any]) -> float:
    """Return the product of all scalings, or 0 if one is not a constant."""
    factor = 1.0
    for name, by in (("q", "by_q"), ("k", "by_k"), ("scores", "by")):
        power = found[f"{name}_scaling"]
        value = scalar(found[by]) if power else 1.0
        if not value:
            return 0.0
        factor *= value**power
    return factor


def _is_transposition(flat: ir.Value, turned: ir.Value, keys: Dims) -> bool:
    """Tell whether keys were made [B * H, T, D], transposed, and made [B, H, D, T]."""
    first, second = (shape_of(producer(value).inputs[1]) for value in (flat, turned))
    batch, heads, total, size = keys
    return (
        first is not None
        and second is not None
        and len(first) == 3
        and _equal(first[1:], (total, size))
        and _equal(second, (batch, heads, size, total))
    )


def _equal(shape: Dims, other: Dims) -> bool:
    return len(shape) == len(other) and all(map(same, shape, other))


def _broadcasts(mask: Dims | None, scores: Dims) -> bool:
    """Tell whether a mask is known to fit the scores [B, H, S, T], and spans all of T."""
    if not mask or len(mask) > 4 or not same(mask[-1], scores[-1]):
        return False
    return all(size == 1 or same(size, full) for size, full in zip(mask[::-1], scores[::-1], strict=False))


def _is_finite(mask: ir.Value) -> bool:
    """Tell whether no row of a mask can be all infinite: the softmax of such a row is NaN, which the model clears."""
    node = mask.producer()
    arrays = [constant(mask)] if node is None else [constant(value) for value in node.inputs[1:]]
    chosen = node is None or node.op_type == "Where"
    return chosen and all(array is not None and bool(np.isfinite(array).all()) for array in arrays)


class Attention(PatternRule):
    """Finds scaled dot-product attention, with or without an additive mask.

    From opset 23 on it becomes ``Attention``, before that ONNX Runtime's ``MultiHeadAttention``. Not a default: on the
    CPU neither is faster than the operators it replaces, and both hide products from quantization.
    """

    name = "attention"
    default = False
    anchors = ("Softmax",)

    def patterns(self, opset: int) -> Sequence[Replacement]:
        return (_Attention(opset),)
