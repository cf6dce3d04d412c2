"""Layered layout of a directed graph: every edge points down, boxes do not overlap, and few edges cross.

The steps are those of Sugiyama, Tagawa and Toda (1981): layers by the longest path, dummies where an edge passes a
layer, order by barycentres, and coordinates by isotonic regression. A few sweeps bound the time, which is about linear
in boxes, edges and dummies.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SWEEPS = 8
_DUMMY_WIDTH = 8.0
# The weights of edges between boxes, between a box and a dummy, and between dummies, which keep long edges straight.
_WEIGHTS = (2.0, 0.3, 8.0)
# That of an edge from a box without inputs, such as a constant, which must not move a chain aside.
_LOOSE = 0.05

Point = tuple[float, float]


@dataclass(frozen=True)
class Layout:
    """A laid-out graph, in px.

    ``boxes`` are the left upper corners. An edge is an odd number of points: from the foot of its source, by turns
    straight down through the rest of a layer, and across to the next one, to the head of its target.
    """

    width: float
    height: float
    boxes: tuple[Point, ...]
    edges: tuple[tuple[Point, ...], ...]


def layout(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[tuple[int, int]],
    *,
    across: float = 24.0,
    down: float = 44.0,
) -> Layout:
    """Place boxes in layers, each below all boxes with an edge to it. The same input has the same layout.

    Args:
        sizes: width and height of each box.
        edges: pairs of indices of boxes. They form no cycle; an edge from a box to itself is not allowed either.
        across: the least distance between boxes of a layer.
        down: the distance between layers.

    Raises:
        ValueError: the edges form a cycle.
    """
    net = _Net(sizes, edges)
    _order(net)
    lefts = _across(net, across)
    left = min(lefts, default=0.0)
    rows = _rows(net, down)
    places = [(x - left, rows[net.layers[node]][0]) for node, x in enumerate(lefts)]
    width = max((x + net.widths[node] for node, (x, _) in enumerate(places)), default=0.0)
    height = max((y + size[1] for (_, y), size in zip(places, sizes, strict=False)), default=0.0)
    routes = tuple(tuple(net.route(edge, places, rows)) for edge in edges)
    return Layout(width, height, tuple(places[: len(sizes)]), routes)


class _Net:
    """The graph with dummies: all edges lead from one layer to the next. Edges of one source share their dummies."""

    def __init__(self, sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]):
        count = len(sizes)
        self.real = count
        self.layers = _layers(count, edges)
        self.widths = [width for width, _ in sizes]
        self.heights = [height for _, height in sizes]
        self._chains: dict[int, list[int]] = {}
        links: set[tuple[int, int]] = set()
        for source, target in edges:
            chain = self._chains.setdefault(source, [source])
            while self.layers[chain[0]] + len(chain) < self.layers[target]:
                self.layers.append(self.layers[source] + len(chain))
                self.widths.append(_DUMMY_WIDTH)
                self.heights.append(0.0)
                links.add((chain[-1], len(self.layers) - 1))
                chain.append(len(self.layers) - 1)
            links.add((chain[self.layers[target] - self.layers[source] - 1], target))
        self.above: list[list[int]] = [[] for _ in self.layers]
        self.below: list[list[int]] = [[] for _ in self.layers]
        for source, target in sorted(links):
            self.below[source].append(target)
            self.above[target].append(source)
        self.rows: list[list[int]] = [[] for _ in range(max(self.layers, default=-1) + 1)]
        for node, layer in enumerate(self.layers):
            self.rows[layer].append(node)

    def weight(self, one: int, other: int) -> float:
        """Return how much an edge pulls its ends to the same position."""
        source, target = (one, other) if self.layers[one] < self.layers[other] else (other, one)
        if not self.above[source] and len(self.above[target]) > 1:
            return _LOOSE
        return _WEIGHTS[(source >= self.real) + (target >= self.real)]

    def route(self, edge: tuple[int, int], places: Sequence[Point], rows: Sequence[Point]) -> Iterator[Point]:
        """Yield the points of an edge: where it enters and leaves each layer, from the foot of its source on."""
        source, target = edge
        for node in self._chains[source][: self.layers[target] - self.layers[source]]:
            x = places[node][0] + self.widths[node] / 2
            yield x, places[node][1] + self.heights[node]
            yield x, rows[self.layers[node]][1]
        yield places[target][0] + self.widths[target] / 2, places[target][1]


def _layers(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the layer of each box: the longest path to it; boxes without inputs are just above their first user."""
    users: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, target in edges:
        users[source].append(target)
        missing[target] += 1
    layers = [0] * count
    sources = [node for node in range(count) if not missing[node]]
    ready = list(sources)
    for node in ready:
        for user in users[node]:
            layers[user] = max(layers[user], layers[node] + 1)
            missing[user] -= 1
            if not missing[user]:
                ready.append(user)
    if len(ready) < count:
        raise ValueError("the edges form a cycle")
    for node in sources:
        layers[node] = min((layers[user] for user in users[node]), default=1) - 1
    return layers


