"""The values that integer inputs of an ONNX graph may have because they select from tensors of a fixed size.

A CPU refuses an index out of range. On a GPU, ONNX Runtime answers with zeros, ignores the index, or reads other
memory, depending on the operator, and PyTorch loses the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np

from ingot.bounds.abstract import INT32, INT64
from ingot.bounds.graph import Constant, Graph, Model, Node, opened
from ingot.bounds.protobuf import DamagedError
from ingot.report.text import one_line
from ingot.tensors import DType
from ingot.tensors.values import ValueRange

_LONGEST_NAME = 80
# Of inputs.
_INTEGERS = frozenset(dtype.onnx for dtype in DType if dtype.is_integer)
# Operators with all values of their first input in their output, and no others.
_SAME = frozenset(("Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Tile", "Transpose", "Unsqueeze"))
_MICROSOFT = "com.microsoft"
_SELECTS = frozenset(
    (
        *(("", name) for name in ("Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND")),
        *((_MICROSOFT, name) for name in ("GatherBlockQuantized", "GatherND")),
    )
)
_CONSTANT = ("", "Constant")
_GATHER = ("", "Gather")
_MEAN = ("", "ReduceMean")
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
# The positions of inputs with lengths, places or ids, whose limit does not follow from a single size; a GPU
# refuses none.
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
# Their outputs are sizes of their inputs or places within them, whatever the values are.
_OF_SHAPE = frozenset(("", name) for name in ("ArgMax", "ArgMin", "NonZero", "Shape", "Size"))
_FLAGS = frozenset(
    ("And", "Equal", "Greater", "GreaterOrEqual", "IsInf", "IsNaN", "Less", "LessOrEqual", "Not", "Or", "Xor")
)
# The attribute with the dimension in which an operator selects; of the ND operators, the first such dimension.
_AXES = {"GatherBlockQuantized": "gather_axis", "GatherND": "batch_dims", "ScatterND": "batch_dims"}
# Their output has the sizes of the first input.
_SIZED = frozenset(
    (
        *(("", name) for name in ("Cast", "DequantizeLinear", "Identity", "QuantizeLinear")),
        *((_MICROSOFT, name) for name in ("DequantizeLinear", "QuantizeLinear")),
    )
)
# ONNX Runtime fuses lookups whose sum is normalized into EmbedLayerNormalization, which refuses negative indices. It
# also does so if single operators normalize: the first subtract the mean. These are numbers of inputs, by operator.
_NORMALIZED = {("", "LayerNormalization"): 1, (_MICROSOFT, "SkipLayerNormalization"): 2}
_SUMS = {("", "Add"): 2, ("", "Cast"): 1, ("", "Dropout"): 1, ("", "Identity"): 1}


@dataclass(frozen=True)
class Indices:
    """The values of integer inputs that select an element.

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


@dataclass(frozen=True)
class _Allowed:
    """The values of a tensor with which all that select by it find an element; ``selection`` is the narrowest of them.

    ``most`` is the largest value of the narrowest datatype that they are cast to.
    """

    low: int
    high: int
    selection: _Selection
    most: int = np.iinfo(np.int64).max

    def within(self, kind: int) -> _Allowed | None:
        """Return the allowed values of a datatype; None if all of its values are allowed."""
        limits = np.iinfo(DType.from_onnx(kind).numpy)
        low, high = max(self.low, int(limits.min)), min(self.high, int(limits.max))
        whole = low == limits.min and high == limits.max
        return None if whole else replace(self, low=low, high=high, most=min(self.most, int(limits.max)))

    def wraps(self, kind: int) -> bool:
        """Return whether large numbers of an unsigned datatype are cast to negative ones that are allowed."""
        limits = np.iinfo(DType.from_onnx(kind).numpy)
        return self.low < 0 and limits.min == 0 and self.most < limits.max

    def both(self, other: _Allowed | None) -> _Allowed:
        if other is None:
            return self
        low, high, most = max(self.low, other.low), min(self.high, other.high), min(self.most, other.most)
        return _Allowed(low, high, (self if self.high == high else other).selection, most)

    @property
    def span(self) -> ValueRange:
        node, data, size = self.selection.node, self.selection.data, self.selection.size
        source = one_line(f" of '{data}'" if data else "", _LONGEST_NAME)
        text = f"it selects from {size}{source} in {one_line(str(node), 200)}"
        return ValueRange(self.low, self.high, source=text)


