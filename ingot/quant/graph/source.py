"""The model that is quantized."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, ShapeInferencePass

from ingot.errors import InvalidArgument
from ingot.model_store import BlobFolder, Golden, Variant
from ingot.model_store.diff import answers
from ingot.model_store.format import onnx_graph
from ingot.model_store.format.evidence import Agreement
from ingot.quant.data.samples import Samples
from ingot.quant.graph import layers as graph_layers
from ingot.quant.graph.layers import Layer
from ingot.quant.metric.agreement import by_output
from ingot.runtime import Engine, EngineSpec, load_engine
from ingot.tensors import Array, Signature


class Source:
    """A floating-point variant of format ``onnx``, whose blobs are files.

    Args:
        variant: the variant; the caller must hold its archive as long as this.

    Raises:
        InvalidArgument: it is quantized already.
    """

    schemes: tuple[str, ...] = ("static", "dynamic", "int8", "int4")
    """Those of :data:`~ingot.quant.schemes.plan.Scheme` by which it may be quantized."""
    engines: tuple[str, ...] = ("onnxruntime", "openvino")
    """Those that may run it."""
    one_call = True
    """Whether the inputs of :attr:`signature` are those of its graph."""

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

    def open(self, spec: EngineSpec) -> Engine:
        """Load the model, or one that was made from it, with the inputs and outputs of :attr:`signature`."""
        return load_engine(spec)

    def timed(self, example: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the inputs of a timed call, from those of a sample."""
        return example

    def agreement(
        self, expected: Sequence[Mapping[str, Array]], actual: Sequence[Mapping[str, Array]], samples: Samples
    ) -> tuple[Agreement, ...]:
        """Return how a model's outputs agree with the original's; see :func:`by_output`."""
        return by_output(self.signature, expected, actual, samples)[0]

    def replayed(self, spec: EngineSpec) -> tuple[tuple[Golden, ...], tuple[str, ...]]:
        """Return the golden cases with the outputs of a model that was made from this one, and notes."""
        with contextlib.closing(self.open(spec)) as engine:
            cases = self.variant.rerun(engine.run)
        return cases, answers.agreement(self.variant.goldens(), cases)

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
