"""Division of a large graph into drawings that fit a page, by the modules of its nodes.

A part is a run of nodes of one module in the order of execution, so the parts of a drawing form no cycle. Parts that
compute the same, such as the layers of a transformer, share one drawing.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

from ingot.export.report import GraphView, Node

MOST_ITEMS = 64
"""Boxes of a drawing up to which parts are unfolded in it."""
_MOST_LOOSE = 300
_PIECE = 100
_SMALLEST_PART = 3
# So many parts whose paths differ in numbers only, such as layers, are not unfolded.
_REPEATED = 3
# Deeper modules are part of the last one.
_DEEPEST = 40

Path = tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """Nodes that follow each other, from ``start`` to ``stop`` of a :class:`Folded`; ``path`` is what they share."""

    path: Path
    start: int
    stop: int
    title: str

    def __len__(self) -> int:
        return self.stop - self.start


Item = int | Part
"""What a box stands for: a node, by its position, or a part."""


@dataclass(frozen=True, eq=False)
class View:
    """One drawing: its items in the order of execution, and all parts that it stands for, itself included."""

    part: Part
    items: Sequence[Item]
    alike: list[Part] = field(default_factory=list)


class Folded:
    """A graph in the order of execution, and its drawings.

    Attributes:
        nodes: the nodes, each after those that it depends on.
        producers: the position of the node that computes each value.
        last_uses: the position of the last node that uses each value; that after the last node if the graph returns it.
        views: the drawings; the first is that of the whole graph.
    """

    def __init__(self, graph: GraphView, marks: Mapping[str, object]):
        self.graph = graph
        self._marks = marks
        users = _users(graph.nodes)
        paths = _paths(graph)
        order = _execution_order(users, paths)
        self.nodes = [graph.nodes[index] for index in order]
        self.paths = [paths[index] for index in order]
        self.producers = _producers(self.nodes)
        self.last_uses = {name: position for position, node in enumerate(self.nodes) for name in node.inputs}
        self.last_uses |= dict.fromkeys(graph.outputs.values(), len(self.nodes))
        self.views: list[View] = []
        self._by_content: dict[int, View] = {}
        self._contents: dict[Part, int] = {}
        self._fold()

    def view_of(self, part: Part) -> View:
        """Return the drawing of a part."""
        return self._by_content[self._content(part)]

    def is_used_after(self, node: Node, position: int) -> bool:
        """Return whether a node from this position on, or the graph's caller, uses a result of a node."""
        return any(self.last_uses.get(name, -1) >= position for name in node.outputs)

    def _fold(self) -> None:
        waiting = [Part((), 0, len(self.nodes), "")]
        for part in waiting:  # which grows
            content = self._content(part)
            if content in self._by_content:
                self._by_content[content].alike.append(part)
                continue
            view = View(part, self._items(part), [part])
            self._by_content[content] = view
            self.views.append(view)
            waiting += [item for item in view.items if isinstance(item, Part)]

    def _items(self, part: Part) -> list[Item]:
        """Return the items of a drawing, with parts unfolded as far as they fit; numbered parts only together."""
        if len(part) <= MOST_ITEMS:
            return list(range(part.start, part.stop))
        items = list(self._divided(part))
        while True:
            groups: dict[Path, list[Part]] = defaultdict(list)
            for item in items:
                if isinstance(item, Part):
                    groups[tuple("0" if name.isdigit() else name for name in item.path)].append(item)
            inner = {
                path: {item: list(self._divided(item)) for item in members}
                for path, members in groups.items()
                if len(members) < _REPEATED
            }
            grown = {path: sum(map(len, found.values())) for path, found in inner.items()}
            path = min(grown, key=grown.__getitem__, default=None)
            if path is None or len(items) - len(groups[path]) + grown[path] > MOST_ITEMS:
                return items
            items = [
                each for item in items for each in (inner[path].get(item, [item]) if isinstance(item, Part) else [item])
            ]

    def _divided(self, part: Part) -> Iterator[Item]:
        """Yield the nodes and parts that a part consists of."""
        found = list(self._runs(part))
        if sum(isinstance(item, int) for item in found) <= _MOST_LOOSE and len(found) <= 2 * _MOST_LOOSE:
            yield from found
            return
        step = max(_PIECE, -(-len(part) // _PIECE))
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            yield Part(part.path, start, stop, f"nodes {start + 1} to {stop}")

    def _runs(self, part: Part) -> Iterator[Item]:
        depth, index = len(part.path), part.start
        while index < part.stop:
            path, start = self.paths[index], index
            index += 1
            while index < part.stop and len(path) > depth and self.paths[index][: depth + 1] == path[: depth + 1]:
                index += 1
            if index - start < _SMALLEST_PART or len(path) <= depth:
                yield from range(start, index)
                continue
            shared = _shared(self.paths[start:index])
            inner = Part(shared, start, index, ".".join(shared))
            # A module that fills its part is not a further part.
            yield from self._runs(inner) if index - start == len(part) else (inner,)

    def _content(self, part: Part) -> int:
        """Return a number that is equal for parts that compute the same."""
        if part in self._contents:
            return self._contents[part]
        depth, numbers = len(part.path), dict[str, int]()
        content: list[object] = [part.title if part.title.startswith("nodes ") else len(part)]
        for node, path in zip(self.nodes[part.start : part.stop], self.paths[part.start : part.stop], strict=True):
            links = [
                self.graph.weights.get(name) or numbers.setdefault(name, len(numbers))
                for name in (*node.inputs, *node.outputs)
            ]
            attributes = tuple(node.attributes.items())
            mark = self._marks.get(node.name)
            content.append((node.operator, path[depth:], node.shape, node.dtype, attributes, mark, *links))
        return self._contents.setdefault(part, hash(tuple(content)))


def _paths(graph: GraphView) -> list[Path]:
    """Return the path of each node's module.

    Of a node without one, such as quantization adds, it is that in the name of its result or of a weight, or else what
    the paths of the nodes around it have in common.
    """
    paths = [tuple(node.module.split(".", _DEEPEST)) if node.module else () for node in graph.nodes]
    known = {path[:depth] for path in paths for depth in range(1, len(path) + 1)}
    for index, node in enumerate(graph.nodes):
        if not paths[index]:
            names = (*node.outputs, *(name for name in node.inputs if name in graph.weights))
            paths[index] = max((_longest(name, known) for name in names), key=len)
    before, after = list(paths), list(paths)
    for index in range(1, len(paths)):
        before[index] = paths[index] or before[index - 1]
    for index in reversed(range(len(paths) - 1)):
        after[index] = paths[index] or after[index + 1]
    return [own or _shared(around) for own, *around in zip(paths, before, after, strict=True)]


def _longest(name: str, known: Set[Path]) -> Path:
    """Return the longest of the known paths that a name begins with."""
    parts = tuple(name.split(".", _DEEPEST))
    return next((parts[:depth] for depth in range(len(parts) - 1, 0, -1) if parts[:depth] in known), ())


def _shared(paths: Sequence[Path]) -> Path:
    least, most = min(paths), max(paths)
    count = next((depth for depth, (one, other) in enumerate(zip(least, most, strict=False)) if one != other), None)
    return least[: min(len(least), len(most)) if count is None else count]


def _producers(nodes: Sequence[Node]) -> Mapping[str, int]:
    """Return the first node that computes each value, by its position."""
    found: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in node.outputs:
            found.setdefault(name, index)
    return found


def _users(nodes: Sequence[Node]) -> list[list[int]]:
    """Return the positions of the nodes that use results of each node."""
    producers = _producers(nodes)
    users: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for source in sorted({producers[name] for name in node.inputs if name in producers}):
            users[source].append(index)
    return users


def _execution_order(users: Sequence[Sequence[int]], paths: Sequence[Path]) -> list[int]:
    """Return the positions of nodes, each after its inputs, with the nodes of a module together where possible.

    Nodes of a cycle, which only a damaged record has, are left out.
    """
    missing = [0] * len(users)
    for found in users:
        for user in found:
            missing[user] += 1
    ready: dict[Path, list[int]] = defaultdict(list)
    done: set[int] = set()

    def add(index: int) -> None:
        for depth in range(len(paths[index]) + 1):
            heapq.heappush(ready[paths[index][:depth]], index)

    for index, count in enumerate(missing):
        if not count:
            add(index)
    order: list[int] = []
    last: Path = ()
    while True:
        for depth in reversed(range(len(last) + 1)):
            heap = ready[last[:depth]]
            while heap and heap[0] in done:
                heapq.heappop(heap)
            if heap:
                break
        else:
            return order
        index = heapq.heappop(heap)
        done.add(index)
        order.append(index)
        last = paths[index]
        for user in users[index]:
            missing[user] -= 1
            if not missing[user]:
                add(user)


def summary(nodes: Sequence[Node], most: int = 4) -> str:
    """Return the most frequent operators as text, such as ``3 Conv, 2 Relu``."""
    counts = Counter(short(node.operator) for node in nodes).most_common()
    rest = sum(count for _, count in counts[most:])
    shown = [f"{count} {name}" for name, count in counts[:most]]
    return ", ".join([*shown, f"{rest} other"] if rest else shown)


def short(operator: str) -> str:
    """Return an operator as boxes show it: ``aten.conv2d.default`` is ``conv2d``."""
    if not operator.startswith(("aten.", "operator.")):
        return operator
    parts = operator.split(".")
    return parts[1] if len(parts) > 1 else operator
