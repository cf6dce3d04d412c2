"""Nodes that depend on weights and literals alone become constants."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ingot.export.rewrite.passes.dead_code import drop_unused
from ingot.export.rewrite.passes.fx_graph import (
    Memory,
    aten,
    attribute,
    finish,
    insert_constant,
    is_pure,
    source,
    tensor,
)
from ingot.export.rewrite.passes.manager import FxPass, PassResult
from ingot.export.torch_internals import OpOverload

# By how many bytes a constant may be larger than the weights that it replaces: scales, masks and position ids fold, but
# an int8 weight is not dequantized and a small weight is not repeated.
GROWTH = 64 * 1024


class ConstantFolding(FxPass):
    """Replaces nodes whose inputs are all constant by the result, such as weights that a parametrization computes.

    Random operators and weights that the graph writes to are not constants. A constant may be at most 64 KiB larger
    than the weights that only it uses.
    """

    name = "constant-folding"
    tidies = True

    def call(self, graph_module: fx.GraphModule) -> PassResult[fx.GraphModule]:
        drop_unused(graph_module.graph)
        memory = Memory(graph_module.graph)
        constant: dict[fx.Node, None] = {}
        for node in graph_module.graph.nodes:
            weight = memory.constant(node) is not None
            if weight or (_is_foldable(node, memory) and all(other in constant for other in node.all_input_nodes)):
                constant[node] = None
        matches = 0
        # From the last node to the first, so that inputs of folded nodes alone are unused by then.
        for node in reversed([item for item in constant if item.op == "call_function"]):
            if node.users and source(node) is node and _fits(node):
                name = f"{node.name}_folded"
                node.replace_all_uses_with(insert_constant(node, name, _evaluate(node)))
                matches += 1
            if not node.users:
                graph_module.graph.erase_node(node)
        return finish(graph_module, matches)


def _is_foldable(node: fx.Node, memory: Memory) -> bool:
    """Return whether a call may be evaluated. Operators of other libraries may have a meaning for a later stage."""
    if node.target in (operator.getitem, aten.detach_.default):
        return True
    own = isinstance(node.target, OpOverload) and node.target.namespace in ("aten", "prims")
    return own and is_pure(node) and not memory.writers(node)


def _fits(node: fx.Node) -> bool:
    """Return whether a node's result is one tensor that is not much larger than the weights that only it uses."""
    result, cone = tensor(node), _cone(node)
    if result is None:
        return False
    weights = [attribute(item) for item in cone if item.op == "get_attr" and item.users.keys() <= cone]
    freed: int = sum(weight.nbytes for weight in weights)
    return result.numel() * result.element_size() <= freed + GROWTH


def _cone(node: fx.Node) -> set[fx.Node]:
    """Return a node and all nodes that it depends on."""
    found, waiting = {node}, [node]
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


def _evaluate(node: fx.Node) -> torch.Tensor:
    values: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for item in sorted(_cone(node)):
            if item.op == "get_attr":
                values[item] = attribute(item)
            else:
                args, kwargs = fx.map_arg((item.args, item.kwargs), values.__getitem__)
                values[item] = item.target(*args, **kwargs)  # type: ignore[operator]
        result: torch.Tensor = values[node]
        # A view of a weight, such as a slice, must not keep the whole weight alive.
        return result.detach().clone(memory_format=torch.contiguous_format)
