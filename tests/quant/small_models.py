"""Small models with weights, as imported archives, with data for them and latencies independent of the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from ingot.model_store import Archive, BatchLatency, ServingDefaults
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array, Signature
from tests import onnx_models

FP32, FP16, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
Feature = tuple[str, int, onnx_models.Dims]


def rows(count: int = 64, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 8)).astype(np.float32)


LABELLED = ServingDefaults(labels=("north", "east", "south", "west"))
"""The settings of :func:`classifier` for its server."""


def classifier(dtype: type[np.floating[Any]] = np.float32) -> Archive:
    """x [batch, 8] to logits [batch, 4], by the layers 'first' and 'second'."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [
        helper.make_node("MatMul", ["x", "first.weight"], ["h"]),
        helper.make_node("Add", ["h", "first.bias"], ["b"]),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("Gemm", ["r", "second.weight", "second.bias"], ["logits"], transB=1),
    ]
    weights = {"first.weight": (8, 32), "first.bias": (32,), "second.weight": (4, 32), "second.bias": (4,)}
    return _export("classifier", nodes, [("x", kind, ("batch", 8))], [("logits", kind, ("batch", 4))], weights, dtype)


def pictures() -> Archive:
    """image [batch, 1, 8, 8] to logits [batch, 4], by the convolution 'conv' and the linear layer 'head'."""
    nodes = [
        helper.make_node("Conv", ["image", "conv.weight", "conv.bias"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "head.weight", "head.bias"], ["logits"], transB=1),
    ]
    weights = {"conv.weight": (8, 1, 3, 3), "conv.bias": (8,), "head.weight": (4, 512), "head.bias": (4,)}
    return _export("pictures", nodes, [("image", FP32, ("batch", 1, 8, 8))], [("logits", FP32, ("batch", 4))], weights)


def texts() -> Archive:
    """ids and mask [batch, seq] to tokens [batch, seq, 16] and embedding [batch, 16]."""
    nodes = [
        helper.make_node("Gather", ["words.weight", "ids"], ["w"]),
        helper.make_node("MatMul", ["w", "dense.weight"], ["d"]),
        helper.make_node("Tanh", ["d"], ["tokens"]),
        helper.make_node("Unsqueeze", ["mask", "last"], ["m"]),
        helper.make_node("Mul", ["tokens", "m"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "middle"], ["embedding"], keepdims=0),
        helper.make_node("Identity", ["mask"], ["seen"]),
    ]
    shape: onnx_models.Dims = ("batch", "seq")
    return _export(
        "texts",
        nodes,
        [("ids", INT64, shape), ("mask", FP32, shape)],
        [("tokens", FP32, ("batch", "seq", 16)), ("embedding", FP32, ("batch", 16)), ("seen", FP32, shape)],
        {"words.weight": (50, 16), "dense.weight": (16, 16)},
        axes={"last": 2, "middle": 1},
    )


def sentences(lengths: Iterable[int] = (3, 5, 9), count: int = 12) -> list[dict[str, Array]]:
    """Items for :func:`texts`, of several lengths."""
    rng = np.random.default_rng(0)
    items: list[dict[str, Array]] = []
    for length in lengths:
        mask = np.ones((count, length), np.float32)
        mask[::2, -1] = 0
        items.append({"ids": rng.integers(0, 50, (count, length)), "mask": mask})
    return items


def unbatched() -> Archive:
    """x [3, 8] to one number: a case is a row."""
    nodes = [
        helper.make_node("MatMul", ["x", "only.weight"], ["h"]),
        helper.make_node("ReduceMean", ["h"], ["y"], keepdims=0),
    ]
    return _export("unbatched", nodes, [("x", FP32, (3, 8))], [("y", FP32, ())], {"only.weight": (8, 4)})


def recurrent() -> Archive:
    """x [seq, batch, 8] to y [seq, 1, batch, 16]: the batch is not the first dimension."""
    nodes = [helper.make_node("LSTM", ["x", "rnn.weight", "rnn.recurrence", "rnn.bias"], ["y"], hidden_size=16)]
    weights = {"rnn.weight": (1, 64, 8), "rnn.recurrence": (1, 64, 16), "rnn.bias": (1, 128)}
    shapes: list[Feature] = [("x", FP32, ("seq", "batch", 8)), ("y", FP32, ("seq", 1, "batch", 16))]
    return _export("recurrent", nodes, shapes[:1], shapes[1:], weights)


def table() -> Archive:
    """y = 2 x + 1: it has nothing to quantize."""
    with TemporaryDirectory() as folder:
        return _import(onnx_models.affine(Path(folder)))


def _export(
    name: str,
    nodes: Sequence[Any],
    inputs: Sequence[Feature],
    outputs: Sequence[Feature],
    weights: Mapping[str, tuple[int, ...]],
    dtype: type[np.floating[Any]] = np.float32,
    axes: Mapping[str, int] | None = None,
) -> Archive:
    rng = np.random.default_rng(1)
    constants = [
        numpy_helper.from_array((rng.standard_normal(shape) / 3).astype(dtype), label)
        for label, shape in weights.items()
    ]
    constants += [numpy_helper.from_array(np.array([axis]), label) for label, axis in (axes or {}).items()]
    with TemporaryDirectory() as folder:
        return _import(onnx_models.save(Path(folder) / f"{name}.onnx", nodes, inputs, outputs, constants))


def _import(path: Path) -> Archive:
    from ingot.export import export_model  # imported here, as it imports torch

    return export_model(path, serving=LABELLED if path.stem == "classifier" else None)


def run(archive: Archive, variant: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return a variant's answers."""
    unpacked = archive.unpacked()  # its folder goes with it
    engine = load_engine(EngineSpec(unpacked.variant(variant).path(), device="cpu"))
    try:
        return engine.run(inputs)
    finally:
        engine.close()


def make_faster(patch: pytest.MonkeyPatch, speed: float = 2.0) -> None:
    """Make every candidate so many times as fast as the original, on any machine, and try ONNX Runtime alone."""
    patch.setattr("ingot.runtime.profiling.profile.measure_together", timing(speed))
    patch.setattr("ingot.quant.search.search.installed", lambda: ("onnxruntime",))


def timing(speed: float, wait: float = 0) -> Callable[..., list[tuple[BatchLatency, ...]]]:
    """Return the result of :func:`ingot.runtime.profiling.profile.measure_together` if all were so much faster."""

    def measure(
        engines: Sequence[object],
        signature: Signature,
        example: object,
        batches: Iterable[int],
        budget: float = 0,
        least: int = 3,
        settled: object = None,
    ) -> list[tuple[BatchLatency, ...]]:
        time.sleep(wait)
        sizes = dict.fromkeys(signature.max_samples(size) for size in batches)
        return [
            tuple(BatchLatency(rows=size, seconds=size / 1000 / (speed if place else 1)) for size in sizes)
            for place, _ in enumerate(engines)
        ]

    return measure
