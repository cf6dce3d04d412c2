"""What is attached to an archive in a registry: its referrers API, or else an index under a tag of its own.

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
from ingot.model_store.registry.blobs import RegistryBlobs
from ingot.model_store.registry.client import Request
from ingot.model_store.registry.pages import MAX_ITEMS, pages

_TRIES = 8
_SETTLE_SECONDS = 0.1


def attached(blobs: RegistryBlobs, digest: str) -> tuple[Descriptor, ...]:
    """Return those attachments of an archive that Ingot knows.

    Raises:
        InvalidArchive: there are more than there can be.
        Unavailable: the registry cannot be reached.
    """
    entries = _from_api(blobs, digest)
    if entries is None:
        entries = _from_tag(blobs, digest)
    return attachments.known(_parsed(entries))


def check_replaceable(blobs: RegistryBlobs, digest: str) -> None:
    """Check that what is attached to an archive can be taken out of its list.

    Raises:
        Unsupported: the registry makes the list itself.
    """
    if _from_api(blobs, digest) is not None:
        raise Unsupported(
            f"{blobs.client.address} lists by itself what is attached to '{blobs.name}@{digest}': delete the "
            "signatures there (oras discover shows their digests), then sign without --replace"
        )


def attach(blobs: RegistryBlobs, digest: str, added: tuple[Descriptor, ...], *, replace: bool = False) -> None:
    """List attachments, whose manifests are there already, beside those that are listed.

    A registry with the referrers API does so by itself. Otherwise an index is read, added to and written again; as
    registries have no compare-and-swap, it is read once more afterwards, and written again if somebody else wrote it.

    Args:
        blobs: the repository.
        digest: the archive's.
        added: what is listed.
        replace: list it instead of all signatures that are listed at first.

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
            dropped = {item.digest for item in attachments.known(_parsed(there))} - {item.digest for item in added}
        entries = [entry for entry in there if str(entry.get("digest")) not in dropped]
        missing = _missing(entries, added)
        if not missing and len(entries) == len(there):
            return
        entries += [json.loads(manifest.encode(item)) for item in missing]
        index = {"schemaVersion": 2, "mediaType": manifest.INDEX, "manifests": entries}
        blobs.put_manifest(attachments_tag(digest), json.dumps(index).encode(), manifest.INDEX)
        time.sleep(_SETTLE_SECONDS * random.uniform(1, 2))  # whoever read it before we wrote has written by then
    raise Unavailable(
        f"what is attached to {digest} could not be listed in {blobs.client.address}/{blobs.name}: "
        "others change the list all the time; try again"
    )


def _from_api(blobs: RegistryBlobs, digest: str) -> list[dict[str, Any]] | None:
    """Return what the referrers API lists; None where the registry has none."""
    if not blobs.client.has_referrers:
        return None
    url = blobs.client.url(f"{blobs.name}/referrers/{digest}")
    request = Request("GET", url, Scope(blobs.name), headers={"Accept": manifest.INDEX})
    entries: list[dict[str, Any]] = []
    # Registries without it answer by all kinds of refusals.
    for answer in pages(blobs.client, request, allow=(400, 403, 404, 405, 406, 501)):
        kind = answer.headers.get("Content-Type", "").partition(";")[0].strip()
        if answer.status != 200 or kind != manifest.INDEX:
            blobs.client.has_referrers = answer.status == 403  # which may be said of this repository alone
            return None
        entries += _entries(answer.content, f"what {blobs.client.address} lists as attached to {digest}")
        if len(entries) > MAX_ITEMS:
            raise InvalidArchive(f"{blobs.client.address} lists more than {MAX_ITEMS} things attached to {digest}")
    return entries


def _from_tag(blobs: RegistryBlobs, digest: str) -> list[dict[str, Any]]:
    found = blobs.get_manifest(attachments_tag(digest))
    return _entries(found[1], f"the index of what is attached to {digest}") if found else []


def _entries(content: bytes, what: str) -> list[dict[str, Any]]:
    """Return an index's entries as they are: those of other tools may have fields and digests that we do not know."""
    try:
        entries = json.loads(content)["manifests"]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidArchive(f"{what} is not an index") from error
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidArchive(f"{what} is not an index")
    return entries


def _parsed(entries: list[dict[str, Any]]) -> Iterator[Descriptor]:
    for entry in entries:
        if entry.get("artifactType") == attachments.SIGNATURE:
            try:
                yield Descriptor.model_validate(entry)
            except ValidationError:  # such as one with a digest of another kind
                continue


def _missing(entries: list[dict[str, Any]], wanted: tuple[Descriptor, ...]) -> list[Descriptor]:
    there = {entry.get("digest") for entry in entries if isinstance(entry.get("digest"), str)}
    return [item for item in wanted if item.digest not in there]
