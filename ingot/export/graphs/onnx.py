"""ONNX graphs in the form of the report, read without the onnx package and without weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ingot.bounds import graph as reader
from ingot.bounds.protobuf import DamagedError
from ingot.errors import InvalidArgument
from ingot.export.report import GraphView, Node
from ingot.report.text import one_line
from ingot.tensors import DType, dim_name

if TYPE_CHECKING:
    import onnx_ir as ir

_LONGEST_ATTRIBUTE = 80
_MOST_NUMBERS = 8
# Element types that no tensor of a request has; https://github.com/onnx/onnx/blob/main/onnx/onnx.proto.
_KINDS = {
    14: "complex64",
    15: "complex128",
    17: "float8e4m3fn",
    18: "float8e4m3fnuz",
    19: "float8e5m2",
    20: "float8e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4e2m1",
}


def of_model(title: str, model: ir.Model) -> GraphView:
    """Show a model whose large weights are outside its graph, with the modules that the exporter recorded."""
    import onnx_ir as ir

    modules = {node.outputs[0].name or "": _scope(node) for node in model.graph.all_nodes() if node.outputs}
    content = ir.serde.serialize_model(model).SerializeToString()
    try:
        return of_bytes(title, content, modules)
    except DamagedError:  # the report has a graph less; what it means for the model is decided elsewhere
        return GraphView(title=title, nodes=(), operators={})


def of_bytes(title: str, content: bytes, modules: Mapping[str, str] | None = None) -> GraphView:
    """Show an encoded model: its nodes, those of subgraphs before the node that runs them.

    Args:
        title: of the graph.
        content: the file.
        modules: the module of a node by its first result; nodes that it lacks have the module in their names, if any.

    Raises:
        DamagedError: it is not an ONNX model, or too large.
    """
    model = reader.read(content)
    walk = _Walk(modules or {})
    outputs = walk.graph(model.graph, "", {})
    return GraphView(
        title=title,
        nodes=tuple(walk.nodes),
        operators=dict(Counter(node.operator for node in walk.nodes).most_common()),
        inputs={item.name: "".join(_type(item)) for item in model.inputs},
        outputs=dict(zip(model.graph.outputs, outputs, strict=True)),
        weights=walk.weights,
    )


class _Walk:
    """Collects nodes and weights. Names in two branches may be equal, and are then made distinct."""

    def __init__(self, modules: Mapping[str, str]):
        self.nodes: list[Node] = []
        self.weights: dict[str, str] = {}
        self._modules = modules
        self._taken: set[str] = set()

    def graph(self, graph: reader.Graph, module: str, known: Mapping[str, str]) -> list[str]:
        """Add a graph, and return its outputs; ``known`` are the distinct names of values around it."""
        types = graph.types()
        names = dict(known)
        for name in graph.inputs:
            names[name] = self._distinct(name)
        for name, constant in graph.constants.items():
            names[name] = self._distinct(name)
            self.weights[names[name]] = _constant(constant)
        for node in graph.nodes:
            self._add(node, module, names, types)
        return [names.get(name, name) for name in graph.outputs]

    def _add(self, node: reader.Node, module: str, names: dict[str, str], types: Mapping[str, reader.Input]) -> None:
        first = next(filter(None, node.outputs), node.name)
        within = self._modules.get(first) or module or _of_name(node.name)
        inputs = [names.get(name, name) for name in node.inputs if name]
        for name, attribute in node.attributes.items():
            if node.graphs and (body := attribute.graph(node.depth + 1)) is not None:
                inner = f"{node.operator} {first}".replace(".", "_")
                inputs += self.graph(body, ".".join(filter(None, (within, inner, name))), names)
        for name in filter(None, node.outputs):
            names[name] = self._distinct(name)
        if node.operator == "Constant" and not node.domain and len(node.attributes) == 1:
            [value] = node.attributes.values()
            if value.tensor is not None:
                self.weights[names.get(first, first)] = _constant(value.tensor)
        dtype, shape = _type(types[first]) if first in types else ("", "")
        self.nodes.append(
            Node(
                name=names.get(first, first),
                operator=f"{node.domain}::{node.operator}" if node.domain else node.operator,
                inputs=tuple(inputs),
                shape=shape,
                module=within,
                dtype=dtype,
                more_outputs=tuple(names[name] for name in node.outputs if name and name != first),
                attributes={name: text for name, item in node.attributes.items() if (text := _text(item))},
            )
        )

    def _distinct(self, name: str) -> str:
        free, count = name, 1
        while free in self._taken:
            count += 1
            free = f"{name} ({count})"
        self._taken.add(free)
        return free


def _scope(node: ir.Node) -> str:
    from ingot.export.program import user_path

    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    parts = [part.strip(" '\"[]") for part in scopes.split(",")]
    module = user_path(parts[-2]) if len(parts) > 1 else ""
    return "" if module.startswith("_empty_nn_module_stack") else module


def _of_name(name: str) -> str:
    """Return the module in names such as ``/encoder/layer.0/attention/MatMul``, which older exporters wrote."""
    return ".".join(part for part in name.split("/")[1:-1] if part) if name.startswith("/") else ""


def _kind(kind: int) -> str:
    try:
        return DType.from_onnx(kind).torch_name
    except InvalidArgument:
        return _KINDS.get(kind, f"type {kind}")


def _type(item: reader.Input) -> tuple[str, str]:
    unnamed = (dim_name(item.name, axis, None) for axis in range(len(item.dims)))
    dims = ("?" if dim == other else str(dim) for dim, other in zip(item.dims, unnamed, strict=True))
    return (_kind(item.kind), f"[{','.join(dims)}]" if item.ranked else "") if item.kind else ("", "")


def _constant(constant: reader.Constant) -> str:
    return f"{_kind(constant.kind)}[{','.join(map(str, constant.dims))}]"


def _text(attribute: reader.Attribute) -> str:
    """Return an attribute's value as text, of a tensor its type; empty for a graph."""
    if attribute.reference:
        return f"@{one_line(attribute.reference, _LONGEST_ATTRIBUTE)}"
    match attribute.kind:
        case 1:
            return f"{attribute.number:g}"
        case 2:
            return str(attribute.integer)
        case 3:
            return one_line(attribute.text, _LONGEST_ATTRIBUTE)
        case 4:
            return _constant(attribute.tensor) if attribute.tensor is not None else ""
        case 6:
            return _numbers([f"{number:g}" for number in attribute.numbers[: _MOST_NUMBERS + 1]])
        case 7:
            return _numbers(list(map(str, attribute.integers[: _MOST_NUMBERS + 1])))
        case 8:
            return f"{attribute.strings} strings"
        case _:
            return ""


def _numbers(shown: list[str]) -> str:
    return f"[{', '.join(shown[:_MOST_NUMBERS])}{', ...' if len(shown) > _MOST_NUMBERS else ''}]"
