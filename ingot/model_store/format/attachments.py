"""Attachments of an archive, such as signatures: OCI manifests that refer to it as their subject.

Where a place cannot list them otherwise, an index under the tag ``sha256-<hex of the archive>`` does: OCI's referrers
tag schema. Cosign's bundles (of version 3) are listed in the same way. Its older signatures and attestations have no
subject: in a registry they are under ``sha256-<hex>.sig`` and ``.att``, elsewhere in the same index. Manifests of other
kinds, from other tools, are preserved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
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
COSIGN_SIGNATURE: Final = "application/vnd.dev.cosign.artifact.sig.v1+json"
COSIGN_ATTESTATION: Final = "application/vnd.dev.cosign.artifact.att.v1+json"
COSIGN_SUFFIXES: Final[Mapping[str, str]] = {COSIGN_SIGNATURE: ".sig", COSIGN_ATTESTATION: ".att"}
"""What cosign appends to the tag of an archive's attachments, by type of attachment."""
BUNDLE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
REFERRERS: Final = (SIGNATURE, BUNDLE)
"""The types of attachments that have a subject."""
SIMPLE_SIGNING: Final = "application/vnd.dev.cosign.simplesigning.v1+json"
COSIGN_PAYLOAD: Final = "dev.cosignproject.cosign/signature"
"""Annotation of a layer with its signature; empty in attestations, whose envelope has it."""
KINDS: Final = (*REFERRERS, *COSIGN_SUFFIXES)
_IMAGE_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
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
    annotations: dict[str, str] | None = None


class CosignManifest(OCIDocument):
    """An OCI image manifest with one layer for each signature."""

    schema_version: Literal[2] = 2
    media_type: Literal["application/vnd.oci.image.manifest.v1+json"] = manifest.MANIFEST
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(min_length=1, max_length=MAX_ATTACHMENTS)


def make(blobs: BlobFolder, subject: Descriptor, content: bytes) -> Descriptor:
    """Store a signature of ``subject`` and return its manifest's descriptor."""
    return _make(blobs, SIGNATURE, subject, blobs.put(content, ENVELOPE))


def make_bundle(blobs: BlobFolder, subject: Descriptor, content: bytes, predicate: str) -> Descriptor:
    """Store a Sigstore bundle with a statement about ``subject`` and return its manifest's descriptor."""
    about = {"dev.sigstore.bundle.content": "dsse-envelope", "dev.sigstore.bundle.predicateType": predicate}
    return _make(blobs, BUNDLE, subject, blobs.put(content, BUNDLE), about)


def _make(
    blobs: BlobFolder, kind: str, subject: Descriptor, layer: Descriptor, annotations: dict[str, str] | None = None
) -> Descriptor:
    document = Attachment(
        artifact_type=kind,
        config=blobs.put(b"{}", _EMPTY_CONFIG),
        layers=(layer,),
        subject=subject.model_copy(update={"annotations": {}}),
        annotations=annotations,
    )
    stored = blobs.put(manifest.encode(document), manifest.MANIFEST)
    return stored.model_copy(update={"artifact_type": kind})


def make_cosign(
    blobs: BlobFolder, kind: str, content: bytes, media_type: str, annotations: Mapping[str, str]
) -> Descriptor:
    """Store a signature or attestation as cosign does, and return its manifest's descriptor."""
    layer = blobs.put(content, media_type, annotations)
    document = CosignManifest(config=blobs.put(image_config([layer.digest]), _IMAGE_CONFIG), layers=(layer,))
    stored = blobs.put(manifest.encode(document), manifest.MANIFEST)
    return stored.model_copy(update={"artifact_type": kind})


def image_config(layers: Iterable[str]) -> bytes:
    """Return the configuration of an image of some layers, which cosign's manifests have."""
    root = {"type": "layers", "diff_ids": list(layers)}
    return json.dumps({"architecture": "", "os": "", "config": {}, "rootfs": root}, separators=(",", ":")).encode()


def load(blobs: Blobs, descriptor: Descriptor, subject: Descriptor) -> Attachment | CosignManifest:
    """Read an attachment's manifest.

    Raises:
        InvalidArchive: it is damaged or too large, or attached to another subject.
    """
    content, what = read_document(blobs, descriptor), f"attachment {descriptor.digest}"
    document: Attachment | CosignManifest
    if descriptor.artifact_type in COSIGN_SUFFIXES:
        document = manifest.decode(CosignManifest, content, what)
    else:
        document = attachment = manifest.decode(Attachment, content, what)
        if attachment.subject.digest != subject.digest or attachment.artifact_type != descriptor.artifact_type:
            raise InvalidArchive(f"{what} is not a signature of {subject.digest}")
    if any(item.size > MAX_DOCUMENT_BYTES for item in (document.config, *document.layers)):
        raise InvalidArchive(f"{what} has more than {MAX_DOCUMENT_BYTES >> 20} MiB")
    return document


def contents(blobs: Blobs, attached: Iterable[Descriptor], subject: Descriptor) -> Iterator[bytes]:
    """Yield the content of each of Ingot's signatures.

    Raises:
        InvalidArchive: one is damaged.
    """
    for descriptor in attached:
        if descriptor.artifact_type != SIGNATURE:
            continue
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
            media_type=manifest.MANIFEST, digest=entry.digest, size=entry.size, artifact_type=entry.artifact_type
        )
        for entry in entries
        if entry.artifact_type in KINDS and entry.size <= MAX_DOCUMENT_BYTES
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
            f"the archive would have over {MAX_ATTACHMENTS} signatures; ingot trust sign --replace drops the others"
        )
    return Index(manifests=tuple(merged.values()))
