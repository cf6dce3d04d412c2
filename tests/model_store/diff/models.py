"""Archives of small graphs, and their differences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper

from ingot.model_store import Archive, BlobFolder, Descriptor, Evidence, Golden, Serving, add_variant
from ingot.model_store.diff import Diff, VariantDiff, diff
from ingot.model_store.diff.records import GraphDiff, Values
from ingot.model_store.format import manifest, onnx_graph
from ingot.tensors import Array
from tests.model_store import samples

LARGE = np.random.default_rng(0).standard_normal((600, 600)).astype(np.float32)  # over 1 MiB: a separate blob
EVIL = "<b>\x1b]0;owned\x07\nfake line"


def graph(
    *constants: onnx.TensorProto, nodes: Sequence[onnx.NodeProto] = (), opset: Sequence[tuple[str, int]] = (("", 20),)
) -> onnx.ModelProto:
    inner = helper.make_graph(list(nodes), "net", [], [], list(constants))
    imports = [helper.make_opsetid(domain, version) for domain, version in opset]
    return helper.make_model(inner, opset_imports=imports, ir_version=10)


def tensor(name: str, array: Array) -> onnx.TensorProto:
    return numpy_helper.from_array(array, name)


def one(model: onnx.ModelProto | bytes, serving: Serving | None = None, cases: Sequence[Golden] = ()) -> Archive:
    """Return an archive of one variant."""
    blobs = BlobFolder.scratch()
    return Archive.create(blobs, [variant(blobs, model, serving, cases)])


def variant(
    blobs: BlobFolder, model: onnx.ModelProto | bytes, serving: Serving | None = None, cases: Sequence[Golden] = ()
) -> Descriptor:
    weights: tuple[Descriptor, ...] = ()
    if isinstance(model, bytes):
        packed = blobs.put(model, manifest.WEIGHT)
    else:
        packed, weights = onnx_graph.pack(ir.from_proto(model), blobs)
    return add_variant(blobs, serving or samples.serving(), packed, weights, cases)


def with_evidence(**fields: Any) -> Serving:
    return samples.serving().model_copy(update={"evidence": Evidence(**fields)})


def variants(found: Diff) -> dict[str, VariantDiff]:
    return {item.name: item for item in found.variants}


def graphs(before: onnx.ModelProto, after: onnx.ModelProto) -> GraphDiff:
    (found,) = diff(one(before), one(after)).variants
    assert found.graph is not None
    return found.graph


def values(before: Array, after: Array) -> Values:
    """Return how one tensor changed, read out of graphs."""
    (change,) = graphs(graph(tensor("w", before)), graph(tensor("w", after))).changed
    assert change.values is not None
    return change.values
