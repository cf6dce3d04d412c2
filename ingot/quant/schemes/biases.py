"""The biases of layers: fused with the products, corrected for rounding errors, and rounded."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ingot.quant.graph.layers import Layer, constant, integer, shape, tensor
from ingot.quant.schemes import edit
from ingot.quant.schemes.rounding import along
from ingot.tensors import Array

# The largest bias in integers, with a margin for rounding.
_LARGEST = 2**31 - 256


def fits(dims: tuple[int, ...], width: int) -> bool:
    """Return whether a constant of this shape adds the same number to each row of a channel."""
    return all(size == 1 for size in dims[:-1]) and dims[-1:] in ((), (1,), (width,))


def join(graph: ir.Graph, layer: Layer) -> None:
    """Join a product of two dimensions and the addition that is its only user into a Gemm."""
    node, product = layer.node, layer.output
    users = [user for user, _ in product.uses()]
    if (
        layer.operator != "MatMul"
        or layer.data.shape is None
        or len(layer.data.shape) != 2
        or product.is_graph_output()
        or [user.op_type for user in users] != ["Add"]
    ):
        return
    (addition,) = users
    bias = next((value for value in addition.inputs if value is not product), None)
    if bias is None or not constant(bias) or not fits(shape(bias), layer.shape[1]):
        return
    gemm = edit.Operation("Gemm", (layer.data, layer.weight, bias), node.name or layer.name, product.dtype)
    result = edit.insert_before(graph, addition, gemm)
    edit.replace(graph, addition, result)
    graph.remove(node, safe=True)
    made = result.producer()
    if made is not None:
        layer.operator, layer.node = "Gemm", made


def mean_error(array: Array, integers: Array, scales: Array, axis: int | None, mean: Array, layer: Layer) -> Array:
    """Return how much larger the rounded weights make each output channel on average."""
    by = scales if axis is None else along(scales, axis, array.ndim)
    error = integers * by - array
    if layer.operator != "Conv":
        return np.asarray(mean @ error if layer.axis == 1 else error @ mean)
    group = integer(layer.node, "group", 1)
    parts = error.reshape(group, len(error) // group, error.shape[1], -1).sum(axis=-1)  # [group, outputs, inputs]
    return np.asarray(np.einsum("goi,gi->go", parts, mean.reshape(group, -1))).reshape(-1)


def correct(graph: ir.Graph, layer: Layer, error: Array) -> None:
    """Subtract an error from a layer's bias, wherever it is added; a layer without a bias is unchanged."""
    node, place = layer.node, 2
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if layer.operator == "MatMul":
        users = [user for user, _ in layer.output.uses()]
        if len(users) == 1 and users[0].op_type == "Add":
            node = users[0]
            place = next((place for place, item in enumerate(node.inputs) if constant(item)), 0)
            bias = node.inputs[place]
    if bias is not None and constant(bias) and shape(bias)[-1:] == error.shape:
        array = tensor(bias).numpy()
        corrected = edit.constant(graph, bias.name or "bias", (array - error).astype(array.dtype))
        node.replace_input_with(place, corrected)


def least_scales(layer: Layer, axis: int | None) -> Array:
    """Return the smallest scales of a layer's weights at which its bias fits in 32 bits at the products' scale."""
    found = _constant(layer)
    if found is None:
        return np.zeros((), np.float32)
    bias, scale = found
    least = np.abs(tensor(bias).numpy().astype(np.float64)).reshape(-1) / scale / _LARGEST
    return np.asarray(least.max() if axis is None else least, np.float32)


def quantize(graph: ir.Graph, layer: Layer, scales: Array) -> None:
    """Quantize a bias to 32 bits at the scale of the products, as integer kernels need."""
    found = _constant(layer)
    if found is None:
        return
    bias, scale = found
    array = tensor(bias).numpy().astype(np.float64).reshape(-1)
    by = np.asarray(scales * np.float32(scale), np.float32)
    values = np.clip(np.rint(array / np.maximum(by, 1e-30)), -_LARGEST, _LARGEST).astype(np.int32)
    base = bias.name or f"{layer.name}.bias"
    inputs = (edit.constant(graph, f"{base}_int32", values), edit.constant(graph, f"{base}_scale", by))
    attributes = {"axis": 0} if by.ndim else {}
    operation = edit.Operation("DequantizeLinear", inputs, f"{base}_dequantized", bias.dtype, attributes=attributes)
    layer.node.replace_input_with(2, edit.insert_before(graph, layer.node, operation))


def _constant(layer: Layer) -> tuple[ir.Value, float] | None:
    """Return a layer's bias, if it can be quantized, and the scale of its input, which is quantized already.

    A bias in half precision is left: no CPU has integer kernels for it, and the scale would be too coarse.
    """
    bias = layer.node.inputs[2] if len(layer.node.inputs) > 2 else None
    pair = layer.data.producer()
    if bias is None or not constant(bias) or bias.dtype is not ir.DataType.FLOAT or pair is None:
        return None
    scale = pair.inputs[1]
    return None if scale is None else (bias, float(tensor(scale).numpy()))
