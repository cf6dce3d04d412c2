"""Static quantization in ONNX's QDQ form: activations in calibrated ranges, weights in 8 bits.

The form is chosen so that ONNX Runtime fuses it into integer kernels:

- An integer convolution needs a DequantizeLinear at each input and a QuantizeLinear at its output.
- A matrix product has no QuantizeLinear at its output: float outputs are more exact and as fast.
- A two-dimensional matrix product and the addition of its bias become one Gemm. Otherwise ONNX Runtime would fuse both
  into a Gemm whose bias stays in floats.
- An operator between quantized layers, such as the addition of a residual, is quantized if all its inputs are quantized
  and a consumer reads its output in integers. An operator that only moves elements keeps the scale of its input.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import onnx_ir as ir

from ingot.quant.graph.layers import Layer, constant, integer, is_float, shape, tensor, weights
from ingot.quant.schemes import biases, edit
from ingot.quant.schemes.rounding import Affine, as_kept, channel_scales, to_int8
from ingot.tensors import Array

OPERATORS = ("Conv", "MatMul", "Gemm")

# Operators other than layers that ONNX Runtime computes in integers.
_COMPUTED = frozenset(["Add", "Mul", "AveragePool", "GlobalAveragePool", "Concat", "LeakyRelu", "Sigmoid"])
# Operators that only move or drop elements: their outputs have the scale of their inputs.
_MOVED = frozenset(
    {"MaxPool", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "DepthToSpace", "SpaceToDepth"}
)
# Operators between a layer and its QuantizeLinear that ONNX Runtime drops, as the quantized range clips the values too.
_CLAMPS = ("Relu", "Clip")
# An added constant of this magnitude masks values, such as those of padding.
_MASK = 1e5
# Factors whose magnitudes differ by more than this do not share a scale.
_SPREAD = 8
# The first operator sets with one scale per channel, with scales in half precision, and with 16-bit integers.
_CHANNELS, _HALF, _WIDE = 13, 19, 21


@dataclass(frozen=True)
class Activations:
    """The quantization of activations.

    Attributes:
        ranges: the lowest and highest real by value name.
        dtype: UINT8, INT8 or UINT16.
        between: quantize operators between layers too.
        constants: quantize the constants that these read, as ONNX Runtime's integer kernels need.
    """

    ranges: Mapping[str, tuple[float, float]]
    dtype: ir.DataType = ir.DataType.UINT8
    between: bool = True
    constants: bool = True


def takes(layer: Layer, opset: int) -> bool:
    """Return whether a layer supports this scheme."""
    if layer.operator not in OPERATORS or (layer.operator == "MatMul" and len(layer.shape) != 2):
        return False
    if layer.operator == "Gemm" and not _plain(layer):
        return False
    return opset >= (10 if layer.data.dtype is ir.DataType.FLOAT else _HALF)


def _plain(layer: Layer) -> bool:
    """Return whether a Gemm is only a product and a constant bias, as integer kernels compute."""
    bias = layer.node.inputs[2] if len(layer.node.inputs) > 2 else None
    return (
        layer.number("beta", 1.0) == 1
        and layer.number("alpha", 1.0) == 1
        and not integer(layer.node, "transA", 0)
        and (bias is None or (constant(bias) and biases.fits(shape(bias), layer.shape[layer.axis])))
    )


def watched(model: ir.Model, layers: Collection[Layer]) -> tuple[str, ...]:
    """Return the values whose ranges :func:`apply` needs."""
    nodes = {layer.node for layer in layers}
    near = [node for node in model.graph if node in nodes or node.op_type in (*_COMPUTED, *_CLAMPS)]
    found: dict[str, None] = {}
    for node in near:
        values = [*node.inputs, *node.outputs]
        values += [clamped(value) for value in node.outputs] if node.op_type == "Conv" else ()
        found.update({value.name or "": None for value in values if value is not None and _varies(value)})
    return tuple(found)


def contracted(layers: Iterable[Layer]) -> dict[str, int]:
    """Return the axis of the channels of layers' inputs, by value name, without those used along several axes."""
    found: dict[str, int] = {}
    unclear: set[str] = set()
    for layer in layers:
        name, axis = layer.data.name or "", 1 if layer.operator == "Conv" else -1
        if found.setdefault(name, axis) != axis:
            unclear.add(name)
    return {name: axis for name, axis in found.items() if name not in unclear}