def _order(net: _Net) -> None:
    """Order each layer so that few edges cross."""
    _start(net)
    best, rows = _crossings(net), [list(row) for row in net.rows]
    for sweep in range(_SWEEPS):
        neighbours = net.below if sweep % 2 else net.above
        for row in reversed(net.rows) if sweep % 2 else net.rows:
            _sort(row, neighbours, _positions(net, neighbours, row))
        if (found := _crossings(net)) < best:
            best, rows = found, [list(row) for row in net.rows]
        if not best:
            break
    net.rows = rows


def _start(net: _Net) -> None:
    """Order each layer as a walk in depth reaches its nodes, which keeps chains together."""
    seen: dict[int, None] = {}
    for first in (node for row in net.rows for node in row):
        stack = [first]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen[node] = None
                stack += [*reversed(net.below[node]), *reversed(net.above[node])]
    rank = {node: number for number, node in enumerate(seen)}
    for row in net.rows:
        row.sort(key=rank.__getitem__)


def _positions(net: _Net, neighbours: Sequence[Sequence[int]], row: Sequence[int]) -> Mapping[int, int]:
    layers = {net.layers[other] for node in row for other in neighbours[node]}
    return {node: place for layer in layers for place, node in enumerate(net.rows[layer])}


def _sort(row: list[int], neighbours: Sequence[Sequence[int]], positions: Mapping[int, int]) -> None:
    """Sort a layer by the mean position of each node's neighbours; nodes without any keep their places."""
    means = {
        node: sum(positions[other] for other in neighbours[node]) / len(neighbours[node])
        for node in row
        if neighbours[node]
    }
    ordered = iter(sorted(means, key=means.__getitem__))  # stable
    row[:] = [next(ordered) if node in means else node for node in row]


def _crossings(net: _Net) -> int:
    """Count the pairs of edges that cross."""
    count = 0
    for upper, lower in pairwise(net.rows):
        places = {node: place for place, node in enumerate(lower)}
        seen: list[int] = []
        for node in upper:
            ends = sorted(places[other] for other in net.below[node])
            count += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return count


@dataclass
class _Block:
    """Neighbours of a layer that touch each other: the position that they want, its weight, and their number."""

    wanted: float
    weight: float
    members: list[int] = field(default_factory=list)


def _across(net: _Net, gap: float) -> list[float]:
    """Return the left side of each node: near its neighbours, in the order of its layer, without overlaps."""
    middles = [0.0] * len(net.layers)
    for row in net.rows:
        at = 0.0
        for node in row:
            middles[node] = at + net.widths[node] / 2
            at += net.widths[node] + gap
    for sweep in range(_SWEEPS):
        for row in reversed(net.rows) if sweep % 2 else net.rows:
            # The last sweeps weigh both sides, so that boxes are centred between their neighbours.
            sides = (net.above, net.below) if sweep >= _SWEEPS // 2 else (net.below if sweep % 2 else net.above,)
            _settle(net, row, sides, middles, gap)
    return [middle - width / 2 for middle, width in zip(middles, net.widths, strict=True)]


def _settle(
    net: _Net, row: Sequence[int], sides: Sequence[Sequence[Sequence[int]]], middles: list[float], gap: float
) -> None:
    """Move the nodes of a layer to the mean of their neighbours, as near as the order and the gaps allow.

    Without the offsets of a packed layer the positions need only ascend: the solution of least squares is isotonic
    regression, by pooling adjacent violators.
    """
    offsets, at = {}, 0.0
    for node in row:
        offsets[node] = at + net.widths[node] / 2
        at += net.widths[node] + gap
    blocks: list[_Block] = []
    for node in row:
        wanted, weight = middles[node], 1e-3
        for other in (other for side in sides for other in side[node]):
            own = net.weight(node, other)
            wanted = (wanted * weight + middles[other] * own) / (weight + own)
            weight += own
        blocks.append(_Block(wanted - offsets[node], weight, [node]))
        while len(blocks) > 1 and blocks[-2].wanted >= blocks[-1].wanted:
            last, block = blocks.pop(), blocks[-1]
            total = block.weight + last.weight
            block.wanted = (block.wanted * block.weight + last.wanted * last.weight) / total
            block.weight = total
            block.members += last.members
    for block in blocks:
        for node in block.members:
            middles[node] = block.wanted + offsets[node]


def _rows(net: _Net, gap: float) -> list[Point]:
    """Return the top and the bottom of each layer."""
    rows, at = [], 0.0
    for row in net.rows:
        height = max((net.heights[node] for node in row), default=0.0)
        rows.append((at, at + height))
        at += height + gap
    return rows
