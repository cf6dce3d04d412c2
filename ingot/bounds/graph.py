"""Reading an ONNX graph without the onnx package, which servers do not need, and without reading its weights.

The numbers of fields are those of https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from math import isfinite, prod
from pathlib import Path
from typing import Any

import numpy as np

from ingot.bounds import protobuf
from ingot.bounds.protobuf import Buffer, DamagedError, Span, Value
from ingot.errors import InvalidArgument
from ingot.tensors import DType, dim_name

MAX_NODES = 200_000
"""Nodes of a file that are read; larger graphs are refused."""
_MAX_DEPTH = 64
# Values of constants are read up to this many bytes; larger ones are weights.
_MAX_CONSTANT = 1 << 20
_EXTERNAL = 1
_WITH_GRAPHS = ("If", "Loop", "Scan", "SequenceMap")


@dataclass(frozen=True)
class Constant:
    """A tensor of the file: ``kind`` is its ONNX element type, ``values`` its numbers if they are few and inline.

    ``longest`` are the bytes of its longest text; None if it has none, or they are not known.
    """

    kind: int
    dims: tuple[int, ...]
    values: np.ndarray[tuple[int], np.dtype[np.generic]] | None = None
    longest: int | None = None

    def numbers(self, most: int) -> list[Fraction] | None:
        """Return the values if there are at most ``most`` and all are finite, otherwise None."""
        if self.values is None or self.values.size > most:
            return None
        found = self.values.tolist()
        return [Fraction(value) for value in found] if all(isfinite(value) for value in found) else None


class Attribute:
    """An attribute of a node. Its values are decoded on first use, as those of tree ensembles are large."""

    def __init__(self, content: Buffer, span: Span):
        self.name = _first_name(content, span)
        self._content = content
        self._span = span
        self._graph: Graph | None = None

    @cached_property
    def _fields(self) -> Mapping[int, list[Value]]:
        found: dict[int, list[Value]] = {}
        for number, value in protobuf.fields(self._content, self._span):
            found.setdefault(number, []).append(value)
        if len(found.get(1, ())) > 1:
            raise DamagedError(f"its attribute '{self.name}' has two names")
        return found

    def check(self) -> None:
        """Read all fields.

        Raises:
            DamagedError: it has two names, of which others would read the last.
        """
        self._fields  # noqa: B018 - it checks

    @cached_property
    def reference(self) -> str:
        """The attribute of the function's caller that this one stands for, or empty."""
        return self._text(21)

    @property
    def text(self) -> str:
        return self._text(4)

    @property
    def number(self) -> float:
        """The value of a floating-point attribute."""
        found = self._last(2, bytes)
        return struct.unpack("<f", found)[0] if found is not None and len(found) == 4 else 0.0

    @property
    def integer(self) -> int:
        return protobuf.signed(self._last(3, int) or 0)

    @cached_property
    def integers(self) -> list[int]:
        found: list[int] = []
        for value in self._fields.get(8, ()):
            found += protobuf.integers(self._content, value)
        return found

    @property
    def numbers(self) -> list[float]:
        """The values of a list of floating-point numbers."""
        values = [value for value in self._fields.get(7, ()) if not isinstance(value, int)]
        raw = b"".join(value if isinstance(value, bytes) else self._content[value[0] : value[1]] for value in values)
        found: list[float] = np.frombuffer(raw, "<f4").tolist()
        return found

    @property
    def strings(self) -> int:
        """The number of strings."""
        return len(self._fields.get(9, ()))

    @property
    def longest(self) -> int:
        """The bytes of the longest of its strings; 0 if it has none."""
        return _longest([*self._fields.get(4, ()), *self._fields.get(9, ())])

    @property
    def kind(self) -> int:
        """The number of its type in ``onnx.AttributeProto.AttributeType``; 0 if the file does not state it."""
        return int(self._last(20, int) or 0)

    @property
    def tensor(self) -> Constant | None:
        span = self._last(5, tuple)
        return None if span is None else _constant(self._content, span)[1]

    def graph(self, depth: int) -> Graph | None:
        if self._graph is None and (span := self._last(6, tuple)) is not None:
            self._graph = _graph(self._content, span, depth)
        return self._graph

    @property
    def holds_graph(self) -> bool:
        return 6 in self._fields

    def _last(self, number: int, kind: type) -> Any:
        found = [value for value in self._fields.get(number, ()) if isinstance(value, kind)]
        if len(found) > 1 and number in (5, 6):
            raise DamagedError(f"its attribute '{self.name}' has two values")  # which protobuf would merge
        return found[-1] if found else None

    def _text(self, number: int) -> str:
        span = self._last(number, tuple)
        return "" if span is None else protobuf.text(self._content, span)


