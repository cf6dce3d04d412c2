"""The model that is quantized."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

from ingot.errors import InvalidArgument
from ingot.model_store import BlobFolder, Variant
from ingot.model_store.format import onnx_graph
from ingot.quant.graph import layers as graph_layers
from ingot.quant.graph.layers import Layer
from ingot.tensors import Signature


class Source:
    """A floating-point variant of format ``onnx``, whose blobs are files.

    Args:
        variant: the variant; the caller must hold its archive as long as this.

    Raises:
        InvalidArgument: it is quantized already.
    """

    def __init__(self, variant: Variant):
        self.variant = variant
        model = self.model()
        if graph_layers.is_quantized(model):
            raise InvalidArgument("the model is quantized already; quantize the floating-point variant instead")
        self.opset = model.opset_imports.get("", 1)
        self.double = graph_layers.has_double(model)
        self.layers = tuple(graph_layers.find(model))
        self._model = model

    @property
    def blobs(self) -> BlobFolder:
        """Where the model's files are."""
        return BlobFolder(self.path.parent.parent)

    @property
    def path(self) -> Path:
        return self.variant.path()

    @property
    def signature(self) -> Signature:
        return self.variant.signature

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The layers' names in the order of the graph."""
        return tuple(layer.name for layer in self.layers)

    def model(self) -> ir.Model:
        """Return a new copy of the graph, which may be changed. Its large weights are mapped from their files.

        All its constants are initializers, and the types of its values are known as far as ONNX can infer them.
        """
        model = onnx_graph.load(self.path)
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        if any(value.dtype is None for node in model.graph for value in node.outputs):
            ShapeInferencePass(check_type=False, strict_mode=False, data_prop=False)(model)
        return model

    def by_name(self, model: ir.Model) -> dict[str, Layer]:
        """Return the layers of a graph that :meth:`model` returned."""
        return {layer.name: layer for layer in graph_layers.find(model)}
