"""RMSNorm as a formula, as in LLaMA and T5, becomes ``aten.rms_norm``."""

from __future__ import annotations

from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, aten, insert, tensor
from ingot.export.rewrite.passes.fx_pattern import Dim, Either, Match, Number, Op, PatternPass, Var

X, EPS, WEIGHT = Var("x"), Number("eps"), Var("weight")
ADD = (aten.add.Tensor, aten.add.Scalar)
SQUARE = Either(Op(aten.pow.Tensor_Scalar, X, 2), Op(aten.square.default, X), Op(aten.mul.Tensor, X, X))
MEAN = Op(ADD, Op(aten.mean.dim, SQUARE, Dim(-1), True), EPS)
ROOT = Op(aten.sqrt.default, MEAN)
INVERSE = Either(
    Op(aten.rsqrt.default, MEAN),
    Op(aten.pow.Tensor_Scalar, MEAN, -0.5),
    Op(aten.reciprocal.default, ROOT),
    Op(aten.mul.Tensor, Op(aten.reciprocal.default, ROOT), 1),  # 1 / root
)
SCALED = Either(Op(aten.mul.Tensor, X, INVERSE), Op(aten.div.Tensor, X, ROOT))


class RmsNorm(PatternPass):
    """Replaces ``x * rsqrt(mean(x ** 2, -1) + eps)``, with or without a weight of the last dimension's size.

    Casts are not moved: a LLaMA in half precision normalizes in single precision, casts down, and multiplies by the
    weight afterwards, so its weight stays outside.
    """

    name = "rms-norm"
    pattern = Either(Op(aten.mul.Tensor, SCALED, WEIGHT), SCALED)

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        x, weight = tensor(match["x"]), tensor(match.values.get("weight"))
        if x is None or not x.is_floating_point() or not isinstance(x.shape[-1], int):
            return None
        size = x.shape[-1]
        if weight is not None and (tuple(weight.shape) != (size,) or weight.dtype is not x.dtype):
            return None
        return insert(root, aten.rms_norm.default, match["x"], [size], match.values.get("weight"), match["eps"])
