"""What a rewrite changed: nodes that are only in one of two graphs, and nodes that differ."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from enum import Enum

from ingot.export.report import GraphView, Node


class Change(Enum):
    """How a node differs from the other graph; the value is the word that pages show."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


def compare(before: GraphView, after: GraphView) -> tuple[dict[str, Change], dict[str, Change]]:
    """Return the changed nodes of two graphs by name: first those of ``before``, then those of ``after``.

    A capture numbers nodes by their order, so a name may stand for another node afterwards. Nodes are therefore paired
    by name and content first, then by content in order of the graph, and last by name: these have changed.
    """
    old, new = ({node.name: node for node in graph.nodes} for graph in (before, after))
    for name in [name for name in old if name in new and _content(before, old[name]) == _content(after, new[name])]:
        del old[name], new[name]
    waiting: dict[tuple[object, ...], deque[str]] = defaultdict(deque)
    for node in old.values():
        waiting[_content(before, node)].append(node.name)
    for node in list(new.values()):
        if alike := waiting[_content(after, node)]:
            del old[alike.popleft()], new[node.name]
    both = old.keys() & new.keys()
    return _marks(old, both, Change.REMOVED), _marks(new, both, Change.ADDED)


def _content(graph: GraphView, node: Node) -> tuple[object, ...]:
    """Return the computation of a node, regardless of names of values and of symbols of sizes."""
    weights = tuple(graph.weights[name] for name in node.inputs if name in graph.weights)
    size = node.shape.count(",")
    return node.operator, node.module, node.dtype, size, weights, tuple(sorted(node.attributes.items()))


def _marks(nodes: Iterable[str], both: Iterable[str], change: Change) -> dict[str, Change]:
    shared = set(both)
    return {name: Change.CHANGED if name in shared else change for name in nodes}
