"""The external files that an ONNX graph names, found in the encoded graph without the onnx package.

Engines open the files named in the ``external_data`` of a graph's tensors, so every graph is checked before it is
pushed or served. Engines differ in which tensors they read, so every tensor counts, wherever it is, and even if a later
field replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ingot.bounds.protobuf import DamagedError, Span, Value, fields
from ingot.errors import InvalidArchive

MAX_DEPTH = 100  # nested messages; protobuf itself reads no more
MAX_FIELDS = 5_000_000  # bounds the work to a few seconds
# No other key names files, and strings are contiguous: a message without these bytes names no file.
_KEY = b"location"


@dataclass
class Message:
    """The fields of a message by number: messages that may contain tensors, and others."""

    name: str
    others: frozenset[int]
    messages: dict[int, Message] = field(default_factory=dict)


# As in https://github.com/onnx/onnx/blob/main/onnx/onnx.proto; a test compares them with the onnx package.
ENTRY = Message("StringStringEntryProto", frozenset({1, 2}))
_TENSOR = Message("TensorProto", frozenset({*range(1, 13), 14, 16}), {13: ENTRY})
_SPARSE = Message("SparseTensorProto", frozenset({3}), {1: _TENSOR, 2: _TENSOR})
_ATTRIBUTE = Message("AttributeProto", frozenset({1, 2, 3, 4, 7, 8, 9, 13, 14, 15, 20, 21}))
_NODE = Message("NodeProto", frozenset({1, 2, 3, 4, 6, 7, 8, 9, 10}), {5: _ATTRIBUTE})
_GRAPH = Message("GraphProto", frozenset({2, 10, 11, 12, 13, 14, 16}), {1: _NODE, 5: _TENSOR, 15: _SPARSE})
_ATTRIBUTE.messages.update({5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH, 22: _SPARSE, 23: _SPARSE})
_FUNCTION = Message("FunctionProto", frozenset({1, 4, 5, 6, 8, 9, 10, 12, 13, 14}), {7: _NODE, 11: _ATTRIBUTE})
_TRAINING = Message("TrainingInfoProto", frozenset({3, 4}), {1: _GRAPH, 2: _GRAPH})
MODEL = Message("ModelProto", frozenset({1, 2, 3, 4, 5, 6, 8, 14, 26}), {7: _GRAPH, 20: _TRAINING, 25: _FUNCTION})


def locations(graph: bytes) -> tuple[bytes, ...]:
    """Return the distinct ``location`` values in the external data of a model's tensors. No file is opened.

    Parts that name no file are skipped, so a graph that is damaged elsewhere passes.

    Args:
        graph: the encoded ``ModelProto``.

    Raises:
        InvalidArchive: where files are named, it is damaged, too complex, or has fields that ONNX does not define.
    """
    walk = _Walk(graph)
    try:
        walk.message(MODEL, (0, len(graph)), 1)
    except DamagedError as error:
        raise InvalidArchive(str(error)) from error
    return tuple(walk.found)


class _Walk:
    """One pass over a graph, from its first byte to the last that names a file. Irrelevant parts are skipped."""

    def __init__(self, graph: bytes):
        self.found: dict[bytes, None] = {}
        self._graph = graph
        self._key = -1  # position of the next key, if known
        self._fields = 0

    def message(self, kind: Message, span: Span, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise InvalidArchive(f"it has more than {MAX_DEPTH} nested messages")
        if not self._names_file(*span):
            return
        for number, value in self._read(span):
            if isinstance(value, tuple):
                if self._names_file(*value):
                    self._inner(kind, number, value, depth)
                if not self._names_file(value[1], span[1]):
                    return

    def _inner(self, kind: Message, number: int, span: Span, depth: int) -> None:
        inner = kind.messages.get(number)
        if inner is ENTRY:
            self._entry(span)
        elif inner is not None:
            self.message(inner, span, depth + 1)
        elif number not in kind.others:
            raise InvalidArchive(
                f"field {number} of a {kind.name}, at byte {span[0]}, is unknown to this version of Ingot, "
                "and may name files; update Ingot, or remove the field"
            )

    def _entry(self, span: Span) -> None:
        # Either field may occur repeatedly, and parsers differ in which one counts: collect all.
        texts: dict[int, list[bytes]] = {1: [], 2: []}
        for number, value in self._read(span):
            if isinstance(value, tuple) and number in texts:
                texts[number].append(self._graph[slice(*value)])
        if _KEY in texts[1]:
            self.found.update(dict.fromkeys(texts[2] or [b""]))

    def _read(self, span: Span) -> Iterator[tuple[int, Value]]:
        for number, value in fields(self._graph, span):
            self._fields += 1
            if self._fields > MAX_FIELDS:
                raise InvalidArchive(f"it has more than {MAX_FIELDS} fields before the last file name")
            yield number, value

    def _names_file(self, start: int, end: int) -> bool:
        """Return whether the key occurs in a range. ``start`` never decreases, so the graph is searched once."""
        if self._key < start:
            found = self._graph.find(_KEY, start)
            self._key = len(self._graph) if found < 0 else found
        return self._key + len(_KEY) <= end
