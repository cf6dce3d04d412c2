"""A model made of layers of one width, the same at every call, as an archive and as one file."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot.model_store import Archive, BlobFolder, Golden, Provenance, Serving, add_variant
from ingot.model_store.format import manifest
from ingot.tensors import Array, DType, Range, Signature, TensorSpec

WIDTH = 2048
BATCHES = (1, 2, 8, 32)


@dataclass(frozen=True)
class Layers:
    """A multilayer perceptron, [batch, width] -> [batch, width]: ``megabytes`` of FP32 weights, at least one layer."""

    megabytes: int = 300
    width: int = WIDTH
    name: str = "layers"

    @property
    def count(self) -> int:
        return max(1, round(self.megabytes * 1e6 / (4 * self.width**2)))

    def weights(self, layer: int) -> Array:
        """Return one layer's weights, [width, width], such that values keep their size from layer to layer."""
        values = np.random.default_rng(layer).standard_normal((self.width, self.width), np.float32)
        return values * np.float32(np.sqrt(2 / self.width))

    def inputs(self, rows: int) -> Array:
        return np.random.default_rng(1_000_000).standard_normal((rows, self.width), np.float32)

    def save(self, path: Path) -> Path:
        """Write the model as one protobuf file."""
        onnx.save(self._model([numpy_helper.from_array(self.weights(i), f"w{i}") for i in range(self.count)]), path)
        return path

    def archive(self, blobs: BlobFolder) -> Archive:
        """Return the model as an archive of one variant, with goldens computed by numpy."""
        layers, tensors = [], []
        for layer in range(self.count):
            blob = blobs.put(self.weights(layer).tobytes(), manifest.WEIGHT)
            layers.append(blob.model_copy(update={"annotations": {manifest.FILEPATH: blob.hex}}))
            tensors.append(_external(f"w{layer}", blob.hex, blob.size, (self.width, self.width)))
        graph = blobs.put(self._model(tensors).SerializeToString(), manifest.WEIGHT, {manifest.FILEPATH: "model.onnx"})
        serving = Serving(
            name=self.name,
            variant="fp32",
            format="onnx",
            precision="fp32",
            signature=Signature(
                (TensorSpec("x", DType.FP32, ("batch", self.width)),),
                (TensorSpec("y", DType.FP32, ("batch", self.width)),),
                "batch",
                {"batch": Range(1, 1024)},
            ),
            provenance=Provenance(source="benchmarks.model_store", created="2026-01-02T03:04:05Z"),
        )
        x = self.inputs(1)
        return Archive.create(
            blobs, [add_variant(blobs, serving, graph, layers, [Golden({"x": x}, {"y": self.answer(x)})])]
        )

    def answer(self, x: Array) -> Array:
        for layer in range(self.count):
            x = x @ self.weights(layer)
            x = x if layer == self.count - 1 else np.maximum(x, 0)
        return x

    def _model(self, weights: list[onnx.TensorProto]) -> onnx.ModelProto:
        names = ["x", *(f"h{layer}" for layer in range(self.count - 1)), "y"]
        nodes = []
        for layer, (left, right) in enumerate(pairwise(names)):
            last = right == "y"
            nodes.append(helper.make_node("MatMul", [left, f"w{layer}"], [right if last else f"{right}_linear"]))
            if not last:
                nodes.append(helper.make_node("Relu", [f"{right}_linear"], [right]))
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", self.width]) for name in ("x", "y")]
        graph = helper.make_graph(nodes, self.name, ends[:1], ends[1:], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _external(name: str, location: str, size: int, shape: tuple[int, ...]) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)
    return tensor
