"""Small edits of a graph that all schemes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from ingot.tensors import Array


@dataclass(frozen=True)
class Operation:
    """A node with one output, which is called ``name``."""

    operator: str
    inputs: tuple[ir.Value | None, ...]
    name: str
    dtype: ir.DataType | None
    _: KW_ONLY
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""

    def node(self) -> ir.Node:
        made = ir.node(self.operator, list(self.inputs), dict(self.attributes), domain=self.domain, name=self.name)
        made.outputs[0].name = self.name
        if self.dtype is not None:
            made.outputs[0].type = ir.TensorType(self.dtype)
        return made


def constant(graph: ir.Graph, name: str, array: Array, dtype: ir.DataType | None = None) -> ir.Value:
    """Add a constant under a name that is not taken, and return it."""
    array = np.asarray(array if dtype is None else array.astype(dtype.numpy()))
    unique, count = name, 1
    while unique in graph.initializers:
        count += 1
        unique = f"{name}_{count}"
    tensor = ir.Tensor(np.require(array, requirements="C"), name=unique)
    value = ir.Value(name=unique, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def insert_after(graph: ir.Graph, value: ir.Value, operation: Operation) -> ir.Value:
    """Add a node right after the one that computes ``value``, or at the start, and return its output.

    The output has the shape of ``value``.
    """
    made, producer = operation.node(), value.producer()
    if producer is None:
        graph.insert_before(graph[0], made)
    else:
        graph.insert_after(producer, made)
    made.outputs[0].shape = value.shape
    return made.outputs[0]


def insert_before(graph: ir.Graph, place: ir.Node, operation: Operation) -> ir.Value:
    """Add a node right before another, and return its output."""
    made = operation.node()
    graph.insert_before(place, made)
    return made.outputs[0]


def redirect(graph: ir.Graph, value: ir.Value, other: ir.Value, keep: ir.Node) -> None:
    """Replace ``value`` by ``other`` in all its users, the graph's outputs included, except in ``keep``."""
    for user, place in list(value.uses()):
        if user is not keep:
            user.replace_input_with(place, other)
    for index, output in enumerate(graph.outputs):
        if output is value:
            name = value.name
            value.name, other.name = f"{name}_float", name
            other.shape, other.type = value.shape, value.type
            graph.outputs[index] = other


def replace(graph: ir.Graph, node: ir.Node, result: ir.Value) -> None:
    """Replace a node's only output by ``result``, and remove the node."""
    output = node.outputs[0]
    name = output.name
    output.name = f"{name}_float"
    result.name, result.shape, result.type = name, output.shape, output.type
    ir.convenience.replace_all_uses_with(output, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def lazy(graph: ir.Graph, name: str, make: Callable[[], Array], dtype: ir.DataType, shape: tuple[int, ...]) -> ir.Value:
    """Add a constant whose values are computed when they are written, and not kept."""
    value = constant(graph, name, np.zeros(0, dtype.numpy()))
    unique = value.name or name
    value.const_value = ir.LazyTensor(
        lambda: ir.Tensor(np.require(make(), requirements="C"), name=unique),
        dtype=dtype,
        shape=ir.Shape(shape),
        cache=False,
        name=unique,
    )
    value.shape = ir.Shape(shape)
    return value


def unique_names(model: ir.Model) -> None:
    """Give each value and node a unique name; the graph's inputs and outputs keep theirs.

    Values that are written for two layers that share a weight have the weight's name.
    """
    NameFixPass(_Naming())(model)


class _Naming:
    """The names before a number is added."""

    def generate_node_name(self, node: ir.Node) -> str:
        return node.name or node.outputs[0].name or node.op_type

    def generate_value_name(self, value: ir.Value) -> str:
        return value.name or "value"