def apply(
    model: ir.Model,
    layers: Iterable[Layer],
    activations: Activations,
    *,
    per_channel: bool = True,
    means: Mapping[str, Array] = MappingProxyType({}),
) -> None:
    """Quantize layers of a model in place; each is one that :func:`takes` accepts.

    Args:
        model: the model.
        layers: the layers to quantize.
        activations: how activations become integers.
        per_channel: one scale per output channel, or one per tensor.
        means: the mean of each channel of layers' inputs, by value name; where it is known, the bias is corrected by
            the mean error of the rounded weights (arXiv:1906.04721, section 4.2).
    """
    chosen = list(layers)
    for layer in chosen:
        biases.join(model.graph, layer)
    _Writer(model, chosen, activations=activations, per_channel=per_channel, means=means).write()


def clamped(value: ir.Value) -> ir.Value:
    """Return a value, or the output of a clamp that is its only user."""
    uses = list(value.uses())
    if len(uses) == 1 and not value.is_graph_output():
        user, place = uses[0]
        if (
            place == 0
            and user.op_type in _CLAMPS
            and all(constant(item) for item in user.inputs[1:] if item is not None)
        ):
            return user.outputs[0]
    return value


class _Writer:
    def __init__(
        self,
        model: ir.Model,
        layers: Iterable[Layer],
        *,
        activations: Activations,
        per_channel: bool,
        means: Mapping[str, Array],
    ):
        self._means = means
        self._graph = model.graph
        self._opset = model.opset_imports.get("", 1)
        # In older operator sets, 16-bit integers are an extension of ONNX Runtime.
        wide = activations.dtype is ir.DataType.UINT16 and self._opset < _WIDE
        self._domain = "com.microsoft" if wide else ""
        if wide:
            model.opset_imports["com.microsoft"] = 1
        self._layers = {layer.node: layer for layer in layers}
        self._activations = activations
        self._per_channel = per_channel and self._opset >= _CHANNELS
        self._affine: dict[ir.Value, Affine] = {}
        self._pairs: dict[ir.Value, ir.Value] = {}

    def write(self) -> None:
        computed = self._computed() if self._activations.between else frozenset()
        nodes = list(self._graph)
        for node in nodes:  # before any edge is changed
            if node in computed and node.op_type in _MOVED and node.inputs[0] is not None:
                self._affine.update({value: self._affine_of(node.inputs[0]) for value in node.outputs})
        sources: list[ir.Value] = []
        for node in nodes:
            if node in self._layers:
                source = node.inputs[0]
                self._quantize_inputs(node, [0])
                self._quantize_weight(self._layers[node], self._means.get(source.name or "") if source else None)
                if node.op_type == "Conv" or self._wanted(node.outputs[0], computed):
                    sources.append(clamped(node.outputs[0]))
            elif node in computed:
                self._quantize_inputs(node, [0] if node.op_type in _MOVED else range(len(node.inputs)))
                sources.extend(map(clamped, node.outputs))
        for value in sources:
            self._quantize_source(value)

    def _computed(self) -> Collection[ir.Node]:
        """Return the operators between layers that are to be quantized."""
        quantized: set[ir.Value] = set()
        found: list[ir.Node] = []
        for node in self._graph:
            if node in self._layers:
                quantized.add(clamped(node.outputs[0]))
            elif (node.op_type in _MOVED and node.inputs[0] in quantized) or self._computes(node, quantized):
                found.append(node)
                quantized.update(map(clamped, node.outputs))
        kept: set[ir.Node] = set()
        for node in reversed(found):
            if any(self._wanted(value, kept) for value in node.outputs):
                kept.add(node)
        return kept

    def _computes(self, node: ir.Node, quantized: Collection[ir.Value]) -> bool:
        values = [value for value in node.inputs if is_float(value) and value is not None]
        return (
            node.op_type in _COMPUTED
            and any(value in quantized for value in values)
            and all(value in quantized or _modest(value, node) for value in values)
            and all((clamped(value).name or "") in self._activations.ranges for value in node.outputs)
        )

    def _wanted(self, value: ir.Value, computed: Collection[ir.Node]) -> bool:
        """Return whether a node reads a value in integers."""
        uses = clamped(value).uses()
        return any(user in computed or (user in self._layers and place == 0) for user, place in uses)

    def _affine_of(self, value: ir.Value) -> Affine:
        if value not in self._affine:
            self._affine[value] = Affine.of(
                *self._activations.ranges[value.name or ""], self._activations.dtype, value.dtype
            )
        return self._affine[value]

    def _quantize_inputs(self, node: ir.Node, places: Iterable[int]) -> None:
        for place in places:
            value = node.inputs[place]
            if value is None or not is_float(value):
                continue
            if constant(value):
                if not self._activations.constants:
                    continue
                array = tensor(value).numpy().astype(np.float32)
                affine = Affine.of(
                    float(array.min(initial=0)), float(array.max(initial=0)), self._activations.dtype, value.dtype
                )
                node.replace_input_with(place, self._pair(value, affine))
            else:
                node.replace_input_with(place, self._pair(value))

    def _pair(self, value: ir.Value, affine: Affine | None = None) -> ir.Value:
        """Return a value after a QuantizeLinear and a DequantizeLinear, inserted once."""
        if value not in self._pairs:
            affine = affine or self._affine_of(value)
            base = value.name or "value"
            scale = edit.constant(self._graph, f"{base}_scale", np.array(affine.scale), value.dtype)
            zero = edit.constant(self._graph, f"{base}_zero", np.array(affine.zero), affine.dtype)
            quantize = edit.Operation(
                "QuantizeLinear", (value, scale, zero), f"{base}_quantized", affine.dtype, domain=self._domain
            )
            quantized = edit.insert_after(self._graph, value, quantize)
            back = edit.Operation(
                "DequantizeLinear", (quantized, scale, zero), f"{base}_dequantized", value.dtype, domain=self._domain
            )
            self._pairs[value] = edit.insert_after(self._graph, quantized, back)
        return self._pairs[value]

    def _quantize_source(self, value: ir.Value) -> None:
        """Replace a value by its quantized form in all users: a float user would prevent the fusion."""
        pair = self._pair(value)
        quantize = next(user for user, _ in value.uses() if user.op_type == "QuantizeLinear")
        edit.redirect(self._graph, value, pair, keep=quantize)

    def _quantize_weight(self, layer: Layer, mean: Array | None) -> None:
        array = weights(layer.weight)
        axis = layer.axis if self._per_channel else None
        scales = as_kept(np.maximum(channel_scales(array, axis), biases.least_scales(layer, axis)), layer.weight.dtype)
        base = layer.weight.name or layer.name
        integers = to_int8(array, scales, axis)
        if mean is not None:
            biases.correct(self._graph, layer, biases.mean_error(array, integers, scales, axis, mean, layer))
        inputs = (
            edit.constant(self._graph, f"{base}_int8", integers),
            edit.constant(self._graph, f"{base}_scale", scales, layer.weight.dtype),
            edit.constant(self._graph, f"{base}_zero", np.zeros(scales.shape, np.int8)),
        )
        attributes = {} if axis is None else {"axis": axis}
        operation = edit.Operation(
            "DequantizeLinear", inputs, f"{base}_dequantized", layer.weight.dtype, attributes=attributes
        )
        layer.node.replace_input_with(1, edit.insert_before(self._graph, layer.node, operation))
        biases.quantize(self._graph, layer, scales)


def _varies(value: ir.Value) -> bool:
    return is_float(value) and not constant(value)


def _modest(value: ir.Value, node: ir.Node) -> bool:
    """Return whether a value is a constant that integers can represent.

    The minus infinity of a mask is not, nor are factors of many magnitudes, whose small ones would be rounded to zero.
    """
    if not constant(value):
        return False
    sizes = np.abs(tensor(value).numpy().astype(np.float64))
    largest = float(sizes.max(initial=0))
    return largest < _MASK and (node.op_type != "Mul" or float(sizes.min(initial=largest)) * _SPREAD >= largest)
