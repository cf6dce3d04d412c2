"""Attachments of an archive, such as signatures: OCI manifests that refer to it as their subject.

Where a place cannot list them otherwise, an index under the tag ``sha256-<hex of the archive>`` does: OCI's referrers
tag schema. Manifests of other kinds, from other tools, are preserved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, Literal

from pydantic import Field

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store.blobs.blobs import Blobs, read_document
from ingot.model_store.blobs.descriptor import MAX_DOCUMENT_BYTES, Descriptor, OCIDocument
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import manifest
from ingot.model_store.format.manifest import Index

SIGNATURE: Final = "application/vnd.ingot.signature.v1"
ENVELOPE: Final = "application/vnd.dsse.envelope.v1+json"
_EMPTY_CONFIG: Final = "application/vnd.oci.empty.v1+json"
MAX_ATTACHMENTS = 64


class Attachment(OCIDocument):
    """An OCI image manifest with one layer and a subject."""

    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = manifest.MANIFEST
    artifact_type: str = Field(max_length=255)
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(min_length=1, max_length=1)
    subject: Descriptor


def make(blobs: BlobFolder, subject: Descriptor, content: bytes) -> Descriptor:
    """Store a signature of ``subject`` and return its manifest's descriptor."""
    document = Attachment(
        artifact_type=SIGNATURE,
        config=blobs.put(b"{}", _EMPTY_CONFIG),
        layers=(blobs.put(content, ENVELOPE),),
        subject=subject.model_copy(update={"annotations": {}}),
    )
    stored = blobs.put(manifest.encode(document), manifest.MANIFEST)
    return stored.model_copy(update={"artifact_type": SIGNATURE})


def load(blobs: Blobs, descriptor: Descriptor, subject: Descriptor) -> Attachment:
    """Read an attachment's manifest.

    Raises:
        InvalidArchive: it is damaged, or attached to another subject.
    """
    document = manifest.decode(Attachment, read_document(blobs, descriptor), f"attachment {descriptor.digest}")
    if document.subject.digest != subject.digest or document.artifact_type != SIGNATURE:
        raise InvalidArchive(f"attachment {descriptor.digest} is not a signature of {subject.digest}")
    return document


def contents(blobs: Blobs, attached: Iterable[Descriptor], subject: Descriptor) -> Iterator[bytes]:
    """Yield the content of each attachment.

    Raises:
        InvalidArchive: one is damaged.
    """
    for descriptor in attached:
        yield read_document(blobs, load(blobs, descriptor, subject).layers[0])


def listed(blobs: Blobs, index: Descriptor) -> tuple[Descriptor, ...]:
    """Return the known attachments in an index of referrers.

    Raises:
        InvalidArchive: the index is damaged.
    """
    entries = manifest.decode(Index, read_document(blobs, index), f"index of attachments {index.digest}").manifests
    return known(entries)


def known(entries: Iterable[Descriptor]) -> tuple[Descriptor, ...]:
    """Return the known attachments without duplicates and without unchecked annotations.

    The number is bounded: lists that exceed the maximum violate the format.
    """
    found = {
        entry.digest: Descriptor(
            media_type=manifest.MANIFEST, digest=entry.digest, size=entry.size, artifact_type=SIGNATURE
        )
        for entry in entries
        if entry.artifact_type == SIGNATURE and entry.size <= MAX_DOCUMENT_BYTES
    }
    return tuple(found.values())[:MAX_ATTACHMENTS]


def merge(before: Iterable[Descriptor], new: Iterable[Descriptor]) -> Index:
    """Return an index of referrers with additional entries. Earlier entries come first, and so are never displaced.

    Raises:
        InvalidArgument: there would be too many.
    """
    merged = {entry.digest: entry for entry in known((*before, *new))}
    if len({entry.digest for entry in (*before, *new)}) > MAX_ATTACHMENTS:
        raise InvalidArgument(
            f"the archive would have over {MAX_ATTACHMENTS} signatures; ingot sign --replace drops the others"
        )
    return Index(manifests=tuple(merged.values()))
