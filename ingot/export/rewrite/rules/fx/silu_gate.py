"""SiLU as a formula becomes ``aten.silu``, also in gates as in LLaMA."""

from __future__ import annotations

from torch import fx

from ingot.export.rewrite.passes.fx_function import Elementwise, X, function, multiply
from ingot.export.rewrite.passes.fx_graph import Memory, aten, insert, tensor
from ingot.export.rewrite.passes.fx_pattern import Either, Match, Op, PatternPass, Var

GATE, UP = Var("gate"), Var("up")
GATED = Op(aten.mul.Tensor, Op(aten.mul.Tensor, GATE, UP), Op(aten.sigmoid.default, GATE))


class SiluGate(PatternPass):
    """Replaces any formula of SiLU (``x * sigmoid(x)``, ``x / (1 + exp(-x))``), and ``gate * up * sigmoid(gate)``."""

    name = "silu-gate"
    pattern = Either(Elementwise(silu=multiply(X, function("sigmoid", X))), GATED)

    def replace(self, root: fx.Node, match: Match, memory: Memory) -> fx.Node | None:
        if "x" in match.values:
            return insert(root, aten.silu.default, match["x"])
        silu = insert(root, aten.silu.default, match["gate"], val=tensor(match["gate"]))
        return insert(root, aten.mul.Tensor, silu, match["up"])
