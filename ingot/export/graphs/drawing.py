"""A drawing of a folded graph as boxes and edges of :mod:`ingot.report.diagrams`."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ingot.export.graphs.changes import Change
from ingot.export.graphs.folding import Folded, Item, Part, View, short, summary
from ingot.export.report import Node
from ingot.report import diagrams, units
from ingot.report.diagrams import Box, Kind

_MOST_LINES = 7
_MOST_RESULTS = 2
# The first that matches a name of an operator in lower case decides.
_KINDS: tuple[tuple[Kind, str], ...] = (
    ("quantize", r"quantize|qdq"),
    ("compute", r"conv|matmul|gemm|linear(?!_)|addmm|baddbmm|\bbmm|\bmm\b|einsum|attention|lstm|gru|rnn|embedding"),
    ("norm", r"norm"),
    ("pool", r"pool|reduce|\bsum|mean|argm|\bmax\b|\bmin\b|cumsum|topk"),
    ("activation", r"relu|elu|softmax|softplus|sigmoid|tanh|swish|silu|mish|\berf\b|dropout"),
    (
        "shape",
        r"reshape|transpose|permute|view|flatten|squeeze|shape|size|slice|select|gather|index|concat|\bcat\b|stack|split"
        r"|chunk|expand|getitem|range|\bpad\b|tile|repeat|constant|identity|scatter|ones|zeros|full|where|roll|trilu|tril",
    ),
)
# Attributes that exporters write though they are the defaults; only tooltips show them.
_DEFAULTS = {
    ("auto_pad", "NOTSET"),
    ("ceil_mode", "0"),
    ("dilations", "[1, 1]"),
    ("group", "1"),
    ("pads", "[0, 0, 0, 0]"),
    ("storage_order", "0"),
    ("cudnn_enable", "False"),
    ("cudnn_enabled", "False"),
    ("device", "cpu"),
    ("end", "9223372036854775807"),
    ("pin_memory", "False"),
    ("training", "False"),
}
_BITS = re.compile(r"(?:bfloat|complex|float|uint|int)(\d+)")


@dataclass
class _Canvas:
    boxes: list[Box] = field(default_factory=list)
    edges: dict[tuple[int, int], None] = field(default_factory=dict)

    def add(self, box: Box) -> int:
        self.boxes.append(box)
        return len(self.boxes) - 1


def draw(folded: Folded, view: View, marks: Mapping[str, Change], link: Callable[[Part], str]) -> str:
    """Return one drawing of a graph as SVG.

    Args:
        folded: the graph.
        view: the drawing.
        marks: how nodes differ from another graph, by name.
        link: returns the fragment that the box of a part leads to, or an empty text.
    """
    start, stop = view.part.start, view.part.stop
    canvas = _Canvas()
    own = [_box(folded, item, marks, link) for item in view.items]
    starts = [item if isinstance(item, int) else item.start for item in view.items]
    first_value = {}
    entering = dict.fromkeys(
        name
        for node in folded.nodes[start:stop]
        for name in node.inputs
        if name in folded.producers or (folded.graph.inputs and name not in folded.graph.weights)
        if not start <= folded.producers.get(name, -1) < stop
    )
    for name in entering:
        first_value[name] = canvas.add(_value(name, *_origin(folded, name)))
    offset = len(canvas.boxes)
    canvas.boxes += own
    for position in range(start, stop):
        target = offset + bisect_right(starts, position) - 1
        for name in folded.nodes[position].inputs:
            if name in first_value:
                canvas.edges[first_value[name], target] = None
            elif (producer := folded.producers.get(name)) is not None and name not in folded.graph.weights:
                source = offset + bisect_right(starts, producer) - 1
                if source != target:
                    canvas.edges[source, target] = None
    for title, name in _ends(folded, view):
        box = canvas.add(_value(title, "", f"output {title}" if start == 0 else ""))
        canvas.edges[offset + bisect_right(starts, folded.producers[name]) - 1, box] = None
    return diagrams.draw(canvas.boxes, list(canvas.edges), view.part.title or folded.graph.title)


def kinds(folded: Folded) -> set[Kind]:
    """Return the kinds of a graph's operators."""
    return {kind_of(node.operator) for node in folded.nodes}


def kind_of(operator: str) -> Kind:
    """Return the kind of an operator by its name."""
    name = short(operator).rpartition("::")[2].lower()
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "other")


