"""Migration of activations' outliers into the weights (SmoothQuant, arXiv:2211.10438).

An activation has one scale, which a few channels with much larger values make too coarse for the rest. Dividing each
channel by a factor, and multiplying the weights' rows by the same factor, leaves the product unchanged in exact
arithmetic. The division is folded into the normalization that computes the activation, if only layers that are
migrated read the activation; otherwise a multiplication is added.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ingot.quant.data.ranges import Observation
from ingot.quant.graph.layers import Layer, constant, tensor, weights
from ingot.quant.schemes import edit
from ingot.quant.schemes.rounding import along
from ingot.tensors import Array


@dataclass(frozen=True)
class Moved:
    """The range of an activation whose channels were divided, and each channel's mean."""

    low: float
    high: float
    mean: Array


def apply(model: ir.Model, layers: Iterable[Layer], seen: Mapping[str, Observation], alpha: float) -> dict[str, Moved]:
    """Migrate in place, for matrix products whose inputs were observed by channel.

    Args:
        model: the model.
        layers: those that will be quantized.
        seen: observations of activations.
        alpha: 0 leaves everything in the activations, 1 puts all into the weights.

    Returns:
        The layers' new inputs, by value name.
    """
    groups: dict[ir.Value, list[Layer]] = {}
    for layer in layers:
        observation = seen.get(layer.data.name or "")
        if layer.operator in ("MatMul", "Gemm") and observation is not None and observation.lows is not None:
            groups.setdefault(layer.data, []).append(layer)
    moved: dict[str, Moved] = {}
    for value, group in groups.items():
        observation = seen[value.name or ""]
        lows, highs, mean = observation.lows, observation.highs, observation.mean
        if lows is None or highs is None or mean is None:
            continue
        factors = _factors(np.maximum(-lows, highs), [_rows(layer) for layer in group], alpha)
        for layer in group:
            _scale_rows(model.graph, layer, factors)
        name = _divide(model.graph, value, group, factors)
        moved[name] = Moved(float((lows / factors).min()), float((highs / factors).max()), mean / factors)
    return moved


def _factors(largest: Array, weights: list[Array], alpha: float) -> Array:
    """Return the divisor of each channel: powers of the sizes of activations and weights."""
    rows = np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    factors = np.maximum(largest, 1e-5) ** alpha / np.maximum(rows, 1e-5) ** (1 - alpha)
    factors = factors / np.exp(np.log(factors).mean())  # so that the sizes stay about the same
    return np.asarray(np.clip(factors, 1e-3, 1e3), np.float32)


def _rows(layer: Layer) -> Array:
    """Return a layer's weights with the contracted axis first."""
    array = weights(layer.weight)
    return array if layer.axis == 1 else array.T


def _scale_rows(graph: ir.Graph, layer: Layer, factors: Array) -> None:
    array = tensor(layer.weight).numpy()
    scaled = array * along(factors, 1 - layer.axis, 2).astype(array.dtype)
    value = edit.constant(graph, layer.weight.name or layer.name, scaled)
    layer.node.replace_input_with(1, value)
    layer.weight = value


def _divide(graph: ir.Graph, value: ir.Value, group: list[Layer], factors: Array) -> str:
    """Divide a value's channels for these layers, and return the name of their new input."""
    producer = value.producer()
    nodes = {layer.node for layer in group}
    if (
        producer is not None
        and producer.op_type == "LayerNormalization"
        and {user for user, _ in value.uses()} == nodes
        and not value.is_graph_output()
        and all(constant(item) for item in producer.inputs[1:])
    ):
        for place, item in enumerate(producer.inputs[1:], 1):
            if item is not None:
                array = tensor(item).numpy()
                producer.replace_input_with(
                    place, edit.constant(graph, item.name or "scale", array / factors.astype(array.dtype))
                )
        return value.name or ""
    name = f"{value.name}_migrated"
    inverse = edit.constant(graph, f"{value.name}_migration", 1 / factors, value.dtype)
    divided = edit.insert_after(graph, value, edit.Operation("Mul", (value, inverse), name, value.dtype))
    for layer in group:
        layer.node.replace_input_with(0, divided)
    return name
