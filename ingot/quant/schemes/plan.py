"""Plans, which set the scheme of each layer. Recipes and the search build models from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import onnx_ir as ir

from ingot.errors import QuantizationError
from ingot.model_store.format import onnx_graph
from ingot.quant.data.ranges import Method, Observation
from ingot.quant.graph.layers import Layer
from ingot.quant.graph.source import Source
from ingot.quant.schemes import dynamic, edit, migration, static, weight_only
from ingot.quant.schemes.static import Activations

Scheme = Literal["static", "dynamic", "int8", "int4"]
"""Static and dynamic int8; or weights of 8 or 4 bits alone. A layer without one stays in floating point."""

EngineName = Literal["onnxruntime", "openvino"]

LABELS: Mapping[str, str] = MappingProxyType(
    {"static": "static int8", "dynamic": "dynamic int8", "int8": "int8 weights", "int4": "int4 weights"}
)

DTYPES = {"u8": ir.DataType.UINT8, "s8": ir.DataType.INT8, "u16": ir.DataType.UINT16}


@dataclass(frozen=True)
class Plan:
    """How each layer is computed.

    Attributes:
        name: for display, such as ``static int8``.
        schemes: by layer name.
        method: how static ranges are computed from the data.
        activations: the integers of static activations: ``u8``, ``s8`` or ``u16``.
        between: also quantize the operators between static layers.
        per_channel: one scale per output channel, or one per tensor.
        migrate: how much of the activations' spread is moved into the weights (SmoothQuant's alpha); 0 for none.
        correct: correct the biases by the mean error of rounded weights.
        block: how many weights share a scale in weight-only schemes.
        engine: the engine that runs the model.
        compute: the precision in which it computes floats.
    """

    name: str
    schemes: Mapping[str, Scheme]
    method: Method = "minmax"
    activations: Literal["u8", "s8", "u16"] = "u8"
    between: bool = True
    per_channel: bool = True
    migrate: float = 0.0
    correct: bool = False
    block: int = 128
    engine: EngineName = "onnxruntime"
    compute: Literal["f32", "bf16"] = "f32"

    def keep(self, layers: Collection[str]) -> Plan:
        """Return the plan with these layers in floating point."""
        return replace(self, schemes={name: kind for name, kind in self.schemes.items() if name not in layers})

    def but(self, layers: Iterable[str], scheme: Scheme) -> Plan:
        """Return the plan with another scheme for these layers."""
        return replace(self, schemes={**self.schemes, **dict.fromkeys(layers, scheme)})

    @property
    def rows_touch(self) -> bool:
        """Whether rows of one call depend on each other: dynamic ranges cover all of them."""
        return "dynamic" in self.schemes.values()

    @property
    def needs_data(self) -> bool:
        return "static" in self.schemes.values()

    @property
    def precision(self) -> str:
        """``bf16`` where nothing is quantized, ``int4`` where weights have 4 bits, else ``int8``."""
        if not self.schemes and self.compute == "bf16":
            return "bf16"
        return "int4" if "int4" in self.schemes.values() else "int8"

    @property
    def variant(self) -> str:
        """The name of the variant: its precision, and the engine if that rounds the floats."""
        return self.precision if self.compute == "f32" else f"{self.precision}-{self.engine}"

    @property
    def empty(self) -> bool:
        """Whether it is the original: nothing is quantized, and floats are computed as they were."""
        return not self.schemes and self.compute == "f32"

    def record(self) -> dict[str, Any]:
        """Return the plan as data."""
        return {**asdict(replace(self, schemes={})), "schemes": dict(self.schemes)}

    @property
    def key(self) -> str:
        """A key that two plans share only if they produce the same model."""
        content = {**self.record(), "name": ""}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def fitting(source: Source, scheme: Scheme, names: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the layers that support a scheme, of those named or of all."""
    if scheme not in source.schemes:
        return ()
    takes = {"static": static.takes, "dynamic": dynamic.takes}.get(scheme, weight_only.takes)
    wanted = set(source.names if names is None else names)
    return tuple(layer.name for layer in source.layers if layer.name in wanted and takes(layer, source.opset))


def make(source: Source, plan: Plan, seen: Mapping[str, Observation]) -> ir.Model:
    """Return the model that a plan describes.

    Args:
        source: the original model.
        plan: the plan.
        seen: observations of activations on data; empty if the plan needs none.

    Raises:
        QuantizationError: the plan quantizes nothing.
    """
    if plan.empty:
        raise QuantizationError(
            "nothing in this model can be quantized in this way: it has no layer that the recipe supports"
        )
    model = source.model()
    layers = source.by_name(model)
    chosen = {
        kind: [layers[name] for name in layers if plan.schemes.get(name) == kind]
        for kind in ("static", "dynamic", "int8", "int4")
    }
    _static(model, chosen["static"], plan, seen)
    dynamic.apply(model, chosen["dynamic"], per_channel=plan.per_channel)
    weight_only.apply(model, chosen["int8"], bits=8, block=plan.block)
    weight_only.apply(model, chosen["int4"], bits=4, block=plan.block)
    _drop_unused(model)
    if plan.engine == "openvino":  # its engine would do so at every start of a server
        onnx_graph.inline(model)
    edit.unique_names(model)
    return model


def _static(model: ir.Model, layers: list[Layer], plan: Plan, seen: Mapping[str, Observation]) -> None:
    if not layers:
        return
    ranges = {name: item.range(plan.method) for name, item in seen.items()}
    means = {name: item.mean for name, item in seen.items() if item.mean is not None}
    if plan.migrate:
        for name, moved in migration.apply(model, layers, seen, plan.migrate).items():
            ranges[name], means[name] = (moved.low, moved.high), moved.mean
    # OpenVINO fails to load some graphs with quantized constants ("index '0' out of range"), and folds float ones.
    constants = plan.engine != "openvino"
    activations = Activations(ranges, DTYPES[plan.activations], plan.between, constants)
    static.apply(model, layers, activations, per_channel=plan.per_channel, means=means if plan.correct else {})


def _drop_unused(model: ir.Model) -> None:
    """Remove the floating-point weights that are no longer used."""
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]
