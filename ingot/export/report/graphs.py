"""Conversion of FX and ONNX graphs to the form of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import BuiltinFunctionType
from typing import Any

import onnx_ir as ir
from torch import fx

from ingot.export.explain import places
from ingot.export.program import user_path
from ingot.export.report import GraphView, Node


def of_fx(title: str, graph: fx.Graph) -> GraphView:
    """Show the operations of an FX graph."""
    return _view(title, (_fx_node(node) for node in graph.nodes if node.op in ("call_function", "call_module")))


def of_onnx(title: str, model: ir.Model) -> GraphView:
    """Show the nodes of an ONNX model, those of subgraphs included."""
    return _view(title, map(_onnx_node, model.graph.all_nodes()))


def _view(title: str, nodes: Iterable[Node]) -> GraphView:
    nodes = tuple(nodes)
    return GraphView(title=title, nodes=nodes, operators=dict(Counter(node.operator for node in nodes).most_common()))


def _fx_node(node: fx.Node) -> Node:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    value: Any = node.meta.get("val")
    place = places.of_node(node)
    return Node(
        name=node.name,
        operator=_target(node),
        inputs=tuple(item.name for item in node.all_input_nodes),
        shape=f"[{','.join(map(str, value.shape))}]" if hasattr(value, "shape") else "",
        module=user_path(str(stack[-1][0])) if stack else "",
        source=place.short if place is not None else "",
    )


def _target(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    is_python = isinstance(node.target, BuiltinFunctionType)
    return f"operator.{node.target.__name__}" if is_python else str(node.target)


def _onnx_node(node: ir.Node) -> Node:
    first = node.outputs[0] if node.outputs else None
    scopes = node.metadata_props.get("pkg.torch.onnx.name_scopes", "")
    parts = [part.strip(" '\"[]") for part in scopes.split(",")]
    return Node(
        name=(first.name if first is not None else node.name) or "",
        operator=f"{node.domain}::{node.op_type}" if node.domain else node.op_type,
        inputs=tuple(value.name or "" for value in node.inputs if value is not None),
        shape=str(first.shape) if first is not None and first.shape is not None else "",
        module=user_path(parts[-2]) if len(parts) > 1 else "",
    )