@dataclass(frozen=True)
class Node:
    """One operator of a graph. An omitted input or output has an empty name."""

    operator: str
    name: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]
    depth: int

    def __str__(self) -> str:
        kind = f"{self.domain}.{self.operator}" if self.domain else self.operator
        return f"node '{self.name or (self.outputs[0] if self.outputs else '')}' ({kind})"

    @property
    def graphs(self) -> list[Graph]:
        """The graphs of all attributes; only operators of control flow have any."""
        if self.operator not in _WITH_GRAPHS:
            return []
        found = [attribute.graph(self.depth + 1) for attribute in self.attributes.values() if attribute.holds_graph]
        return [graph for graph in found if graph is not None]

    def graph(self, name: str) -> Graph | None:
        """Return the graph that an attribute holds, such as a loop's ``body``."""
        return self.attributes[name].graph(self.depth + 1) if name in self.attributes else None


@dataclass(frozen=True)
class Graph:
    """Nodes in the order in which they run, and the names of inputs and outputs.

    Of a function also the version of ONNX's operators in it, 0 if it names none, and the defaults of its attributes.
    """

    nodes: Sequence[Node]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Constant] = field(default_factory=dict)
    opset: int = 0
    defaults: Mapping[str, Attribute] = field(default_factory=dict)
    types: Callable[[], Mapping[str, Input]] = dict
    """Reads the types of the values that the file describes: its inputs, outputs, and results of nodes."""


@dataclass(frozen=True)
class Input:
    """An input of a model: its name, its ONNX element type, 0 unless it is a tensor, and its sizes or their names.

    Other values are described by the same. ``ranked`` is false if the file states no sizes.
    """

    name: str
    kind: int
    dims: tuple[int | str, ...]
    ranked: bool = True


@dataclass(frozen=True)
class Model:
    """A graph, the functions of the file by domain and name, the version of ONNX's operators, and the inputs."""

    graph: Graph
    functions: Mapping[tuple[str, str], Graph]
    opset: int
    inputs: Sequence[Input]


