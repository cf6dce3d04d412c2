"""Attachments that cosign finds by tags: ``sha256-<hex>.sig`` for signatures, ``sha256-<hex>.att`` for attestations.

A manifest under such a tag has one layer for each signature. All signers extend the same manifest, so it is read,
extended and written, as the index of attachments in :mod:`ingot.model_store.registry.referrers` is.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any, Final

from ingot.errors import InvalidArchive, InvalidArgument, PermissionDenied, Unavailable
from ingot.model_store.blobs.blobs import Blobs
from ingot.model_store.blobs.descriptor import MAX_DOCUMENT_BYTES, Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import attachments, manifest
from ingot.model_store.references import attachments_tag
from ingot.model_store.registry.blobs import RegistryBlobs

_TRIES = 8
_SETTLE_SECONDS = 0.1
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"


def attached(blobs: RegistryBlobs, digest: str) -> tuple[Descriptor, ...]:
    """Return the manifests under cosign's tags of an archive. Unusable ones do not affect the archive.

    Raises:
        Unavailable: the registry cannot be reached.
    """
    found = []
    for kind, suffix in attachments.COSIGN_SUFFIXES.items():
        try:
            there = blobs.get_manifest(attachments_tag(digest) + suffix)
        except (InvalidArgument, PermissionDenied):  # without them the archive is unsigned
            continue
        if there is not None and there[0].media_type == manifest.MANIFEST and there[0].size <= MAX_DOCUMENT_BYTES:
            found.append(there[0].model_copy(update={"artifact_type": kind}))
    return tuple(found)


def attach(blobs: RegistryBlobs, digest: str, source: Blobs, added: tuple[Descriptor, ...]) -> None:
    """Add the layers of attachments to the manifests under cosign's tags. The layers are in the registry already.

    Args:
        blobs: the repository.
        digest: the archive's digest.
        source: where the manifests of the attachments are read.
        added: the attachments; those of other tools are skipped.

    Raises:
        InvalidArchive: the tag holds something other than a manifest.
        Unavailable: others write it all the time, or the registry cannot be reached.
    """
    for kind, suffix in attachments.COSIGN_SUFFIXES.items():
        layers = [layer for item in added if item.artifact_type == kind for layer in _layers(source, item)]
        if layers:
            _extend(blobs, attachments_tag(digest) + suffix, layers)


def _layers(source: Blobs, item: Descriptor) -> list[dict[str, Any]]:
    try:
        document = attachments.load(source, item, item)
    except InvalidArchive:  # it was not copied either
        return []
    return [json.loads(manifest.encode(layer)) for layer in document.layers]


def _extend(blobs: RegistryBlobs, tag: str, layers: list[dict[str, Any]]) -> None:
    for _ in range(_TRIES):
        there = _raw_layers(blobs, tag)
        known = {_identity(layer) for layer in there}
        missing = [layer for layer in layers if _identity(layer) not in known]
        if not missing:
            return
        complete = [*there, *missing]
        scratch = BlobFolder.scratch()
        config = scratch.put(attachments.image_config(str(layer["digest"]) for layer in complete), _CONFIG)
        blobs.copy(scratch, config)
        content = {
            "schemaVersion": 2,
            "mediaType": manifest.MANIFEST,
            "config": json.loads(manifest.encode(config)),
            "layers": complete,
        }
        blobs.put_manifest(tag, json.dumps(content, separators=(",", ":")).encode(), manifest.MANIFEST)
        time.sleep(_SETTLE_SECONDS * random.uniform(1, 2))  # a client that read it before our write has written by then
    raise Unavailable(f"{blobs.client.address}/{blobs.name}:{tag} keeps being changed by other clients; try again")


def _raw_layers(blobs: RegistryBlobs, tag: str) -> list[dict[str, Any]]:
    """Return the layers under a tag as they are: those of other tools may have unknown fields."""
    found = blobs.get_manifest(tag)
    if found is None:
        return []
    try:
        layers = json.loads(found[1])["layers"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidArchive(f"{blobs.client.address}/{blobs.name}:{tag} is not a manifest") from error
    if not isinstance(layers, list) or not all(isinstance(layer, dict) and "digest" in layer for layer in layers):
        raise InvalidArchive(f"{blobs.client.address}/{blobs.name}:{tag} is not a manifest of layers")
    return layers


def _identity(layer: dict[str, Any]) -> str:
    """Return the identity of a signature: its content and its annotation."""
    annotations = layer.get("annotations")
    signature = annotations.get(attachments.COSIGN_PAYLOAD, "") if isinstance(annotations, dict) else ""
    return f"{layer['digest']} {signature}"
