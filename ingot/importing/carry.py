"""Adding to an archive what came with an imported model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ingot.errors import InvalidArgument
from ingot.model_store.blobs.blobs import read
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import manifest
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.variant import Variant, add_variant

FOLDER = "imported"
"""Stands before the names of documents that came with a model: Ingot's own have such names too."""


def carry(archive: Archive, documents: Mapping[str, bytes], notes: Iterable[str]) -> Archive:
    """Return an archive that has documents and notes more in each of its variants, in the same folder of blobs.

    Args:
        archive: one whose blobs are files.
        documents: files by name, which get ``imported/`` in front.
        notes: for the provenance.

    Raises:
        InvalidArgument: the archive's blobs lie in a file.
    """
    blobs, notes = archive.blobs, tuple(notes)
    if not isinstance(blobs, BlobFolder):
        raise InvalidArgument(f"the archive '{archive.name}' is in a file, which is not changed; unpack it first")
    if not documents and not notes:
        return archive
    more = {f"{FOLDER}/{name}": content for name, content in documents.items()}
    return Archive.create(blobs, [_with(variant, blobs, more, notes) for variant in archive.variants])


def _with(variant: Variant, blobs: BlobFolder, documents: Mapping[str, bytes], notes: tuple[str, ...]) -> Descriptor:
    provenance = variant.serving.provenance
    provenance = provenance.model_copy(update={"notes": (*provenance.notes, *notes)})
    own = {
        layer.annotations[manifest.FILEPATH]: read(blobs, layer)
        for layer in variant.manifest.layers
        if layer.media_type == manifest.DOCUMENT
    }
    serving = variant.serving.model_copy(update={"provenance": provenance})
    return add_variant(blobs, serving, variant.graph, variant.weights, variant.goldens(), {**own, **documents})
