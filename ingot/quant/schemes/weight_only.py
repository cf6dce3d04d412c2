"""Weight-only quantization: smaller weights, unchanged activations. It needs no data.

Matrix products become ONNX Runtime's MatMulNBits, with one scale for each block of weights along the contracted axis;
embeddings are stored in 8 bits with one scale per row. Weights are rounded one by one when the model is packed,
so a model may be larger than half of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ingot.quant.graph.layers import Layer, integer, tensor, weights
from ingot.quant.schemes import edit
from ingot.quant.schemes.edit import Operation
from ingot.quant.schemes.rounding import as_kept
from ingot.tensors import Array

# Smaller embeddings, such as those of two segment types, are not worth their rounding error.
_TABLE = 1 << 16
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def takes(layer: Layer, opset: int) -> bool:
    """Return whether a layer supports this scheme."""
    if layer.weight.dtype not in _FLOATS and tensor(layer.weight).dtype not in _FLOATS:
        return False
    if layer.operator == "Gemm":
        return (
            layer.number("alpha", 1.0) == 1 and layer.number("beta", 1.0) == 1 and not integer(layer.node, "transA", 0)
        )
    if layer.operator == "Gather":
        return opset >= 13 and layer.size >= _TABLE
    return layer.operator == "MatMul" and len(layer.shape) == 2


def apply(
    model: ir.Model, layers: Iterable[Layer], *, bits: int = 8, block: int = 128, integer_sums: bool = True
) -> None:
    """Quantize layers of a model in place; each is one that :func:`takes` accepts.

    Args:
        model: the model.
        layers: the layers to quantize; embeddings always get 8 bits.
        bits: 4 or 8.
        block: how many weights share a scale: a power of two, 16 or more.
        integer_sums: let the kernel round activations to 8 bits per block, which is faster and nearly as exact.
    """
    for layer in layers:
        if layer.operator == "Gather":
            _embedding(model, layer)
        else:
            _product(model, layer, bits, block, integer_sums)


def _product(model: ir.Model, layer: Layer, bits: int, block: int, integer_sums: bool) -> None:
    graph, base = model.graph, layer.weight.name or layer.name
    rows, columns = layer.shape if layer.axis == 1 else layer.shape[::-1]
    held, turned = layer.weight, layer.axis == 0
    kind = held.dtype or tensor(held).dtype
    blocks = -(-rows // block)

    def packed() -> tuple[Array, Array]:
        array = weights(held)
        return pack(array if turned else array.T, bits, block, kind)

    weight = edit.lazy(
        graph, f"{base}_int{bits}", lambda: packed()[0], ir.DataType.UINT8, (columns, blocks, block * bits // 8)
    )
    scale = edit.lazy(graph, f"{base}_scale", lambda: packed()[1].astype(kind.numpy()), kind, (columns, blocks))
    attributes = {"K": rows, "N": columns, "bits": bits, "block_size": block}
    if integer_sums:
        attributes["accuracy_level"] = 4
    operation = Operation(
        "MatMulNBits",
        (layer.data, weight, scale),
        f"{base}_product",
        layer.output.dtype,
        attributes=attributes,
        domain="com.microsoft",
    )
    model.opset_imports["com.microsoft"] = 1
    value = edit.insert_before(graph, layer.node, operation)
    bias = layer.node.inputs[2] if len(layer.node.inputs) > 2 else None
    if bias is not None:
        value = edit.insert_before(
            graph, layer.node, Operation("Add", (value, bias), f"{base}_sum", layer.output.dtype)
        )
    edit.replace(graph, layer.node, value)


def pack(array: Array, bits: int, block: int, kept: ir.DataType = ir.DataType.FLOAT) -> tuple[Array, Array]:
    """Return the integers and scales for MatMulNBits.

    Args:
        array: weights [columns, rows], the contracted axis last.
        bits: 4 or 8.
        block: how many weights along the contracted axis share a scale.
        kept: the type in which the scales will be stored.

    Returns:
        Unsigned integers around the middle of their range, [columns, blocks, block * bits / 8], two to a byte at 4
        bits; and scales [columns, blocks].
    """
    integers, scales = _blocks(array, bits, block, kept)
    packed: Array = (integers + (1 << (bits - 1))).astype(np.uint8)
    if bits == 4:
        packed = packed[..., 0::2] | (packed[..., 1::2] << 4)
    return packed, scales


def rounded(array: Array, bits: int, block: int) -> Array:
    """Return weights [columns, rows] after :func:`pack`, unpacked again."""
    integers, scales = _blocks(array, bits, block, ir.DataType.FLOAT)
    return np.asarray((integers * scales[..., None]).reshape(len(array), -1)[:, : array.shape[1]], np.float32)


def _blocks(array: Array, bits: int, block: int, kept: ir.DataType) -> tuple[Array, Array]:
    """Return integers around zero, [columns, blocks, block], and scales [columns, blocks]."""
    columns, rows = array.shape
    blocks = -(-rows // block)
    padded = np.zeros((columns, blocks * block), np.float32)
    padded[:, :rows] = array
    parts = padded.reshape(columns, blocks, block)
    middle = 1 << (bits - 1)
    # The sign of the largest weight decides its end of the integer range: there is one more integer below the middle.
    largest = np.take_along_axis(parts, np.abs(parts).argmax(axis=-1)[..., None], -1)[..., 0]
    scales = largest / -middle
    scales = as_kept(np.where(np.abs(scales) < 1e-12, 1e-12, scales), kept)
    return np.clip(np.rint(parts / scales[..., None]), -middle, middle - 1), scales


def _embedding(model: ir.Model, layer: Layer) -> None:
    """Look up rows of 8 bits and their scales, and multiply."""
    graph, base = model.graph, layer.weight.name or layer.name
    held, kind = layer.weight, layer.output.dtype or tensor(layer.weight).dtype
    rows, width = layer.shape

    def scales() -> Array:
        largest = np.abs(weights(held)).max(axis=1, keepdims=True)
        return as_kept(np.maximum(largest, 1e-12) / 127, kind)

    def integers() -> Array:
        return np.clip(np.rint(weights(held) / scales()), -127, 127).astype(np.int8)

    weight = edit.lazy(graph, f"{base}_int8", integers, ir.DataType.INT8, (rows, width))
    scale = edit.lazy(graph, f"{base}_scale", lambda: scales().astype(kind.numpy()), kind, (rows, 1))
    place, indices = layer.node, layer.data
    value = edit.insert_before(graph, place, Operation("Gather", (weight, indices), f"{base}_rows", ir.DataType.INT8))
    value = edit.insert_before(
        graph, place, Operation("Cast", (value,), f"{base}_cast", kind, attributes={"to": int(kind)})
    )
    factor = edit.insert_before(graph, place, Operation("Gather", (scale, indices), f"{base}_factor", kind))
    value = edit.insert_before(graph, place, Operation("Mul", (value, factor), f"{base}_result", kind))
    edit.replace(graph, layer.node, value)
