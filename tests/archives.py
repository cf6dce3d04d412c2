"""Archives of graphs that tests write themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.model_store import Archive, BlobFolder, Golden, Provenance, Serving, add_variant
from ingot.model_store.format import manifest
from ingot.tensors import Signature

BY_HAND = Provenance(source="by hand", created="2026-01-02T03:04:05Z")


def archive_of(
    name: str,
    graph: bytes,
    signature: Signature,
    goldens: Sequence[Golden] = (),
    files: Mapping[str, bytes] | None = None,
    **properties: Any,
) -> Archive:
    """Return an archive with one variant; ``files`` are those of its steps, ``properties`` further ones of Serving."""
    variant = {"variant": "fp32", "format": "onnx", "precision": "fp32", "provenance": BY_HAND, **properties}
    serving, blobs = Serving(name=name, signature=signature, **variant), BlobFolder.scratch()
    weight = blobs.put(graph, manifest.WEIGHT)
    return Archive.create(blobs, [add_variant(blobs, serving, weight, (), [*goldens], None, files)])