class _Reading:
    """Derives the values of inputs backwards, from the nodes that select, in one pass: a file may come from anyone."""

    def __init__(self, model: Model, *, lenient: bool):
        graph = model.graph
        self._model, self._graph, self._lenient = model, graph, lenient
        self._described = graph.types() if lenient else {item.name: item for item in model.inputs}
        self._makers = {name: node for node in graph.nodes for name in node.outputs if name}
        self._inputs = {item.name: item.kind for item in model.inputs if item.kind in _INTEGERS}
        self._constants: dict[str, Constant | None] = {}
        self._numbers: dict[str, int | None] = {}
        self._selecting = self._functions()
        self._centred = {node.inputs[0] for node in graph.nodes if _kind(node) == ("", "Sub")}
        # Of tensors: allowed values, a node that selects by what is computed from them, and whether their sum is
        # normalized.
        self._allowed: dict[str, _Allowed] = {}
        self._unknown: dict[str, Node] = {}
        self._normalized: set[str] = set()

    def indices(self) -> Indices:
        for node, reads in self._backwards():
            self._follow(node, reads)
            self._normalized.update(self._addends(node))
            if node.graphs or _kind(node) in self._model.functions:
                if self._hides(node):
                    self._unknown |= dict.fromkeys(reads, node)
                continue
            for selection in self._selections(node):
                self._select(selection)
        ranges: dict[str, ValueRange] = {}
        for name, kind in self._inputs.items():
            allowed = self._allowed.get(name)
            if allowed is not None and allowed.wraps(kind):
                self._unknown[name] = allowed.selection.node
            elif allowed is not None and (within := allowed.within(kind)) is not None and within.low <= within.high:
                ranges[name] = within.span
        unknown = self._unknown.items()
        return Indices(ranges, {name: str(by) for name, by in unknown if name in self._inputs and name not in ranges})

    def _backwards(self) -> Iterator[tuple[Node, set[str]]]:
        """Yield each node after all that read its outputs, with the tensors that it reads.

        Engines accept nodes in any order.
        """
        nodes = self._graph.nodes
        reads = list(map(_reads, nodes))
        places = {name: place for place, node in enumerate(nodes) for name in node.outputs if name}
        before = {place: {places[name] for name in names if name in places} for place, names in enumerate(reads)}
        for place in reversed(list(TopologicalSorter(before).static_order())):
            yield nodes[place], reads[place]

    def _select(self, selection: _Selection) -> None:
        name, size = selection.indices, selection.size
        if not size:
            self._unknown[name] = selection.node
            return
        allowed = _Allowed(-size if selection.negative else 0, size - 1, selection)
        self._allowed[name] = allowed.both(self._allowed.get(name))

    def _follow(self, node: Node, reads: set[str]) -> None:
        """Limit what a node reads to the values that its outputs may have."""
        if _kind(node) in _OF_SHAPE:
            return
        by = next((self._unknown[name] for name in node.outputs if name in self._unknown), None)
        followed: Mapping[str, _Allowed] = {}
        for name in node.outputs:
            if name in self._allowed:
                allowed = self._allowed[name]
                found = self._operands(node, allowed)
                if found is None:
                    by = allowed.selection.node
                else:
                    followed = found
        for name, allowed in followed.items():
            self._allowed[name] = allowed.both(self._allowed.get(name))
        if by is not None:
            self._unknown |= dict.fromkeys(reads, by)

    def _operands(self, node: Node, allowed: _Allowed) -> Mapping[str, _Allowed] | None:
        """Return the allowed values of the inputs that a node's output consists of; None if they are not known."""
        if node.domain or _kind(node) in self._model.functions:
            return None
        if node.operator in _SAME:
            return {node.inputs[0]: allowed}
        if _makes_flags(node) and allowed.low <= 0 < allowed.high:
            return {}
        if node.operator == "Concat":
            return dict.fromkeys(node.inputs, allowed)
        if node.operator == "Cast" and "to" in node.attributes:
            # Numbers beyond 32 bits that wrap around to an index are refused.
            to = node.attributes["to"].integer
            if to not in (INT32, INT64):
                return None
            within = allowed.within(to)
            return {} if within is None else {node.inputs[0]: within}
        if node.operator in ("Add", "Sub"):
            return self._shifted(node, allowed)
        return None

    def _shifted(self, node: Node, allowed: _Allowed) -> Mapping[str, _Allowed] | None:
        """Return the allowed values of the operand to which a node adds one number, unless some wrap around."""
        one, two = node.inputs
        for name, other in ((one, two), (two, one)):
            number, constant = self._number(other), self._constant(other)
            if number is None or constant is None or (node.operator == "Sub" and name != one):
                continue
            within, limits = allowed.within(constant.kind), np.iinfo(DType.from_onnx(constant.kind).numpy)
            if allowed.wraps(constant.kind):
                return None
            if within is None:
                return {}
            shift = number if node.operator == "Add" else -number
            low, high = within.low - shift, within.high - shift
            fits = limits.min <= low and high <= limits.max
            return {name: replace(within, low=low, high=high)} if fits else None
        return None

    def _number(self, name: str) -> int | None:
        """Return the integer that a constant consists of."""
        if name not in self._numbers:
            constant = self._constant(name)
            values = None if constant is None else constant.values
            found = [] if values is None or values.dtype.kind not in "iu" else np.unique(values).tolist()
            self._numbers[name] = found[0] if len(found) == 1 else None
        return self._numbers[name]

    def _functions(self) -> set[tuple[str, str]]:
        """Return the functions of the file that select, or call others that do."""
        callers: dict[tuple[str, str], set[tuple[str, str]]] = {}
        left, found = list[tuple[str, str]](), set[tuple[str, str]]()
        for name, function in self._model.functions.items():
            for node in _within(function):
                callers.setdefault(_kind(node), set()).add(name)
                if _is_indexed(node):
                    left.append(name)
        while left:
            name = left.pop()
            if name not in found:
                found.add(name)
                left += callers.get(name, ())
        return found

    def _hides(self, node: Node) -> bool:
        """Return whether the graphs or the function that a node runs select."""
        inner = [node, *(each for graph in node.graphs for each in _within(graph))]
        return any(_is_indexed(each) or _kind(each) in self._selecting for each in inner)

    def _selections(self, node: Node) -> Iterator[_Selection]:
        """Yield the selections of a node of the graph, if it selects."""
        inputs = node.inputs
        for ids, table in _ROWS.get(_kind(node), ()):
            if _has(node, ids):
                # A single position is that of the first element, so its limit depends on the length of the sequence.
                single = _kind(node) == _ROTARY and len(self._dims(inputs[ids]) or ()) != 2
                size = None if single else self._size(inputs[table], 0)
                yield _Selection(node, inputs[ids], inputs[table], size, negative=False)
        for place in _PLACES.get(_kind(node), ()):
            if _has(node, place):
                yield _Selection(node, inputs[place], "", None)
        if _kind(node) == ("", "OneHot"):
            depth = self._constant(inputs[1]) if self._lenient else None
            if depth is not None and (numbers := depth.numbers(1)):
                yield _Selection(node, inputs[0], "", int(numbers[0]))
        elif _kind(node) in _SELECTS:
            data, indices = inputs[:2]
            name = _AXES.get(node.operator, "axis")
            axis = node.attributes[name].integer if name in node.attributes else 0
            several = name == "batch_dims" and (self._dims(indices) or ())[-1:] != (1,)
            size = None if several else self._size(data, axis)
            yield _Selection(node, indices, data, size, negative=not self._may_be_fused(node))

    def _addends(self, node: Node) -> Sequence[str]:
        """Return the inputs of a node whose sum a normalization, also of its output, normalizes or may normalize."""
        kind = _kind(node)
        if kind in self._model.functions or (kind == _MEAN and node.inputs[0] in self._centred):
            return node.inputs
        normalized = not self._normalized.isdisjoint(node.outputs)
        return node.inputs[: max(_NORMALIZED.get(kind, 0), _SUMS.get(kind, 0) if normalized else 0)]

    def _may_be_fused(self, node: Node) -> bool:
        data, indices = node.inputs[:2]
        ranks = [len(dims) for dims in map(self._dims, (data, indices)) if dims is not None]
        return _kind(node) == _GATHER and {2}.issuperset(ranks) and not self._normalized.isdisjoint(node.outputs)

    def _constant(self, name: str) -> Constant | None:
        if name not in self._constants:
            node = self._makers.get(name)
            value = None if node is None or _kind(node) != _CONSTANT else node.attributes.get("value")
            made = None if value is None else value.tensor
            self._constants[name] = self._graph.constants.get(name) if node is None else made
        return self._constants[name]

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
            if node is None or _kind(node) not in _SIZED or _kind(node) in self._model.functions:
                return None
            name = node.inputs[0]
        return None


def _has(node: Node, place: int) -> bool:
    return place < len(node.inputs) and bool(node.inputs[place])


def _kind(node: Node) -> tuple[str, str]:
    return node.domain, node.operator


def _makes_flags(node: Node) -> bool:
    """Return whether the outputs are 0 or 1."""
    to = node.attributes.get("to") if node.operator == "Cast" else None
    return node.operator in _FLAGS or (to is not None and to.integer == DType.BOOL.onnx)


def _is_indexed(node: Node) -> bool:
    return any(_kind(node) in known for known in (_SELECTS, _ROWS, _PLACES))


def _within(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph and of the graphs in it."""
    for node in graph.nodes:
        yield node
        for inner in node.graphs:
            yield from _within(inner)


def _reads(node: Node) -> set[str]:
    """Return the tensors that a node and its graphs read; they may have tensors of the same names inside."""
    found = set(node.inputs)
    for graph in node.graphs:
        inner = set(graph.outputs).union(*map(_reads, graph.nodes))
        found |= inner.difference(graph.inputs, graph.constants, *(each.outputs for each in graph.nodes))
    return found - {""}
