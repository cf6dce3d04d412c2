"""Models in a store with weights in separate blobs, small enough for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ingot.model_store import Archive, BlobFolder, Golden, Provenance, Serving, Store, add_variant
from ingot.model_store.format import onnx_graph
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array, Range, Signature
from tests import onnx_models

Build = Callable[[Path], Path]
_RANDOM = np.random.default_rng(0)


def _weight(name: str, *shape: int) -> onnx.TensorProto:
    values = _RANDOM.standard_normal(shape, np.float32) / np.sqrt(np.prod(shape[1:]), dtype=np.float32)
    return numpy_helper.from_array(values, name)


def layers(folder: Path, width: int = 512, count: int = 3) -> Path:
    """y = x through some layers, FP32 [batch, width]."""
    names = ["x", *(f"h{layer}" for layer in range(count - 1)), "y"]
    nodes, weights = [], []
    for left, right in pairwise(names):
        weights += [_weight(f"w_{right}", width, width), _weight(f"b_{right}", width, 1)]
        weights[-1].dims[:] = [width]
        nodes.append(helper.make_node("Gemm", [left, f"w_{right}", f"b_{right}"], [f"{right}_sum"], transB=1))
        nodes.append(helper.make_node("Relu", [f"{right}_sum"], [right]))
    return _save(folder / "layers.onnx", nodes, ("batch", width), ("batch", width), weights)


def convolutions(folder: Path) -> Path:
    """y = x through two convolutions and their mean, FP32 [batch, 128, height, 8] -> [batch, 256]."""
    nodes = [
        helper.make_node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"]),
        helper.make_node("Conv", ["r1", "w2"], ["c2"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["c2"], ["p"]),
        helper.make_node("Flatten", ["p"], ["y"]),
    ]
    weights = [_weight("w1", 256, 128, 3, 3), _weight("w2", 256, 256, 3, 3)]
    return _save(folder / "convolutions.onnx", nodes, ("batch", 128, "height", 8), ("batch", 256), weights)


def int8(folder: Path) -> Path:
    """y = x through two quantized products between QuantizeLinear and DequantizeLinear, FP32 [batch, 1024]."""
    width = 1024
    constants = [
        numpy_helper.from_array(np.array(0.05, np.float32), "scale"),
        numpy_helper.from_array(np.array(0, np.int8), "zero"),
        numpy_helper.from_array(np.array(0.001, np.float32), "weight_scale"),
    ]
    nodes = []
    for left, right in (("x", "h"), ("h", "y")):
        values = _RANDOM.integers(-127, 128, (width, width), np.int8)
        constants.append(numpy_helper.from_array(values, f"w_{right}"))
        nodes += [
            helper.make_node("QuantizeLinear", [left, "scale", "zero"], [f"{left}_q"]),
            helper.make_node("DequantizeLinear", [f"{left}_q", "scale", "zero"], [f"{left}_d"]),
            helper.make_node("DequantizeLinear", [f"w_{right}", "weight_scale", "zero"], [f"w_{right}_d"]),
            helper.make_node("MatMul", [f"{left}_d", f"w_{right}_d"], [f"{right}_m"]),
            helper.make_node("QuantizeLinear", [f"{right}_m", "scale", "zero"], [f"{right}_mq"]),
            helper.make_node("DequantizeLinear", [f"{right}_mq", "scale", "zero"], [right]),
        ]
    return _save(folder / "int8.onnx", nodes, ("batch", width), ("batch", width), constants)


def branches(folder: Path) -> Path:
    """y = x times one of two weights, by its sum, FP32 [batch, 512]: weights inside the branches of an If."""
    kind = TensorProto.FLOAT
    bodies: dict[str, Any] = {}
    for name in ("then", "else"):
        out = helper.make_tensor_value_info(f"{name}_y", kind, ["batch", 512])
        node = helper.make_node("MatMul", ["x", f"w_{name}"], [f"{name}_y"])
        bodies[f"{name}_branch"] = helper.make_graph([node], name, [], [out], [_weight(f"w_{name}", 512, 512)])
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], **bodies),
    ]
    zero = numpy_helper.from_array(np.array(0, np.float32), "zero")
    return _save(folder / "branches.onnx", nodes, ("batch", 512), ("batch", 512), [zero])


MODELS: dict[str, Build] = {build.__name__: build for build in (layers, convolutions, int8, branches)}


def push(store: Store, build: Build = layers, **options: int) -> Archive:
    """Push a model as version 1 of its name, with a golden case, and return its archive in the store."""
    blobs = BlobFolder.scratch()
    with TemporaryDirectory() as folder:
        path = build(Path(folder), **options)
        name = path.stem
        signature = load_engine(EngineSpec(path)).signature
        graph, weights = onnx_graph.pack(onnx_graph.load(path), blobs)
        x = inputs(signature, 2)
        answers = load_engine(EngineSpec(path)).run(x)
    signature = Signature(signature.inputs, signature.outputs, "batch", {"batch": Range(1, 64)})
    serving = Serving(
        name=name,
        variant="fp32",
        format="onnx",
        precision="fp32",
        signature=signature,
        provenance=Provenance(source="by hand", created="2026-01-02T03:04:05Z"),
    )
    archive = Archive.create(blobs, [add_variant(blobs, serving, graph, weights, [Golden(x, answers)])])
    store.push(archive, f"{name}:1")
    return store.get(f"{name}:1")


def inputs(signature: Signature, samples: int) -> dict[str, Array]:
    """Return random values for the one input; a dimension that may be any size is ``samples`` or 6."""
    (spec,) = signature.inputs
    shape = [samples if index == 0 else 6 if isinstance(dim, str) else dim for index, dim in enumerate(spec.shape)]
    return {spec.name: np.random.default_rng(samples).standard_normal(shape, np.float32)}


def _save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    x: onnx_models.Dims,
    y: onnx_models.Dims,
    constants: Sequence[onnx.TensorProto],
) -> Path:
    kind = TensorProto.FLOAT
    return onnx_models.save(path, nodes, [("x", kind, x)], [("y", kind, y)], constants)
