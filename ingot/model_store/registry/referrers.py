"""Attachments of archives in a registry: its referrers API, or an index under a reserved tag.

Entries of other tools are neither shown nor lost.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from ingot.errors import InvalidArchive, Unavailable, Unsupported
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format import attachments, manifest
from ingot.model_store.references import attachments_tag
from ingot.model_store.registry.auth import Scope
from ingot.model_store.registry.blobs import RegistryBlobs, media_type
from ingot.model_store.registry.client import Request
from ingot.model_store.registry.pages import MAX_ITEMS, pages

_TRIES = 8
_SETTLE_SECONDS = 0.1


def attached(blobs: RegistryBlobs, digest: str) -> tuple[Descriptor, ...]:
    """Return the attachments of an archive that Ingot knows.

    Raises:
        InvalidArchive: there are too many.
        Unavailable: the registry cannot be reached.
    """
    entries = _from_api(blobs, digest)
    if entries is None:
        entries = _from_tag(blobs, digest)
    return attachments.known(_parsed(entries))


def check_replaceable(blobs: RegistryBlobs, digest: str) -> None:
    """Check that attachments can be removed from an archive's list.

    Raises:
        Unsupported: the registry maintains the list itself.
    """
    if _from_api(blobs, digest) is not None:
        raise Unsupported(
            f"{blobs.client.address} maintains the list of attachments of '{blobs.name}@{digest}' itself: delete the "
            "signatures there (oras discover shows their digests), then sign without --replace"
        )


def attach(blobs: RegistryBlobs, digest: str, added: tuple[Descriptor, ...], *, replace: bool = False) -> None:
    """Add attachments, whose manifests exist already, to the list.

    A registry with the referrers API does so itself. Otherwise an index is read, extended and written. Since registries
    have no compare-and-swap, it is read once more, and written again if another client wrote meanwhile.

    Args:
        blobs: the repository.
        digest: the archive's digest.
        added: the attachments.
        replace: drop all signatures that are listed at first.

    Raises:
        Unavailable: others write it all the time, or the registry cannot be reached.
    """
    if not added or digest in blobs.subjects:
        return
    from_api = _from_api(blobs, digest)
    if from_api is not None and not _missing(from_api, added):
        return
    dropped: set[str] | None = None if replace else set()
    for _ in range(_TRIES):
        there = _from_tag(blobs, digest)
        if dropped is None:
            signatures = (item for item in _parsed(there) if item.artifact_type == attachments.SIGNATURE)
            dropped = {item.digest for item in signatures} - {item.digest for item in added}
        entries = [entry for entry in there if str(entry.get("digest")) not in dropped]
        missing = _missing(entries, added)
        if not missing and len(entries) == len(there):
            return
        entries += [json.loads(manifest.encode(item)) for item in missing]
        index = {"schemaVersion": 2, "mediaType": manifest.INDEX, "manifests": entries}
        blobs.put_manifest(attachments_tag(digest), json.dumps(index).encode(), manifest.INDEX)
        time.sleep(_SETTLE_SECONDS * random.uniform(1, 2))  # a client that read it before our write has written by then
    raise Unavailable(
        f"the attachments of {digest} could not be listed in {blobs.client.address}/{blobs.name}: "
        "other clients keep changing the list; try again"
    )


def _from_api(blobs: RegistryBlobs, digest: str) -> list[dict[str, Any]] | None:
    """Return the entries of the referrers API; None if the registry lacks it."""
    if not blobs.client.has_referrers:
        return None
    url = blobs.client.url(f"{blobs.name}/referrers/{digest}")
    request = Request("GET", url, Scope(blobs.name), headers={"Accept": manifest.INDEX})
    entries: list[dict[str, Any]] = []
    # Registries without the API respond with various errors.
    for answer in pages(blobs.client, request, allow=(400, 403, 404, 405, 406, 501)):
        if answer.status != 200 or media_type(answer) != manifest.INDEX:
            blobs.client.has_referrers = answer.status == 403  # which may concern this repository only
            return None
        entries += _entries(answer.content, f"{blobs.client.address}'s list of attachments of {digest}")
        if len(entries) > MAX_ITEMS:
            raise InvalidArchive(f"{blobs.client.address} lists more than {MAX_ITEMS} attachments of {digest}")
    return entries


def _from_tag(blobs: RegistryBlobs, digest: str) -> list[dict[str, Any]]:
    found = blobs.get_manifest(attachments_tag(digest))
    return _entries(found[1], f"the index of attachments of {digest}") if found else []


def _entries(content: bytes, what: str) -> list[dict[str, Any]]:
    """Return an index's raw entries: those of other tools may have unknown fields and digests."""
    try:
        entries = json.loads(content)["manifests"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidArchive(f"{what} is not an index") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArchive(f"{what} is not an index")
    return entries


def _parsed(entries: list[dict[str, Any]]) -> Iterator[Descriptor]:
    for entry in entries:
        if entry.get("artifactType") in attachments.KINDS:
            try:
                yield Descriptor.model_validate(entry)
            except ValidationError:  # such as a digest of another algorithm
                continue


def _missing(entries: list[dict[str, Any]], wanted: tuple[Descriptor, ...]) -> list[Descriptor]:
    there = {entry.get("digest") for entry in entries if isinstance(entry.get("digest"), str)}
    return [item for item in wanted if item.digest not in there]
