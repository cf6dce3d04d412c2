"""The values that integer inputs of an ONNX graph may have because they select from tensors of a fixed size.

A CPU refuses an index out of range. On a GPU, ONNX Runtime answers with zeros, ignores the index, or reads other
memory, depending on the operator, and PyTorch loses the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ingot.bounds.abstract import INT8, INT32, INT64, UINT8
from ingot.bounds.analysis import uses
from ingot.bounds.graph import Constant, Model, Node, opened
from ingot.bounds.protobuf import DamagedError
from ingot.report.text import one_line
from ingot.tensors import DType
from ingot.tensors.values import ValueRange

_LONGEST_NAME = 80
# Of inputs.
_INTEGERS = (UINT8, INT8, 4, 5, INT32, INT64, 12, 13)
# Operators with all values of their first input in their output, and no others.
_SAME = frozenset(("Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"))
_GATHERS = ("Gather", "GatherBlockQuantized", "GatherElements", "GatherND")
_SELECTS = frozenset((*_GATHERS, "Scatter", "ScatterElements", "ScatterND"))
_MICROSOFT = "com.microsoft"
_DOMAINS = ("", _MICROSOFT)
_ROTARY = (_MICROSOFT, "RotaryEmbedding")
# The positions of inputs with indices, and of the inputs in whose first dimension they select; none is negative.
_ROWS = {
    (_MICROSOFT, "CropAndResize"): ((2, 0),),
    (_MICROSOFT, "EmbedLayerNormalization"): ((0, 2), (1, 4), (8, 3)),
    (_MICROSOFT, "MRotaryEmbedding"): ((1, 2),),
    (_MICROSOFT, "QEmbedLayerNormalization"): ((0, 2), (1, 4)),
    _ROTARY: ((1, 2),),
    ("", "RoiAlign"): ((2, 0),),
    ("", "RotaryEmbedding"): ((3, 1),),
}
# The positions of inputs with lengths, places or ids, whose limit no single size gives; a GPU refuses none.
_PLACES = {
    ("", "Attention"): (6,),
    ("", "NegativeLogLikelihoodLoss"): (1,),
    ("", "ReverseSequence"): (1,),
    ("", "SoftmaxCrossEntropyLoss"): (1,),
    ("", "TensorScatter"): (2,),
    (_MICROSOFT, "BeamSearch"): (0,),
    (_MICROSOFT, "DecoderMaskedMultiHeadAttention"): (9,),
    (_MICROSOFT, "DecoderMaskedSelfAttention"): (8,),
    (_MICROSOFT, "GreedySearch"): (0,),
    (_MICROSOFT, "GroupQueryAttention"): (5, 9),
    (_MICROSOFT, "MultiHeadAttention"): (9,),
    (_MICROSOFT, "NGramRepeatBlock"): (0,),
    (_MICROSOFT, "PackedAttention"): (3, 4),
    (_MICROSOFT, "PackedMultiHeadAttention"): (4, 5),
    (_MICROSOFT, "PagedAttention"): (5, 6, 7, 10),
    (_MICROSOFT, "RemovePadding"): (1,),
    (_MICROSOFT, "RestorePadding"): (1,),
    (_MICROSOFT, "Sampling"): (0,),
    (_MICROSOFT, "SparseAttention"): (5, 6, 8),
    (_MICROSOFT, "WhisperBeamSearch"): (0,),
}
# Their outputs do not depend on the values of their inputs.
_OF_SHAPE = frozenset(("Shape", "Size"))
# The attribute with the dimension in which an operator selects; of those of ND, in which it begins to.
_AXES = {"GatherBlockQuantized": "gather_axis", "GatherND": "batch_dims", "ScatterND": "batch_dims"}
_SIZED = frozenset(("Cast", "DequantizeLinear", "Identity", "QuantizeLinear"))
"""Operators whose output has the sizes of the first input."""


@dataclass(frozen=True)
class Indices:
    """Which values of integer inputs select an element.

    ``ranges`` are those of inputs of which every value is an index. ``unknown`` are the other inputs that indices
    depend on, each with the node that selects.
    """

    ranges: Mapping[str, ValueRange] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)


def indices_of(path: Path, *, lenient: bool = False) -> Indices:
    """Return which values of the integer inputs of an ONNX file are valid indices; nothing of a damaged file.

    Args:
        path: the graph; its weights are not read.
        lenient: for a caller that tries values: also regard operators that accept any index, and believe the sizes
            that the file states for results of nodes, which engines ignore.
    """
    try:
        with opened(path) as model:
            return _Reading(model, lenient=lenient).indices()
    except (DamagedError, LookupError, TypeError, ValueError):  # an invalid node, which engines refuse
        return Indices()


@dataclass(frozen=True)
class _Selection:
    """A node that selects: the tensor of its indices, and their number, None if it is not fixed.

    ``negative`` says whether the node counts negative indices from the end, or refuses them.
    """

    node: Node
    indices: str
    data: str
    size: int | None
    negative: bool = True


class _Reading:
    def __init__(self, model: Model, *, lenient: bool):
        graph = model.graph
        self._model, self._graph, self._lenient = model, graph, lenient
        self._described = graph.types() if lenient else {item.name: item for item in model.inputs}
        self._makers = {name: node for node in graph.nodes for name in node.outputs if name}
        self._inputs = {item.name: item.kind for item in model.inputs if item.kind in _INTEGERS}

    def indices(self) -> Indices:
        found: dict[str, ValueRange] = {}
        unknown: dict[str, str] = {}
        for selection in (each for node in self._graph.nodes for each in self._selections(node)):
            exact: set[str] = set()
            for name, shift in self._sources(selection.indices) if selection.size else ():
                span = self._span(name, selection, shift)
                exact.add(name)
                if span is not None:
                    found[name] = span if name not in found else _both(found[name], span)
            for name in self._ancestors([selection.indices]) - exact:
                unknown.setdefault(name, str(selection.node))
        for node in self._graph.nodes:
            if any(map(_is_indexed, self._inner(node))):
                for name in self._ancestors(uses(node)):
                    unknown.setdefault(name, str(node))
        ranges = {name: span for name, span in found.items() if (span.low or 0) <= (span.high or 0)}
        return Indices(ranges, {name: node for name, node in unknown.items() if name not in ranges})

    def _selections(self, node: Node) -> Iterator[_Selection]:
        """Yield what a node of the graph selects; nothing if it does not select."""
        inputs, kind = node.inputs, (node.domain, node.operator)
        for ids, table in _ROWS.get(kind, ()):
            if _has(node, ids):
                # A single position is that of the first element, so its limit depends on the length of the sequence.
                single = kind == _ROTARY and len(self._dims(inputs[ids]) or ()) != 2
                size = None if single else self._size(inputs[table], 0)
                yield _Selection(node, inputs[ids], inputs[table], size, negative=False)
        for place in _PLACES.get(kind, ()):
            if _has(node, place):
                yield _Selection(node, inputs[place], "", None)
        if kind == ("", "OneHot"):
            depth = self._constant(inputs[1]) if self._lenient else None
            if depth is not None and depth.values is not None and depth.values.size == 1:
                yield _Selection(node, inputs[0], "", int(depth.values[0]))
        elif _selects(node):
            data, indices = inputs[:2]
            name = _AXES.get(node.operator, "axis")
            axis = node.attributes[name].integer if name in node.attributes else 0
            several = name == "batch_dims" and (self._dims(indices) or ())[-1:] != (1,)
            yield _Selection(node, indices, data, None if several else self._size(data, axis))

    def _inner(self, node: Node) -> Iterator[Node]:
        """Yield the nodes of the graphs and of the function that a node runs."""
        function = self._model.functions.get((node.domain, node.operator))
        graphs = [*node.graphs, *([] if function is None else [function])]
        seen: set[int] = set()
        while graphs:
            graph = graphs.pop()
            if id(graph) in seen:
                continue
            seen.add(id(graph))
            for inner in graph.nodes:
                yield inner
                called = self._model.functions.get((inner.domain, inner.operator))
                graphs += [*inner.graphs, *([] if called is None else [called])]

    def _sources(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the integer inputs whose values are all indices, each with what the graph adds to them."""
        left, seen = [(name, 0)], set[tuple[str, int]]()
        while left:
            name, shift = left.pop()
            if (name, shift) in seen:
                continue
            seen.add((name, shift))
            node = self._makers.get(name)
            if node is None:
                if name in self._inputs:
                    yield name, shift
            elif node.domain:
                continue
            elif node.operator in _SAME or _widens(node):
                left.append((node.inputs[0], shift))
            elif node.operator == "Concat":
                left += [(part, shift) for part in node.inputs]
            elif node.operator in ("Add", "Sub"):
                left += self._shifted(node, shift)

    def _shifted(self, node: Node, shift: int) -> Iterator[tuple[str, int]]:
        """Yield the operand to which a node adds one number, and the sum of all that is added."""
        one, two = node.inputs
        for name, other in ((one, two), (two, one)):
            constant = self._constant(other)
            if constant is None or constant.values is None or constant.values.dtype.kind not in "iu":
                continue
            numbers = np.unique(constant.values)
            if len(numbers) == 1 and (node.operator == "Add" or name == one):
                yield name, shift + int(numbers[0]) * (1 if node.operator == "Add" else -1)

    def _span(self, name: str, selection: _Selection, shift: int) -> ValueRange | None:
        """Return the values of an input that select; None if all values of its datatype do."""
        limits, size = np.iinfo(DType.from_onnx(self._inputs[name]).numpy), selection.size or 0
        first = -size if selection.negative else 0
        low, high = max(first - shift, int(limits.min)), min(size - 1 - shift, int(limits.max))
        if low == limits.min and high == limits.max:
            return None
        source = one_line(f" of '{selection.data}'" if selection.data else "", _LONGEST_NAME)
        return ValueRange(low, high, source=f"it selects from {size}{source} in {one_line(str(selection.node), 200)}")

    def _ancestors(self, names: object) -> set[str]:
        """Return the integer inputs on whose values tensors depend."""
        left, seen = list(names), set[str]()  # type: ignore[call-overload]
        while left:
            name = left.pop()
            if name in seen:
                continue
            seen.add(name)
            node = self._makers.get(name)
            if node is not None and node.operator not in _OF_SHAPE:
                left += uses(node)
        return seen & self._inputs.keys()

    def _constant(self, name: str) -> Constant | None:
        node = self._makers.get(name)
        if node is None:
            return self._graph.constants.get(name)
        return node.attributes["value"].tensor if node.operator == "Constant" and "value" in node.attributes else None

    def _size(self, name: str, axis: int) -> int | None:
        """Return the size of a dimension of a tensor; None if it is not fixed."""
        dims = self._dims(name) or ()
        size = dims[axis] if -len(dims) <= axis < len(dims) else None
        return size if isinstance(size, int) else None

    def _dims(self, name: str) -> Sequence[int | str] | None:
        """Return the sizes of a constant, an input, or what has the sizes of one, or their names; None of others."""
        for _ in range(len(_SIZED)):
            constant, described = self._constant(name), self._described.get(name)
            if constant is not None:
                return constant.dims
            if described is not None:
                return described.dims if described.ranked else None
            node = self._makers.get(name)
            if node is None or node.operator not in _SIZED or node.domain not in _DOMAINS:
                return None
            name = node.inputs[0]
        return None


def _has(node: Node, place: int) -> bool:
    return place < len(node.inputs) and bool(node.inputs[place])


def _selects(node: Node) -> bool:
    return node.operator in _SELECTS and node.domain in _DOMAINS


def _is_indexed(node: Node) -> bool:
    return _selects(node) or (node.domain, node.operator) in _ROWS or (node.domain, node.operator) in _PLACES


def _widens(node: Node) -> bool:
    """Return whether a node casts to the types of indices. Values beyond 32 bits would wrap around, and are refused."""
    return node.operator == "Cast" and "to" in node.attributes and node.attributes["to"].integer in (INT32, INT64)


def _both(one: ValueRange, two: ValueRange) -> ValueRange:
    """Return the values of both ranges, with the source of the one that ends first."""
    low, high = max(one.low or 0, two.low or 0), min(one.high or 0, two.high or 0)
    return ValueRange(low, high, source=(one if high == one.high else two).source)
