"""Attention as a formula becomes ``aten.scaled_dot_product_attention``."""

from __future__ import annotations

import torch
from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, arguments, aten, insert, same_sizes, tensor
from ingot.export.rewrite.passes.fx_pattern import ANY, Dim, Either, Match, Number, Op, PatternPass, Var

# A masked score at most this large stays the same when the score is added to it, in any datatype.
LEAST = -1e30
SDPA = aten.scaled_dot_product_attention.default

SCORES = Op(aten.matmul.default, Var("q"), Var("keys"))
SCALED = Either(
    Op((aten.mul.Tensor, aten.mul.Scalar), SCORES, Number("factor")),
    Op((aten.div.Tensor, aten.div.Scalar), SCORES, Number("divisor")),
    SCORES,
)
MASKED = Either(
    Op((aten.add.Tensor, aten.add_.Tensor), SCALED, Var("mask")),
    Op((aten.masked_fill.Scalar, aten.masked_fill_.Scalar), SCALED, Var("hidden"), Number("fill")),
    Op(aten.where.ScalarOther, Var("shown"), SCALED, Number("fill")),
    SCALED,
)
WEIGHTS = Op(aten.softmax.int, MASKED, Dim(-1), ANY, name="softmax")


class Attention(PatternPass):
    """Replaces ``softmax(q @ k.T * scale + mask) @ v`` over ``[batch, heads, sequence, size]``.

    A Boolean mask becomes an additive one. The two are equal if masked scores become minus infinity or the minimum of
    single precision; with -10000, for example, a row in which everything is masked would change. The formula is left if
    the model also returns the weights, or computes softmax in another datatype.
    """

    name = "attention"
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
        if not _is_mask(match, q.dtype):
            return None
        scale = float(match.values.get("factor", 1 / match.values.get("divisor", 1)))
        mask = _additive_mask(root, match, q.dtype)
        new = insert(root, SDPA, match["q"], _untransposed(root, match["keys"]), match["v"], mask, scale=scale)
        # Its result may have another memory layout than a product's, which matters to views only.
        views = any(user.target is aten.view.default for user in root.users)
        return insert(root, aten.contiguous.default, new) if views else new


def _is_mask(match: Match, dtype: torch.dtype) -> bool:
    """Return whether the mask of the scores, if there is one, may be added to them."""
    if "mask" in match.values:
        mask = tensor(match["mask"])
        return mask is not None and mask.dtype is dtype and 2 <= mask.dim() <= 4
    if "fill" in match.values:
        mask = tensor(match.values.get("hidden", match.values.get("shown")))
        return mask is not None and mask.dtype is torch.bool and 2 <= mask.dim() <= 4 and match["fill"] <= LEAST
    return True


def _additive_mask(root: fx.Node, match: Match, dtype: torch.dtype) -> fx.Node | None:
    if "fill" not in match.values:
        return match.values.get("mask")
    hidden = match.values.get("hidden")
    if hidden is None:
        hidden = insert(root, aten.logical_not.default, match["shown"], val=match["shown"].meta["val"])
    zeros = hidden.meta["val"].to(dtype)
    mask = insert(root, aten.zeros_like.default, hidden, dtype=dtype, val=zeros)
    return insert(root, aten.masked_fill.Scalar, mask, hidden, match["fill"], val=zeros)


def _untransposed(root: fx.Node, keys: fx.Node) -> fx.Node:
    """Return ``[B, H, S, D]`` keys from those of the product, ``[B, H, D, S]``."""
    named = arguments(keys)
    if keys.target is aten.transpose.int and {named["dim0"] % 4, named["dim1"] % 4} == {2, 3}:
        original: fx.Node = named["self"]
        return original
    return insert(root, aten.transpose.int, keys, 2, 3, val=keys.meta["val"].transpose(2, 3))
