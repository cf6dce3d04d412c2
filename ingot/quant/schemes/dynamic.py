"""Dynamic quantization: activations in 8 bits with the range of each call, weights in 8 bits. It needs no data.

Matrix products become MatMulInteger, which ONNX Runtime fuses with the operators around it; LSTMs become its own
DynamicQuantizeLSTM. Its integer convolution with dynamic ranges is slower than floats, so convolutions are unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ingot.quant.graph.layers import Layer, constant, integer, weights
from ingot.quant.schemes import edit
from ingot.quant.schemes.edit import Operation
from ingot.quant.schemes.rounding import along, channel_scales, to_int8

_FLOAT = ir.DataType.FLOAT


def takes(layer: Layer, opset: int) -> bool:
    """Return whether a layer supports this scheme."""
    if opset < 11:
        return False
    if layer.operator == "Gemm":
        return (
            layer.number("alpha", 1.0) == 1 and layer.number("beta", 1.0) == 1 and not integer(layer.node, "transA", 0)
        )
    if layer.operator == "LSTM":
        recurrence = layer.node.inputs[2]
        # The kernel supports one layout: steps first.
        steps_first = integer(layer.node, "layout", 0) == 0
        return layer.data.dtype is _FLOAT and steps_first and recurrence is not None and constant(recurrence)
    return layer.operator == "MatMul" and len(layer.shape) == 2


def apply(model: ir.Model, layers: Iterable[Layer], *, per_channel: bool = True) -> None:
    """Quantize layers of a model in place; each is one that :func:`takes` accepts."""
    writer = _Writer(model, per_channel)
    for layer in layers:
        writer.write(layer)


class _Writer:
    def __init__(self, model: ir.Model, per_channel: bool):
        self._model = model
        self._graph = model.graph
        self._per_channel = per_channel
        self._quantized: dict[ir.Value, tuple[ir.Value, ...]] = {}

    def write(self, layer: Layer) -> None:
        if layer.operator == "LSTM":
            self._lstm(layer)
        else:
            self._product(layer)

    def _product(self, layer: Layer) -> None:
        quantized, scale, zero = self._dynamic(layer)
        base = layer.weight.name or layer.name
        array = weights(layer.weight)
        if layer.operator == "Gemm" and layer.axis == 0:
            array = array.T
        axis = 1 if self._per_channel else None
        scales = channel_scales(array, axis)
        weight = edit.constant(self._graph, f"{base}_int8", to_int8(array, scales, axis))
        by = edit.constant(self._graph, f"{base}_scale", scales)
        at = edit.constant(self._graph, f"{base}_zero", np.zeros(scales.shape, np.int8))
        value = self._add(
            layer, Operation("MatMulInteger", (quantized, weight, zero, at), f"{base}_product", ir.DataType.INT32)
        )
        value = self._add(layer, Operation("Cast", (value,), f"{base}_float", _FLOAT, attributes={"to": int(_FLOAT)}))
        factor = self._add(layer, Operation("Mul", (scale, by), f"{base}_factor", _FLOAT))
        value = self._add(layer, Operation("Mul", (value, factor), f"{base}_result", _FLOAT))
        kind = layer.output.dtype
        if kind is not None and kind is not _FLOAT:
            value = self._add(layer, Operation("Cast", (value,), f"{base}_cast", kind, attributes={"to": int(kind)}))
        bias = layer.node.inputs[2] if len(layer.node.inputs) > 2 else None
        if bias is not None:
            value = self._add(layer, Operation("Add", (value, bias), f"{base}_sum", kind))
        edit.replace(self._graph, layer.node, value)

    def _dynamic(self, layer: Layer) -> tuple[ir.Value, ...]:
        """Return the integers, scale and zero point of a layer's input, made once for all layers that read it."""
        data = layer.data
        if data not in self._quantized:
            source = data
            if data.dtype is not None and data.dtype is not _FLOAT:
                cast = Operation("Cast", (data,), f"{data.name}_float", _FLOAT, attributes={"to": int(_FLOAT)})
                source = edit.insert_after(self._graph, data, cast)
            node = ir.node("DynamicQuantizeLinear", [source], num_outputs=3, name=f"{data.name}_quantize")
            kinds = (("quantized", ir.DataType.UINT8), ("scale", _FLOAT), ("zero", ir.DataType.UINT8))
            for value, (name, dtype) in zip(node.outputs, kinds, strict=True):
                value.name, value.type = f"{data.name}_{name}", ir.TensorType(dtype)
            producer = source.producer()
            if producer is None:
                self._graph.insert_before(self._graph[0], node)
            else:
                self._graph.insert_after(producer, node)
            self._quantized[data] = tuple(node.outputs)
        return self._quantized[data]

    def _lstm(self, layer: Layer) -> None:
        """Replace an LSTM; weights [directions, 4 hidden, inputs] are transposed for the kernel."""
        node = layer.node
        parts: list[ir.Value] = []
        scales: list[ir.Value] = []
        for place in (1, 2):
            weight = node.inputs[place]
            if weight is None:
                raise ValueError(f"layer '{layer.name}' has no recurrent weights")
            base = weight.name or layer.name
            array = weights(weight).transpose(0, 2, 1)  # [directions, inputs, 4 hidden]
            others = (1,) if self._per_channel else (1, 2)
            scale = np.maximum(np.abs(array).max(axis=others), 1e-12).astype(np.float32) / 127
            by = scale[:, None, :] if self._per_channel else along(scale, 0, 3)
            integers = np.clip(np.rint(array / by), -127, 127).astype(np.int8)
            parts.append(edit.constant(self._graph, f"{base}_int8", integers))
            scales.append(edit.constant(self._graph, f"{base}_scale", scale))
            scales.append(edit.constant(self._graph, f"{base}_zero", np.zeros(scale.shape, np.int8)))
        rest = [*node.inputs[3:], *[None] * (8 - len(node.inputs))]
        made = ir.Node(
            "com.microsoft",
            "DynamicQuantizeLSTM",
            [node.inputs[0], *parts, *rest, *scales],
            [attribute for name, attribute in node.attributes.items() if name != "layout"],
            num_outputs=len(node.outputs),
            name=node.name,
        )
        self._model.opset_imports["com.microsoft"] = 1
        self._graph.insert_before(node, made)
        for old, new in zip(node.outputs, made.outputs, strict=True):
            name = old.name
            old.name = f"{name}_float"
            new.name, new.shape, new.type = name, old.shape, old.type
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        self._graph.remove(node, safe=True)

    def _add(self, layer: Layer, operation: Operation) -> ir.Value:
        return edit.insert_before(self._graph, layer.node, operation)
