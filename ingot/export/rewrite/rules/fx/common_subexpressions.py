"""Equal calls are computed once."""

from __future__ import annotations

from collections.abc import Hashable

from torch import fx

from ingot.export.rewrite.passes.fx_graph import Memory, attribute, finish, is_pure
from ingot.export.rewrite.passes.manager import FxPass, PassResult
from ingot.export.torch_internals import pytree


class CommonSubexpressions(FxPass):
    """Merges calls of the same operator with the same arguments.

    Random operators, values that something writes to, and several results of the model are not merged. PyTorch's own
    CSEPass would merge reads before and after a write.
    """

    name = "common-subexpressions"
    tidies = True

    def call(self, graph_module: fx.GraphModule) -> PassResult[fx.GraphModule]:
        memory = Memory(graph_module.graph)
        seen: dict[Hashable, fx.Node] = {}
        matches = 0
        for node in list(graph_module.graph.nodes):
            key = _key(node, memory)
            twin = node if key is None else seen.setdefault(key, node)
            if twin is node or (_is_returned(node) and _is_returned(twin)):
                continue
            node.replace_all_uses_with(twin)
            graph_module.graph.erase_node(node)
            matches += node.op == "call_function"
        return finish(graph_module, matches)


def _key(node: fx.Node, memory: Memory) -> Hashable | None:
    """Return a key that equal nodes share, or None for a node that must not be merged."""
    if node.op == "get_attr":
        return id(attribute(node))
    if not is_pure(node) or any(memory.writers(item) for item in (node, *node.all_input_nodes)):
        return None
    leaves, shape = pytree.tree_flatten((node.args, node.kwargs))
    # 1, 1.0 and True are equal, but not the same argument.
    return (node.target, shape, *(leaf if isinstance(leaf, fx.Node) else repr(leaf) for leaf in leaves))


def _is_returned(node: fx.Node) -> bool:
    return any(user.op == "output" for user in node.users)