def mark_of(marks: Mapping[str, Change], nodes: Sequence[Node]) -> dict[Change, int]:
    """Return how many of some nodes have each mark."""
    found = [marks[node.name] for node in nodes if node.name in marks]
    return {change: found.count(change) for change in Change if change in found}


def _ends(folded: Folded, view: View) -> list[tuple[str, str]]:
    """Return the titles and names of the values that leave a drawing."""
    titles = {name: title for title, name in folded.graph.outputs.items()}
    return [
        (titles.get(name, name), name)
        for node in folded.nodes[view.part.start : view.part.stop]
        for name in node.outputs
        if folded.last_uses.get(name, -1) >= view.part.stop
    ]


def _origin(folded: Folded, name: str) -> tuple[str, str]:
    """Return the type of a value from outside of a drawing, and a tooltip."""
    producer = folded.producers.get(name)
    if producer is None:
        return folded.graph.inputs.get(name, ""), f"input {name}"
    node = folded.nodes[producer]
    return _type(node), f"{name}, computed by {node.operator}{f' in {node.module}' if node.module else ''}"


def _value(name: str, kind: str, note: str) -> Box:
    return Box(name, kind="value", results=(kind,) if kind else (), note=note)


def _box(folded: Folded, item: Item, marks: Mapping[str, Change], link: Callable[[Part], str]) -> Box:
    if isinstance(item, int):
        return _node(folded, item, marks)
    nodes = folded.nodes[item.start : item.stop]
    changes = mark_of(marks, nodes)
    lines = [("", f"{len(nodes)} nodes"), *(("", text) for text in summary(nodes, 4).split(", "))]
    lines += [(change.value, str(count)) for change, count in changes.items()]
    types = dict.fromkeys(_type(node) for node in nodes if folded.is_used_after(node, item.stop))
    return Box(
        item.title,
        lines,
        kind="part",
        results=_results(list(types)),
        mark="changed" if changes else "",
        note=f"{item.title}: {summary(nodes, 12)}",
        link=link(item),
    )


def _node(folded: Folded, position: int, marks: Mapping[str, Change]) -> Box:
    node, weights = folded.nodes[position], folded.graph.weights
    lines = [item for item in node.attributes.items() if item not in _DEFAULTS]
    held = [
        (_own_name(name, folded.paths[position]), f"{weights[name]}  {_size(weights[name])}")
        for name in node.inputs
        if name in weights
    ]
    # Weights first: they are what a reader looks for.
    lines = [*held, *lines]
    if len(lines) > _MOST_LINES:
        lines = [*lines[: _MOST_LINES - 1], ("", f"{len(lines) - _MOST_LINES + 1} more")]
    change = marks.get(node.name)
    return Box(
        short(node.operator),
        lines,
        kind=kind_of(node.operator),
        results=_results([_type(node)] if folded.is_used_after(node, position + 1) else []),
        mark=change.value if change is not None else "",
        note=_note(node, weights),
    )


def _note(node: Node, weights: Mapping[str, str]) -> str:
    rows = [f"{node.name} = {node.operator}", f"module {node.module}" if node.module else "", node.source]
    rows += [f"{name}: {weights[name]}" if name in weights else f"input {name}" for name in node.inputs]
    rows += [f"{name} = {value}" for name, value in node.attributes.items()]
    return "\n".join(filter(None, rows))


def _results(types: Sequence[str]) -> tuple[str, ...]:
    shown = [item for item in types if item]
    more = len(shown) - _MOST_RESULTS
    return (*shown[:_MOST_RESULTS], f"{more} more") if more > 0 else tuple(shown)


def _type(node: Node) -> str:
    return node.dtype + node.shape


def _own_name(name: str, path: Sequence[str]) -> str:
    """Return a weight's name without its module, which the drawing shows."""
    parts = name.split(".")
    count = next(
        (depth for depth, (one, other) in enumerate(zip(parts, path, strict=False)) if one != other), len(path)
    )
    return ".".join(parts[min(count, len(parts) - 1) :])


def _size(kind: str) -> str:
    """Return the bytes of a weight as text; empty for types of unknown size."""
    name, _, dims = kind.partition("[")
    match = _BITS.match(name)
    bits = int(match[1]) if match else 8 if name == "bool" or name.startswith("float8") else 0
    count = math.prod(int(dim) for dim in dims.rstrip("]").split(",") if dim.isdigit())
    return units.size(-(-count * bits // 8)) if bits else ""
