"""Writing half precision, or its roundings, into an ONNX graph."""

from __future__ import annotations

import contextlib
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from ingot.quant.graph.layers import constant, tensor
from ingot.quant.schemes import edit
from ingot.tensors import Array


def is_float32(value: ir.Value | None) -> bool:
    """Return whether a value, constant or not, is known to be in float32."""
    if value is None:
        return False
    return (value.const_value.dtype if value.const_value is not None else value.dtype) == ir.DataType.FLOAT


def rounded(held: ir.TensorProtocol, dtype: ir.DataType, name: str, *, back: bool = False) -> ir.TensorProtocol:
    """Return a tensor in half precision, or in its own type with ``back``, computed on each read."""

    def make() -> ir.TensorProtocol:
        array: Array = held.numpy().astype(dtype.numpy())
        release(held)
        return ir.Tensor(array.astype(np.float32) if back else array, dtype=held.dtype if back else dtype, name=name)

    return ir.LazyTensor(make, held.dtype if back else dtype, ir.Shape(held.shape.numpy()), name=name)


def release(held: ir.TensorProtocol) -> None:
    """Release the file of a tensor, so that only one is in memory at a time; it is opened again when needed."""
    if isinstance(held, ir.ExternalTensor):
        with contextlib.suppress(BufferError):  # another thread reads it
            held.release()


class Names:
    """The names that a model's values have, subgraphs' included."""

    def __init__(self, model: ir.Model):
        self._taken: set[str] = set()
        for graph in (model.graph, *model.graph.subgraphs()):
            self._taken.update(value.name or "" for value in (*graph.inputs, *graph.initializers.values()))
            self._taken.update(value.name or "" for node in graph for value in node.outputs)

    def new(self, name: str) -> str:
        """Reserve and return a name like this one that is not in use."""
        unique, count = name, 1
        while unique in self._taken:
            count += 1
            unique = f"{name}_{count}"
        self._taken.add(unique)
        return unique


def take_place(graph: ir.Graph, value: ir.Value, dtype: ir.DataType, names: Names, *, back: bool = False) -> ir.Value:
    """Add a constant rounded to ``dtype`` under the name of ``value``, by which users know it, and remove that.

    With ``back``, it is of the type that it was.
    """
    name = value.name or "weight"
    graph.initializers.pop(name)
    value.name = names.new(f"{name}_unrounded")
    return _register(graph, rounded(tensor(value), dtype, name, back=back))


def _register(graph: ir.Graph, held: ir.TensorProtocol) -> ir.Value:
    shape = ir.Shape(held.shape.numpy())
    value = ir.Value(name=held.name, shape=shape, type=ir.TensorType(held.dtype), const_value=held)
    graph.register_initializer(value)
    return value


class Writer:
    """Writes half precision into a graph.

    Args:
        model: the model, whose nodes are changed in the order of the graph.
        dtype: the half precision.
        chosen: the nodes that compute in it.
        moving: the operators that only move elements.
    """

    def __init__(self, model: ir.Model, dtype: ir.DataType, chosen: Collection[ir.Node], moving: Collection[str] = ()):
        self._graph = model.graph
        self._dtype = dtype
        self._chosen = set(chosen)
        self._moving = moving
        self._names = Names(model)
        self._halves: dict[ir.Value, ir.Value] = {}

    def write(self) -> None:
        for node in list(self._graph):
            if node not in self._chosen:
                continue
            for place, value in enumerate(node.inputs):
                if value is not None and is_float32(value):
                    node.replace_input_with(place, self._half(value))
            for value in node.outputs:
                if is_float32(value):
                    self._give(node, value)

    def _half(self, value: ir.Value) -> ir.Value:
        """Return a value in half precision, converted once."""
        if value not in self._halves:
            self._halves[value] = self._constant(value) if constant(value) else self._narrow(value)
        return self._halves[value]

    def _constant(self, value: ir.Value) -> ir.Value:
        if self._is_own(value):
            return take_place(self._graph, value, self._dtype, self._names)
        return self._narrow(value)  # another node reads it in float32: it is stored once, and cast when it is loaded

    def _is_own(self, value: ir.Value) -> bool:
        """Return whether no node needs a value in float32."""
        return not value.is_graph_output() and all(user in self._chosen for user, _ in value.uses())

    def _narrow(self, value: ir.Value) -> ir.Value:
        return self._cast(value, self._dtype, f"{value.name}_half")

    def _give(self, node: ir.Node, value: ir.Value) -> None:
        """Convert ``value`` to half precision, with a cast to float32 for nodes that still need that."""
        value.type = ir.TensorType(self._dtype)
        users = [(user, place) for user, place in value.uses() if user not in self._chosen]
        if users or value.is_graph_output():
            self._replace(value, self._cast(value, ir.DataType.FLOAT, f"{value.name}_float"), users)

    def _replace(self, value: ir.Value, other: ir.Value, users: Collection[tuple[ir.Node, int]]) -> None:
        """Replace ``value`` by ``other`` in nodes and in the graph's outputs, which keep their names."""
        for user, place in users:
            user.replace_input_with(place, other)
        for index, output in enumerate(self._graph.outputs):
            if output is value:
                name = value.name or ""
                if other.name != name:
                    value.name, other.name = self._names.new(f"{name}_half"), name
                self._graph.outputs[index] = other

    def _cast(self, value: ir.Value, dtype: ir.DataType, name: str) -> ir.Value:
        operation = edit.Operation("Cast", (value,), self._names.new(name), dtype, attributes={"to": int(dtype)})
        return edit.insert_after(self._graph, value, operation)


class Emulator(Writer):
    """Writes the roundings of half precision into a graph that stays in float32."""

    def _constant(self, value: ir.Value) -> ir.Value:
        if self._is_own(value):
            return take_place(self._graph, value, self._dtype, self._names, back=True)
        return self._narrow(value)

    def _narrow(self, value: ir.Value) -> ir.Value:
        return self._cast(super()._narrow(value), ir.DataType.FLOAT, f"{value.name}_rounded")

    def _give(self, node: ir.Node, value: ir.Value) -> None:
        if node.op_type in self._moving:  # their inputs are rounded already
            self._halves[value] = value
            return
        users = list(value.uses())
        rounded = self._narrow(value)
        self._halves[rounded] = rounded
        self._replace(value, rounded, users)
