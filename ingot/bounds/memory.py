"""The memory in use at once, which depends on the order in which an engine runs the nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.bounds.graph import Graph
from ingot.bounds.poly import ZERO, Poly


def peak_of(
    graph: Graph,
    uses: Sequence[set[str]],
    needs: Sequence[Mapping[str, Poly]],
    spaces: Sequence[Poly],
    order: Sequence[int],
) -> Poly:
    """Return the most bytes in use at once if the nodes run in an order.

    Args:
        graph: its outputs are in use to the end.
        uses: the tensors that each node reads.
        needs: the bytes of each node's outputs.
        spaces: the bytes of each node's workspace.
        order: of the nodes, as indices.
    """
    last = {name: place for place, index in enumerate(order) for name in (*needs[index], *uses[index])}
    last |= dict.fromkeys(graph.outputs, len(order))
    ends: dict[int, list[Poly]] = {}
    alive = peak = ZERO
    for place, index in enumerate(order):
        for name, need in needs[index].items():
            alive = alive + need
            ends.setdefault(last[name], []).append(need)
        peak = peak.upper(alive + spaces[index])
        for need in ends.get(place, ()):
            alive = alive - need
    return peak


def depth_first(graph: Graph, uses: Sequence[set[str]]) -> list[int]:
    """Return the order of the nodes in ONNX Runtime: each after those that it needs, the last of which come first."""
    makers = {name: index for index, node in enumerate(graph.nodes) for name in node.outputs if name}
    before = [sorted({makers[name] for name in names if name in makers}) for names in uses]
    used = {index for indices in before for index in indices}
    found: dict[int, None] = {}
    waiting = [(index, False) for index in range(len(uses)) if index not in used]
    entered = set[int]()
    while waiting:
        index, ready = waiting.pop()
        if ready:
            found[index] = None
        elif index not in entered:
            entered.add(index)
            waiting += [(index, True), *((other, False) for other in before[index])]
    return list(found)
