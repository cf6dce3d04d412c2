"""Small archives made by hand: the store does not parse the graph, so it can be any bytes."""

from __future__ import annotations

import numpy as np

from ingot.model_store import Archive, BlobFolder, Golden, Provenance, Serving, add_variant
from ingot.model_store.format import manifest
from ingot.tensors import DType, Range, Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(TensorSpec("x", DType.FP32, ("batch", 3)),),
    outputs=(TensorSpec("y", DType.FP32, ("batch", 3)),),
    batch="batch",
    ranges={"batch": Range(1, 64)},
)
GOLDEN = Golden({"x": np.ones((2, 3), np.float32)}, {"y": np.zeros((2, 3), np.float32)})


def serving(name: str = "tiny", variant: str = "fp32", signature: Signature = SIGNATURE) -> Serving:
    return Serving(
        name=name,
        variant=variant,
        format="onnx",
        precision="fp32",
        signature=signature,
        recipe={"name": "static-int8"} if variant == "int8" else None,
        provenance=Provenance(source="by hand", created="2026-01-02T03:04:05Z"),
    )


def archive(graph: bytes = b"a graph", weights: tuple[bytes, ...] = (b"some weights",), name: str = "tiny") -> Archive:
    """Return an archive with the variants int8 and fp32, which share their weights."""
    blobs = BlobFolder.scratch()
    shared = [blobs.put(content, manifest.WEIGHT) for content in weights]
    variants = [
        add_variant(
            blobs, serving(name, variant), blobs.put(graph + variant.encode(), manifest.WEIGHT), shared, [GOLDEN]
        )
        for variant in ("int8", "fp32")
    ]
    return Archive.create(blobs, variants)
