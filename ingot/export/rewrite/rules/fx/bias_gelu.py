"""GELU as a formula becomes ``aten.gelu``, and a bias added before it moves into the linear layer."""

from __future__ import annotations

import math

from torch import fx

from ingot.export.rewrite.passes.fx_function import Elementwise, X, add, function, multiply, number, tanh
from ingot.export.rewrite.passes.fx_graph import Memory, aten, insert, tensor
from ingot.export.rewrite.passes.fx_pattern import ANY, Either, Match, Op, PatternPass, Var

HALF = multiply(number(0.5), X)
CUBIC = add(X, multiply(number(0.044715), multiply(X, multiply(X, X))))
WRITTEN_OUT = Elementwise(
    none=add(HALF, multiply(HALF, function("erf", multiply(number(math.sqrt(0.5)), X)))),
    tanh=add(HALF, multiply(HALF, tanh(multiply(number(math.sqrt(2 / math.pi)), CUBIC)))),
)
LINEAR = Op(aten.linear.default, Var("input"), Var("weight"))
BIASED = Op(aten.gelu.default, Op(aten.add.Tensor, LINEAR, Var("bias"), name="sum"), approximate=ANY)


class BiasGelu(PatternPass):
    """Replaces any formula of GELU, by the error function or by tanh; and ``gelu(linear(x, w) + b)`` by one layer."""

    name = "bias-gelu"
    pattern = Either(WRITTEN_OUT, BIASED)

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        if "x" in match.values:
            return insert(root, aten.gelu.default, match["x"], approximate=match["function"])
        weight, bias, total = tensor(match["weight"]), tensor(match["bias"]), match["sum"]
        if weight is None or bias is None or tuple(bias.shape) != (weight.shape[0],) or bias.dtype is not weight.dtype:
            return None
        layer = insert(total, aten.linear.default, match["input"], match["weight"], match["bias"])
        return insert(root, aten.gelu.default, layer, **root.kwargs)
