"""Branches that never run and nodes without effect are removed."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ingot.export.rewrite.passes.dead_code import drop_unused
from ingot.export.rewrite.passes.fx_graph import Memory, adopt, aten, attribute, finish, is_assert, is_identity
from ingot.export.rewrite.passes.manager import FxPass, PassResult

_CHECKS = (aten._assert_scalar.default, aten._assert_async.default, aten._assert_async.msg)


class DeadBranches(FxPass):
    """Replaces a ``torch.cond`` on a constant by its branch, and removes nodes that are unused or without effect.

    Nodes without effect check conditions that always hold (datatypes, true constants), or return their input unchanged
    (casts to the same type, dropout in evaluation mode, slices of a whole dimension).
    """

    name = "dead-branches"
    tidies = True

    def call(self, graph_module: fx.GraphModule) -> PassResult[fx.GraphModule]:
        graph = graph_module.graph
        matches = _decide_branches(graph_module)
        memory = Memory(graph)
        before = len(graph.nodes)
        for node in list(graph.nodes):
            if is_assert(node) or (node.target in _CHECKS and _truth(node.args[0], memory)):
                graph.erase_node(node)
            elif is_identity(node):
                # An output that is an input or a weight needs its own node.
                node.replace_all_uses_with(node.all_input_nodes[0], lambda user: user.op != "output")
                if not node.users:
                    graph.erase_node(node)
        drop_unused(graph)
        return finish(graph_module, matches + before - len(graph.nodes))


def _decide_branches(graph_module: fx.GraphModule) -> int:
    """Replace each ``cond`` on a constant, also inside other branches, by the branch that runs."""
    count = 0
    waiting = list(graph_module.graph.nodes)
    memory = Memory(graph_module.graph)
    while waiting:
        node = waiting.pop()
        truth = _truth(node.args[0], memory) if node.target is torch.ops.higher_order.cond else None
        if truth is not None:
            waiting += _inline(graph_module, node, attribute(node.args[1] if truth else node.args[2]))
            memory = Memory(graph_module.graph)
            count += 1
    return count


def _inline(graph_module: fx.GraphModule, node: fx.Node, branch: fx.GraphModule) -> list[fx.Node]:
    """Replace a ``cond`` by the nodes of one of its branches, and return them."""
    operands: Any = node.args[3]
    copies = dict(zip(branch.graph.find_nodes(op="placeholder"), operands, strict=True))
    inner = [item for item in branch.graph.nodes if item.op not in ("placeholder", "output")]
    with graph_module.graph.inserting_before(node):
        results: Any = graph_module.graph.graph_copy(branch.graph, copies)
    for item in inner:
        if item.op == "get_attr":
            copies[item].target = adopt(graph_module, str(item.target), attribute(item))
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        graph_module.graph.erase_node(user)
    graph_module.graph.erase_node(node)
    return [copies[item] for item in inner]


def _truth(value: Any, memory: Memory) -> bool | None:
    """Return the value of a predicate, or None if it is not constant."""
    constant = memory.constant(value)
    if constant is not None and constant.numel() == 1:
        return bool(constant)
    return value if isinstance(value, bool) else None
