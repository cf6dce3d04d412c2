"""Ranking layers by the damage of quantizing each one alone, with one graph for all of them.

The graph computes every layer twice on the same input: unchanged, and with its input and weights rounded. A gate for
each layer, an input of the graph, selects the rounded one. So measuring the effect of a layer on the model's outputs
takes one run on a few rows, instead of a separate model with its loading and a pass over the data.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from ingot.model_store import BlobFolder
from ingot.model_store.format import onnx_graph
from ingot.quant.data.ranges import Observation
from ingot.quant.data.samples import Samples
from ingot.quant.graph.layers import Layer, tensor, weights
from ingot.quant.graph.source import Source
from ingot.quant.schemes import edit, weight_only
from ingot.quant.schemes.edit import Operation
from ingot.quant.schemes.plan import DTYPES, Plan
from ingot.quant.schemes.rounding import Affine, along, channel_scales, to_int8
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array

# Rows for the ranking. The effect is measured on numbers, not by a metric, so few rows suffice.
_ROWS = 16
_LARGEST = 200.0


@dataclass(frozen=True)
class Noise:
    """The effect of rounding one layer's input and weights.

    Attributes:
        layer: the layer's name.
        sqnr: signal-to-noise ratio of the layer's output in dB; 200 if there is no noise.
        damage: the noise of the worst output of the model as a share of its power; None if not measured.
    """

    layer: str
    sqnr: float
    damage: float | None = None


def rank(
    source: Source,
    plan: Plan,
    seen: Mapping[str, Observation],
    samples: Samples,
    *,
    seed: int = 0,
    effects: bool = True,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Noise]:
    """Return a plan's layers, the most damaging first.

    Args:
        source: the floating-point model.
        plan: the schemes of its layers.
        seen: observations of activations.
        samples: real inputs.
        seed: for the choice of rows.
        effects: also measure the effect on the model's outputs. Otherwise layers are ordered by their noise, which
            takes a single run.
        progress: called with the number of finished layers and of all layers.
    """
    model = source.model()
    twins = {
        name: _Twin(model, layer, plan, seen) for name, layer in source.by_name(model).items() if name in plan.schemes
    }
    outputs = [spec.name for spec in source.signature.outputs if spec.dtype.is_float]
    for twin in twins.values():
        twin.write()
    edit.unique_names(model)
    blobs = BlobFolder.scratch()
    path = blobs.path(onnx_graph.pack(model, blobs, source.blobs)[0])
    batches = [batch.inputs for batch in samples.take(_ROWS, seed).batches(_ROWS)]
    noises: list[Noise] = []
    with contextlib.closing(load_engine(EngineSpec(path, device="cpu"))) as engine:
        closed = {twin.gate: np.zeros((), bool) for twin in twins.values()}
        expected = [engine.run({**inputs, **closed}) for inputs in batches]
        for name, twin in twins.items():
            noise = sum(float(answer[twin.noise]) for answer in expected)
            signal = sum(float(answer[twin.signal]) for answer in expected)
            damage = None
            if effects:
                gates = {**closed, twin.gate: np.ones((), bool)}
                actual = [engine.run({**inputs, **gates}) for inputs in batches]
                damage = max((_share(expected, actual, output) for output in outputs), default=0.0)
            noises.append(Noise(name, _decibel(signal, noise), damage))
            progress(len(noises), len(twins))
    return sorted(noises, key=lambda item: (-(item.damage or 0.0), item.sqnr))


def _share(expected: Sequence[Mapping[str, Array]], actual: Sequence[Mapping[str, Array]], output: str) -> float:
    """Return the power of the difference between two models' outputs as a share of the first's."""
    power = noise = 0.0
    for left, right in zip(expected, actual, strict=True):
        own = left[output].astype(np.float64)
        difference = right[output].astype(np.float64) - own
        finite = np.isfinite(own)
        power += float(np.square(own[finite]).sum())
        noise += float(np.square(difference[finite]).sum())
    return math.inf if not math.isfinite(noise) else noise / max(power, 1e-30)


def _decibel(signal: float, noise: float) -> float:
    if not noise or not signal:
        return _LARGEST
    if not math.isfinite(noise) or not math.isfinite(signal):
        return 0.0
    return min(10 * math.log10(signal / noise), _LARGEST)


class _Twin:
    """The rounded copy of a layer, the gate that enables it, and the power of the output and the noise."""

    def __init__(self, model: ir.Model, layer: Layer, plan: Plan, seen: Mapping[str, Observation]):
        self._graph = model.graph
        self._layer = layer
        self._plan = plan
        self._seen = seen
        self._scheme = plan.schemes[layer.name]
        self._place = layer.node
        self._gate = ir.Value(
            name=f"{layer.output.name}_gate", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.BOOL)
        )
        self._powers: list[ir.Value] = []

    @property
    def gate(self) -> str:
        """The name of the input that is false for the unchanged layer, and true for the rounded one."""
        return self._gate.name or ""

    @property
    def signal(self) -> str:
        """The name of the output with the power of the layer's output."""
        return self._powers[0].name or ""

    @property
    def noise(self) -> str:
        """The name of the output with the power of the rounding noise."""
        return self._powers[1].name or ""

    def write(self) -> None:
        layer, node = self._layer, self._layer.node
        inputs: list[ir.Value | None] = list(node.inputs)
        for place, value in enumerate(inputs):
            # A recurrent layer has a second weight, which is rounded with the first.
            if value is not None and (value is layer.weight or (layer.operator == "LSTM" and place == 2)):
                inputs[place] = edit.constant(
                    self._graph, f"{value.name}_rounded", self._weights(value), tensor(value).dtype
                )
        if layer.operator != "Gather":
            inputs[0] = self._rounded(layer.data)
        attributes = list(node.attributes.values())
        twin = ir.Node(
            node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs), name=f"{layer.name}_twin"
        )
        for value, own in zip(twin.outputs, node.outputs, strict=True):
            value.name, value.type, value.shape = f"{own.name}_twin", own.type, own.shape
        self._after(twin)
        self._open(twin.outputs[0])

    def _open(self, rounded: ir.Value) -> None:
        """Select the rounded output if the gate is open, and output the powers of signal and noise."""
        own, kind = self._layer.output, self._layer.output.dtype
        users = list(own.uses())
        self._graph.inputs.append(self._gate)
        difference = self._add("Sub", (rounded, own), "difference", kind)
        result = self._add("Where", (self._gate, rounded, own), "gated", kind)
        result.shape = own.shape
        for user, place in users:
            user.replace_input_with(place, result)
        for index, output in enumerate(self._graph.outputs):
            if output is own:
                own.name, result.name = f"{own.name}_own", own.name
                self._graph.outputs[index] = result
        for value, name in ((own, "signal"), (difference, "noise")):
            single = (
                value
                if kind is ir.DataType.FLOAT
                else self._add("Cast", (value,), f"{name}_single", ir.DataType.FLOAT, {"to": 1})
            )
            square = self._add("Mul", (single, single), f"{name}_square", ir.DataType.FLOAT)
            total = self._add("ReduceSum", (square,), name, ir.DataType.FLOAT, {"keepdims": 0})
            total.shape = ir.Shape(())
            self._graph.outputs.append(total)
            self._powers.append(total)

    def _weights(self, weight: ir.Value) -> Array:
        """Return weights of the layer after rounding."""
        array = weights(weight)
        if self._layer.operator != "Gather" and self._scheme in ("int8", "int4"):
            bits, block = (8, self._plan.block) if self._scheme == "int8" else (4, self._plan.block)
            turned = weight_only.rounded(array if self._layer.axis == 0 else array.T, bits, block)
            return turned if self._layer.axis == 0 else turned.T
        axis = self._layer.axis if self._plan.per_channel or self._layer.operator == "Gather" else None
        scales = channel_scales(array, axis)
        by = scales if axis is None else along(scales, axis, array.ndim)
        return np.asarray(to_int8(array, scales, axis) * by, np.float32)

    def _rounded(self, value: ir.Value) -> ir.Value:
        """Return the layer's input after rounding."""
        if self._scheme == "dynamic" and self._layer.operator != "LSTM":
            return self._rounded_by_call(value)
        if self._scheme != "static" or value.name not in self._seen:
            return value
        # 16-bit integers, for which no CPU has kernels, add almost no noise.
        if self._plan.activations == "u16":
            return value
        affine = Affine.of(
            *self._seen[value.name or ""].range(self._plan.method), DTYPES[self._plan.activations], value.dtype
        )
        scale = edit.constant(self._graph, f"{value.name}_twin_scale", np.array(affine.scale), value.dtype)
        zero = edit.constant(self._graph, f"{value.name}_twin_zero", np.array(affine.zero), affine.dtype)
        quantized = self._add("QuantizeLinear", (value, scale, zero), "quantized", affine.dtype)
        return self._add("DequantizeLinear", (quantized, scale, zero), "rounded", value.dtype)

    def _rounded_by_call(self, value: ir.Value) -> ir.Value:
        """Return a value after rounding in its range in each call."""
        single, kind = ir.DataType.FLOAT, value.dtype
        if kind is not single:
            value = self._add("Cast", (value,), "single", single, {"to": int(single)})
        node = ir.node("DynamicQuantizeLinear", [value], num_outputs=3, name=f"{self._layer.name}_range")
        for output, dtype in zip(node.outputs, (ir.DataType.UINT8, single, ir.DataType.UINT8), strict=True):
            output.name, output.type = f"{self._layer.output.name}_range", ir.TensorType(dtype)
        self._after(node)
        value = self._add("DequantizeLinear", node.outputs, "rounded", single)
        return value if kind is single or kind is None else self._add("Cast", (value,), "half", kind, {"to": int(kind)})

    def _add(
        self,
        operator: str,
        inputs: Sequence[ir.Value],
        what: str,
        dtype: ir.DataType | None,
        attributes: Mapping[str, Any] = MappingProxyType({}),
    ) -> ir.Value:
        """Add a node after the nodes added so far, and return its output."""
        node = Operation(
            operator, tuple(inputs), f"{self._layer.output.name}_{what}", dtype, attributes=attributes
        ).node()
        self._after(node)
        return node.outputs[0]

    def _after(self, node: ir.Node) -> None:
        self._graph.insert_after(self._place, node)
        self._place = node
