"""Equal nodes are computed once."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ingot.export.rewrite.passes.manager import PassResult
from ingot.export.rewrite.passes.onnx import RANDOM, OnnxRule

_NOT_LIFTED = {"sparse_value", "value_string", "value_strings"}  # the library fails on some of these


class CommonSubexpressions(OnnxRule):
    """Merges nodes with the same operator and inputs, and small weights that are equal.

    A model that draws random numbers is left: two of its nodes that look equal may return different values.
    """

    name = "common-subexpressions"

    def call(self, graph: ir.Model) -> PassResult[ir.Model]:
        bodies: list[ir.Graph | ir.Function] = [graph.graph, *graph.functions.values()]
        if any(node.op_type in RANDOM for body in bodies for node in body.all_nodes()):
            return PassResult(graph, 0)
        return super().call(graph)

    def rewrite(self, model: ir.Model) -> int:
        # As attributes, strings are compared by their address, and -0.0 equals 0.0; as weights, by their bits.
        kinds = {name for node in model.graph.all_nodes() if node.op_type == "Constant" for name in node.attributes}
        common.LiftConstantsToInitializersPass(lift_all_constants=not kinds & _NOT_LIFTED, size_limit=0)(model)
        before = _count(model)
        common.DeduplicateInitializersPass()(model)
        merged = common.CommonSubexpressionEliminationPass()(model).modified
        if merged:
            common.NameFixPass()(model)  # an optional output of the first node may be in use now
        return max(int(merged), before - _count(model))


def _count(model: ir.Model) -> int:
    return sum(1 for _ in model.graph.all_nodes()) + len(model.graph.initializers)
