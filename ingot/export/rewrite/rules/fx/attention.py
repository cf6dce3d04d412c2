"""Attention as a formula becomes ``aten.scaled_dot_product_attention``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, arguments, aten, insert, same_sizes, source, tensor
from ingot.export.rewrite.passes.fx_pattern import ANY, Dim, Either, Match, Number, Op, PatternPass, Var

# Operators that choose between numbers, with the names of these arguments.
_CHOICES = {
    aten.where.Scalar: ("self", "other"),
    aten.where.ScalarOther: ("self", "other"),
    aten.where.ScalarSelf: ("self", "other"),
    aten.where.self: ("self", "other"),
    aten.masked_fill.Scalar: ("self", "value"),
    aten.zeros.default: (),
    aten.zeros_like.default: (),
}
# Operators whose rows are those of their input.
_PARTS = {aten.unsqueeze.default, aten.expand.default, aten.select.int, aten.clone.default}
SDPA = aten.scaled_dot_product_attention.default

SCORES = Op(aten.matmul.default, Var("q"), Var("keys"))
SCALED = Either(
    Op((aten.mul.Tensor, aten.mul.Scalar), SCORES, Number("factor")),
    Op((aten.div.Tensor, aten.div.Scalar), SCORES, Number("divisor")),
    SCORES,
)
MASKED = Either(
    Op((aten.add.Tensor, aten.add_.Tensor), SCALED, Var("mask")),
    SCALED,
)
WEIGHTS = Op(aten.softmax.int, MASKED, Dim(-1), ANY, name="softmax")


class Attention(PatternPass):
    """Replaces ``softmax(q @ k.T * scale + mask) @ v`` over ``[batch, heads, sequence, size]``.

    Of a row of scores that are all minus infinity, the formula returns NaN and the operator zeros. So a mask must be
    finite where the graph chooses between two numbers, or constant with a finite number in each row; an infinite query
    or key has no such remedy, and the rule runs only on request. In ONNX the operator costs more than the formula.

    A mask that replaces scores (``masked_fill``) also hides scores that are NaN, which a sum does not: it is left. So
    is the formula if the model also returns the weights, or computes softmax in another datatype.
    """

    name = "attention"
    default = False
    remark = "attention is zero where the scores of a query are all minus infinity, and the model returns NaN"
    pattern = Op(aten.matmul.default, WEIGHTS, Var("v"))

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        q, keys, v, softmax = (tensor(match[name]) for name in ("q", "keys", "v", "softmax"))
        if q is None or keys is None or v is None or softmax is None or q.dim() != 4:
            return None
        if not softmax.dtype is q.dtype is keys.dtype is v.dtype:
            return None
        # Heads that broadcast are valid, but have no ONNX form. A mask must not broadcast the scores.
        if not (same_sizes(q.shape[:2], keys.shape[:2]) and same_sizes(q.shape[:2], v.shape[:2])):
            return None
        if not same_sizes(softmax.shape, (*q.shape[:3], keys.shape[3])):
            return None
        if "mask" in match.values and not _is_mask(match["mask"], q.dtype, memory):
            return None
        scale = float(match.values.get("factor", 1 / match.values.get("divisor", 1)))
        straight = _untransposed(root, match["keys"])
        new = insert(root, SDPA, match["q"], straight, match["v"], match.values.get("mask"), scale=scale)
        # Its result may have another memory layout than a product's, which matters to views only.
        views = any(user.target is aten.view.default for user in root.users)
        return insert(root, aten.contiguous.default, new) if views else new


def _is_mask(node: fx.Node, dtype: torch.dtype, memory: Memory) -> bool:
    """Return whether a mask may be added to the scores, and hides no row for certain."""
    mask = tensor(node)
    return mask is not None and mask.dtype is dtype and 2 <= mask.dim() <= 4 and _shows_a_key(node, memory)


def _shows_a_key(node: Any, memory: Memory) -> bool:
    """Return whether each row of a mask has a number above minus infinity."""
    if isinstance(node, int | float):
        return node > -math.inf
    node = source(node)
    constant = memory.constant(node)
    if constant is not None:
        return bool((constant.amax(-1) if constant.dim() else constant).gt(-math.inf).all())
    named = arguments(node)
    if node.target in _CHOICES:
        return all(_shows_a_key(named[name], memory) for name in _CHOICES[node.target])
    return node.target in _PARTS and _shows_a_key(named["self"], memory)


def _untransposed(root: fx.Node, keys: fx.Node) -> fx.Node:
    """Return ``[B, H, S, D]`` keys from those of the product, ``[B, H, D, S]``."""
    named = arguments(keys)
    if keys.target is aten.transpose.int and {named["dim0"] % 4, named["dim1"] % 4} == {2, 3}:
        original: fx.Node = named["self"]
        return original
    return insert(root, aten.transpose.int, keys, 2, 3, val=keys.meta["val"].transpose(2, 3))
