"""Nodes that no output depends on, and branches that never run, are removed."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ingot.export.rewrite.passes.manager import PassResult
from ingot.export.rewrite.passes.onnx import OnnxRule
from ingot.export.rewrite.rules.onnx.constant_folding import fold


class DeadBranches(OnnxRule):
    """Removes unused nodes, weights and local functions; an ``If`` on a constant is replaced by its branch."""

    name = "dead-branches"

    def rewrite(self, model: ir.Model) -> int:
        before = _count(model)
        if any(_is_decided(node) for node in model.graph.all_nodes()):
            fold(model, lambda node: False)
        common.RemoveUnusedNodesPass()(model)
        return before - _count(model)

    def call(self, graph: ir.Model) -> PassResult[ir.Model]:
        result = super().call(graph)
        functions = len(graph.functions)
        common.RemoveUnusedFunctionsPass()(graph)  # type: ignore[no-untyped-call]
        return PassResult(graph, result.matches + functions - len(graph.functions))


def _is_decided(node: ir.Node) -> bool:
    condition = node.inputs[0] if node.op_type == "If" and node.domain == "" else None
    return condition is not None and ir.convenience.get_const_tensor(condition) is not None


def _count(model: ir.Model) -> int:
    graphs = (model.graph, *model.graph.subgraphs())
    return sum(len(graph.initializers) + graph.num_nodes() for graph in graphs)
