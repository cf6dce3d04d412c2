"""LayerNorm as a formula becomes ``aten.layer_norm``."""

from __future__ import annotations

from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, aten, insert, tensor
from ingot.export.rewrite.passes.fx_pattern import Dim, Either, Match, Number, Op, PatternPass, Var

X, EPS, WEIGHT, BIAS = Var("x"), Number("eps"), Var("weight"), Var("bias")
ADD = (aten.add.Tensor, aten.add.Scalar)
CENTERED = Op(aten.sub.Tensor, X, Op(aten.mean.dim, X, Dim(-1), True))
SQUARE = Either(
    Op(aten.pow.Tensor_Scalar, CENTERED, 2),
    Op(aten.square.default, CENTERED),
    Op(aten.mul.Tensor, CENTERED, CENTERED),
)
VARIANCE = Either(
    Op(aten.mean.dim, SQUARE, Dim(-1), True),
    Op(aten.var.dim, X, Dim(-1), False, True),
    Op(aten.var.correction, X, Dim(-1), correction=0, keepdim=True),
)
SPREAD = Op(ADD, VARIANCE, EPS)
NORMED = Either(
    Op(aten.div.Tensor, CENTERED, Either(Op(aten.sqrt.default, SPREAD), Op(aten.pow.Tensor_Scalar, SPREAD, 0.5))),
    Op(aten.mul.Tensor, CENTERED, Either(Op(aten.rsqrt.default, SPREAD), Op(aten.pow.Tensor_Scalar, SPREAD, -0.5))),
)
WEIGHTED = Op(aten.mul.Tensor, NORMED, WEIGHT)


class LayerNorm(PatternPass):
    """Replaces ``(x - mean) / sqrt(variance + eps)`` over the last dimension, with or without weight and bias.

    The variance is that of the whole population (divided by n, not n - 1), as in ``nn.LayerNorm``.
    """

    name = "layer-norm"
    pattern = Either(Op(aten.add.Tensor, WEIGHTED, BIAS), WEIGHTED, NORMED)

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        x = tensor(match["x"])
        if x is None or not x.is_floating_point() or not isinstance(x.shape[-1], int):
            return None
        size = x.shape[-1]
        affine = [match.values.get("weight"), match.values.get("bias")]
        for node in filter(None, affine):
            value = tensor(node)
            if value is None or tuple(value.shape) != (size,) or value.dtype is not x.dtype:
                return None
        return insert(root, aten.layer_norm.default, match["x"], [size], *affine, match["eps"])
