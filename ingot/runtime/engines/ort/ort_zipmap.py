"""Removing ZipMap from a graph: skl2onnx returns probabilities as a list of maps instead of a tensor."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_TEXT, _MESSAGE, _INT, _BYTES = (
    descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE,
    descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
)
# The required fields of ONNX: name, number, type, and whether repeated. All others are preserved unread.
_FIELDS: dict[str, tuple[tuple[str, int, int | str, bool], ...]] = {
    "Dim": (("value", 1, _INT, False),),
    "Shape": (("dim", 1, "Dim", True),),
    "Tensor": (("elem_type", 1, _INT, False), ("shape", 2, "Shape", False)),
    "Type": (("tensor", 1, "Tensor", False),),
    "Value": (("name", 1, _TEXT, False), ("type", 2, "Type", False)),
    "Attribute": (("ints", 8, _INT, True), ("strings", 9, _BYTES, True)),
    "Node": (
        ("input", 1, _TEXT, True),
        ("output", 2, _TEXT, True),
        ("op_type", 4, _TEXT, False),
        ("attribute", 5, "Attribute", True),
    ),
    "Graph": (("node", 1, "Node", True), ("output", 12, "Value", True)),
    "Model": (("graph", 7, "Graph", False),),
}
_FLOAT = 1


@dataclass(frozen=True)
class Cut:
    """A serialized graph without ZipMap, and the tensors that replace the removed outputs, by output name."""

    graph: bytes
    tensors: dict[str, str]

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"the output '{name}' was a list of maps (ZipMap), which is not a tensor: the model returns the tensor "
            f"'{tensor}' instead, with one column per class"
            for name, tensor in self.tensors.items()
        )


def cut(path: Path) -> Cut | None:
    """Return a file's graph with tensors in place of the outputs of ZipMap; None if it has none."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(b"ZipMap") < 0:
                return None
        model: Any = _model().FromString(file.read())
    makers = {node.output[0]: node for node in model.graph.node if node.op_type == "ZipMap" and node.output}
    given = {output.name for output in model.graph.output}
    tensors: dict[str, str] = {}
    for output in [output for output in model.graph.output if output.name in makers]:
        node = makers[output.name]
        tensors[output.name] = node.input[0]
        model.graph.node.remove(node)
        if node.input[0] in given:
            model.graph.output.remove(output)
            continue
        classes = max((len(item.ints) + len(item.strings) for item in node.attribute), default=0)
        output.Clear()
        output.name = node.input[0]
        output.type.tensor.elem_type = _FLOAT
        output.type.tensor.shape.dim.add()
        output.type.tensor.shape.dim.add(**({"value": classes} if classes else {}))
    return Cut(model.SerializeToString(), tensors) if tensors else None


def _model() -> Any:
    """Return the message class of models, reduced to the fields needed here."""
    file = descriptor_pb2.FileDescriptorProto(name="ingot_zipmap.proto", package="ingot_zipmap", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, many in fields:
            label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED if many else 1
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.type, made.type_name = _MESSAGE, f".ingot_zipmap.{kind}"
            else:
                made.type = kind  # type: ignore[assignment]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ingot_zipmap.Model"))