@contextmanager
def opened(path: Path) -> Iterator[Model]:
    """Read a file's graph. Attributes are read from the file when they are used, so within the ``with`` block.

    Raises:
        DamagedError: it is not an encoded ONNX model, or too large to be analysed.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise DamagedError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield _model(content, (0, len(content)))


def read(content: bytes) -> Model:
    """Read the graph of an encoded model.

    Raises:
        DamagedError: it is not an encoded ONNX model, or too large to be analysed.
    """
    return _model(content, (0, len(content)))


def _model(content: Buffer, whole: Span) -> Model:
    graph, opset, inputs = Graph((), (), ()), 0, list[Input]()
    functions: dict[tuple[str, str], Graph] = {}
    for number, value in protobuf.fields(content, whole):
        if not isinstance(value, tuple):
            continue
        if number == 7:
            if graph.outputs or graph.nodes:
                raise DamagedError("it has two graphs")  # which protobuf would merge
            graph = _graph(content, value, 0)
            inputs = [_input(content, span) for number, span in protobuf.messages(content, value) if number == 11]
        elif number == 8:
            opset = _standard_opset(content, value, opset)
        elif number == 25:
            key, function = _function(content, value)
            if functions.setdefault(key, function) is not function:
                raise DamagedError(f"its function '{key[1]}' is defined twice")
    return Model(graph, functions, opset or 1, [item for item in inputs if item.name not in graph.constants])


def _graph(content: Buffer, span: Span, depth: int) -> Graph:
    if depth > _MAX_DEPTH:
        raise DamagedError(f"its graphs are nested more than {_MAX_DEPTH} deep")
    nodes: list[Node] = []
    inputs: list[str] = []
    outputs: list[str] = []
    constants: dict[str, Constant] = {}
    described: list[Span] = []
    for number, value in protobuf.fields(content, span):
        if not isinstance(value, tuple):
            continue
        if number == 1:
            nodes.append(_node(content, value, depth))
            if len(nodes) > MAX_NODES:
                raise DamagedError(f"it has more than {MAX_NODES} nodes")
        elif number == 5:
            name, constant = _constant(content, value)
            if constants.setdefault(name, constant) is not constant:
                raise DamagedError(f"its constant '{name}' is defined twice")
        elif number == 15:
            name, constant = _sparse(content, value)
            if constants.setdefault(name, constant) is not constant:
                raise DamagedError(f"its constant '{name}' is defined twice")
        elif number in (11, 12):
            (inputs if number == 11 else outputs).append(_name(content, value))
        if number in (11, 12, 13):
            described.append(value)
    types = partial(_types, content, described)
    return Graph(nodes, tuple(inputs), tuple(outputs), constants, types=types)


def _types(content: Buffer, described: Sequence[Span]) -> Mapping[str, Input]:
    return {item.name: item for item in (_input(content, span) for span in described)}


def _input(content: Buffer, span: Span) -> Input:
    name, kind, dims = _name(content, span), 0, list[int | str]()
    types = [type_ for number, type_ in protobuf.messages(content, span) if number == 2]
    tensors = [tensor for type_ in types for number, tensor in protobuf.messages(content, type_) if number == 1]
    shapes = [shape for tensor in tensors for number, shape in protobuf.messages(content, tensor) if number == 2]
    if max(len(types), len(tensors), len(shapes)) > 1:
        raise DamagedError(f"its input '{name}' has two types")  # which protobuf would merge
    for tensor in tensors:
        kinds = [value for number, value in protobuf.fields(content, tensor) if number == 1]
        kind = next((value for value in kinds if isinstance(value, int)), 0)
    for shape in shapes:
        found = [dim for number, dim in protobuf.messages(content, shape) if number == 1]
        dims = [_dim(content, dim, name, axis) for axis, dim in enumerate(found)]
    return Input(name, kind, tuple(dims), bool(shapes))


def _dim(content: Buffer, span: Span, tensor: str, axis: int) -> int | str:
    declared: str | None = None
    for number, value in protobuf.fields(content, span):
        if number == 1 and isinstance(value, int) and protobuf.signed(value) >= 0:
            return value
        if number == 2 and isinstance(value, tuple):
            declared = protobuf.text(content, value)
    return dim_name(tensor, axis, declared)


def _function(content: Buffer, span: Span) -> tuple[tuple[str, str], Graph]:
    nodes, texts, opset = [], {1: "", 10: ""}, 0
    inputs: list[str] = []
    outputs: list[str] = []
    defaults: dict[str, Attribute] = {}
    for number, value in protobuf.fields(content, span):
        if not isinstance(value, tuple):
            continue
        if number == 7:
            nodes.append(_node(content, value, 0))
        elif number in (4, 5):
            (inputs if number == 4 else outputs).append(protobuf.text(content, value))
        elif number == 9:
            opset = _standard_opset(content, value, opset)
        elif number == 11:
            attribute = Attribute(content, value)
            defaults[attribute.name] = attribute
        elif number in texts:
            texts[number] = protobuf.text(content, value)
    return (texts[10], texts[1]), Graph(nodes, tuple(inputs), tuple(outputs), opset=opset, defaults=defaults)


def _node(content: Buffer, span: Span, depth: int) -> Node:
    inputs: list[str] = []
    outputs: list[str] = []
    texts = {3: "", 4: "", 7: ""}
    attributes: dict[str, Attribute] = {}
    for number, value in protobuf.fields(content, span):
        if not isinstance(value, tuple):
            continue
        if number in (1, 2):
            (inputs if number == 1 else outputs).append(protobuf.text(content, value))
        elif number == 5:
            attribute = Attribute(content, value)
            if attribute.name in attributes:
                raise DamagedError(f"a node has the attribute '{attribute.name}' twice")
            attributes[attribute.name] = attribute
        elif number in texts:
            texts[number] = protobuf.text(content, value)
    domain = "" if texts[7] == "ai.onnx" else texts[7]
    if domain != "ai.onnx.ml":  # whose lists may have millions of numbers
        for attribute in attributes.values():
            attribute.check()
    return Node(texts[4], texts[3], domain, tuple(inputs), tuple(outputs), attributes, depth)


def _constant(content: Buffer, span: Span) -> tuple[str, Constant]:
    name, kind, dims = "", 0, list[int]()
    raw: Span | None = None
    listed: dict[int, list[Value]] = {}
    texts: list[Value] = []
    external = False
    for number, value in protobuf.fields(content, span):
        if number == 1:
            dims += protobuf.integers(content, value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number == 8 and isinstance(value, tuple):
            name = protobuf.text(content, value)
        elif number == 6:
            texts.append(value)
        elif number == 9 and isinstance(value, tuple):
            raw = value
        elif number == 14:
            external = value == _EXTERNAL
        elif number in (4, 5, 7, 10, 11):
            listed.setdefault(number, []).append(value)
    values = None if external else _values(content, kind, raw, listed)
    if kind >> 31:
        raise DamagedError(f"its constant '{name}' has an unknown datatype")
    if any(dim < 0 for dim in dims) or (values is not None and values.size != prod(dims)):
        raise DamagedError(f"the shape of its constant '{name}' does not fit its values")
    longest = _longest(texts) if kind == DType.BYTES.onnx and len(texts) == prod(dims) else None
    return name, Constant(kind, tuple(dims), values, longest)


def _longest(texts: Sequence[Value]) -> int:
    """Return the bytes of the longest text."""
    return max((text[1] - text[0] for text in texts if isinstance(text, tuple)), default=0)


def _values(
    content: Buffer, kind: int, raw: Span | None, listed: Mapping[int, list[Value]]
) -> np.ndarray[tuple[int], np.dtype[np.generic]] | None:
    try:
        dtype = DType.from_onnx(kind)
    except InvalidArgument:
        return None
    if dtype is DType.BYTES or dtype in (DType.FP16, DType.BF16):
        return None
    if raw is not None:
        if raw[1] - raw[0] > _MAX_CONSTANT or (raw[1] - raw[0]) % dtype.numpy.itemsize:
            return None
        return np.frombuffer(content[raw[0] : raw[1]], dtype.numpy.newbyteorder("<"))
    found: list[float] = []
    for number, spans in listed.items():
        for span in spans:
            if isinstance(span, tuple) and span[1] - span[0] > _MAX_CONSTANT:
                return None
            if number in (4, 10) and not isinstance(span, int):
                raw_floats = span if isinstance(span, bytes) else content[span[0] : span[1]]
                found += np.frombuffer(raw_floats, "<f4" if number == 4 else "<f8").tolist()
            else:
                found += protobuf.integers(content, span)
    limits = None if dtype.is_float else np.iinfo(dtype.numpy) if dtype.is_integer else np.iinfo(np.uint8)
    if limits is not None and any(not limits.min <= value <= limits.max for value in found):
        return None
    return np.array(found, dtype.numpy)


def _sparse(content: Buffer, span: Span) -> tuple[str, Constant]:
    name, kind, dims = "", 0, list[int]()
    for number, value in protobuf.fields(content, span):
        if number == 1 and isinstance(value, tuple):
            name, values = _constant(content, value)
            kind = values.kind
        elif number == 3:
            dims += protobuf.integers(content, value)
    return name, Constant(kind, tuple(dims))


def _standard_opset(content: Buffer, span: Span, known: int) -> int:
    """Return the version of ONNX's own operators from an import of operators, or ``known`` if it is of others."""
    domain, version = "", 1
    for number, value in protobuf.fields(content, span):
        if number == 1 and isinstance(value, tuple):
            domain = protobuf.text(content, value)
        elif number == 2 and isinstance(value, int):
            version = value
    if domain not in ("", "ai.onnx"):
        return known
    if known and known != version:
        raise DamagedError(f"it imports two versions of ONNX's operators, {known} and {version}")
    return version


def _name(content: Buffer, span: Span) -> str:
    """Return the text of field 1 of an input or output."""
    found = [value for number, value in protobuf.messages(content, span) if number == 1]
    if len(found) > 1:
        raise DamagedError("an input or output has two names")
    return protobuf.text(content, found[0]) if found else ""


def _first_name(content: Buffer, span: Span) -> str:
    """Return the text of the first field 1, with which every writer begins, as lists of numbers may follow it."""
    for number, value in protobuf.fields(content, span):
        if number == 1 and isinstance(value, tuple):
            return protobuf.text(content, value)
    return ""
