"""The layers of an ONNX graph: the nodes that have weights, which can be quantized."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import onnx_ir as ir

from ingot.errors import InvalidArgument
from ingot.tensors import Array

# The position of the weight, and its axis of output channels; None where an attribute or the rank decides.
_WEIGHTED: Mapping[str, tuple[int, int | None]] = {
    "Conv": (1, 0),
    "ConvTranspose": (1, 1),
    "MatMul": (1, -1),
    "Gemm": (1, None),
    "LSTM": (1, None),
    "Gather": (0, 0),
}
_QUANTIZED = frozenset(
    {
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "ConvInteger", "MatMulInteger", "QLinearConv"),
        *("QLinearMatMul", "QGemm", "QAttention", "MatMulNBits", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
    }
)


@dataclass
class Layer:
    """A node and its weight.

    Attributes:
        name: the user's name: the module's path if the exporter kept it, otherwise the node's name.
        operator: the ONNX operator.
        node: the node itself.
        weight: its constant weight.
        axis: the weight's axis of output channels.
    """

    name: str
    operator: str
    _: KW_ONLY
    node: ir.Node
    weight: ir.Value
    axis: int

    @property
    def data(self) -> ir.Value:
        """The layer's input activation; for an embedding, the indices."""
        value = self.node.inputs[1 if self.operator == "Gather" else 0]
        if value is None:
            raise ValueError(f"layer '{self.name}' has no input")
        return value

    @property
    def output(self) -> ir.Value:
        return self.node.outputs[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's."""
        return shape(self.weight)

    @property
    def size(self) -> int:
        """The number of weights."""
        return tensor(self.weight).size

    def number(self, name: str, default: float) -> float:
        """Return a floating-point attribute of the node."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.as_float()


def find(model: ir.Model) -> tuple[Layer, ...]:
    """Return the layers of a model's main graph in the order of the graph.

    Weights below 16 bits, of other than floating-point types, or without any value are not layers. A weight that two
    nodes share makes two layers.
    """
    found: list[Layer] = []
    names: dict[str, int] = {}
    for node in model.graph:
        layer = _layer(node)
        if layer is not None:
            count = names[layer.name] = names.get(layer.name, 0) + 1
            name = layer.name if count == 1 else f"{layer.name}#{count}"
            found.append(Layer(name, layer.operator, node=node, weight=layer.weight, axis=layer.axis))
    return tuple(found)


def has_double(model: ir.Model) -> bool:
    """Return whether a node's weight is in float64, which cannot be quantized."""
    for node in model.graph:
        place = _WEIGHTED[node.op_type][0] if node.op_type in _WEIGHTED else None
        weight = node.inputs[place] if place is not None and len(node.inputs) > place else None
        if weight is not None and weight.const_value is not None and weight.const_value.dtype == ir.DataType.DOUBLE:
            return True
    return False


def is_quantized(model: ir.Model) -> bool:
    """Return whether a graph already contains integer arithmetic or conversions to integers."""
    return any(node.op_type in _QUANTIZED for node in model.graph.all_nodes())


def choose(names: Sequence[str], wanted: Iterable[str]) -> tuple[str, ...]:
    """Select layers by name, or by a prefix that ends at a dot.

    Raises:
        InvalidArgument: a name matches none; the message lists the nearest.
    """
    chosen: list[str] = []
    for item in wanted:
        matching = [name for name in names if name == item or name.startswith(f"{item}.")]
        if not matching:
            near = difflib.get_close_matches(item, names, n=3, cutoff=0.3) or list(names)[:8]
            raise InvalidArgument(f"there is no layer '{item}' to keep; the nearest are: {', '.join(near)}")
        chosen += matching
    return tuple(dict.fromkeys(chosen))


def tensor(value: ir.Value) -> ir.TensorProtocol:
    """Return a constant's tensor."""
    if value.const_value is None:
        raise ValueError(f"'{value.name}' is not a constant")
    return value.const_value


def weights(value: ir.Value) -> Array:
    """Return a constant's values in float32, as a copy, so that mapped files do not stay in memory."""
    held = tensor(value)
    array = np.array(held.numpy(), np.float32)
    if isinstance(held, ir.ExternalTensor):
        held.release()
    return array


def shape(value: ir.Value) -> tuple[int, ...]:
    """Return a constant's shape."""
    return tuple(tensor(value).shape.numpy())


def constant(value: ir.Value | None) -> bool:
    """Return whether a value is a constant that no caller can override."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def _layer(node: ir.Node) -> Layer | None:
    if node.op_type not in _WEIGHTED or node.domain not in ("", "ai.onnx"):
        return None
    place, axis = _WEIGHTED[node.op_type]
    weight = node.inputs[place] if len(node.inputs) > place else None
    if weight is None or not constant(weight) or not is_float(weight):
        return None
    sizes = shape(weight)
    rank = len(sizes)
    if rank < 2 or 0 in sizes or (node.op_type == "Gather" and (rank != 2 or integer(node, "axis", 0) != 0)):
        return None
    if node.op_type == "Gemm":
        axis = 0 if integer(node, "transB", 0) else 1
    if axis is None:
        axis = 1
    return Layer(_name(node, weight), node.op_type, node=node, weight=weight, axis=axis % rank)


def is_float(value: ir.Value | None) -> bool:
    """Return whether a value is of a floating-point type of 32 or 16 bits."""
    if value is None:
        return False
    dtype = value.dtype or (value.const_value.dtype if value.const_value is not None else None)
    return dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def integer(node: ir.Node, name: str, default: int) -> int:
    """Return an integer attribute of a node."""
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


def _name(node: ir.Node, weight: ir.Value) -> str:
    """Return the module's path from a parameter's name: the weight's, or the bias's where the weight was folded."""
    parameters = [weight, *node.inputs[2:3]]
    users = [user for user, _ in node.outputs[0].uses()]
    if node.op_type == "MatMul" and len(users) == 1 and users[0].op_type == "Add":
        parameters += [value for value in users[0].inputs if constant(value)]
    for value in parameters:
        path, dot, last = (value.name or "" if value is not None else "").rpartition(".")
        if dot and last.startswith(("weight", "bias", "kernel")):
            return path
    return node.name or f"{node.op_type}_{node.outputs[0].name}"
