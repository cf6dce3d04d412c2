"""An OCI registry as a place for archives: any server that implements the distribution specification."""

from __future__ import annotations

import json
from collections.abc import Callable

from ingot.errors import AlreadyExists, InvalidArchive, InvalidArgument, NotFound, PermissionDenied, Unsupported
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format import attachments, manifest
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import (
    Reference,
    RegistryAddress,
    alias_of,
    is_version,
    latest,
    moved,
    next_version,
    some,
    valid_name,
)
from ingot.model_store.registry import cosign_tags, pages, referrers
from ingot.model_store.registry import credentials as credential_files
from ingot.model_store.registry.blobs import RegistryBlobs
from ingot.model_store.registry.client import Client
from ingot.model_store.registry.credentials import Credentials
from ingot.model_store.registry.retries import Retries
from ingot.model_store.store.tags import ANY, check_expected

_WORKERS = 8


class Registry:
    """Archives in an OCI registry.

    Registries have no compare-and-swap: the expected value of a tag is checked just before it is moved, and if two
    clients move it simultaneously, the last one wins.

    Args:
        address: such as ``oci://registry.local:5000``.
        credentials: for all repositories; by default those of ``docker login`` and similar tools.
        chunk_bytes: size of upload requests, which can be resumed; by default each blob is sent whole, which every
            registry supports.
        retries: how calls are retried.
    """

    def __init__(
        self,
        address: RegistryAddress | str,
        *,
        credentials: Credentials | None = None,
        chunk_bytes: int | None = None,
        retries: Retries | None = None,
    ):
        if chunk_bytes is not None and chunk_bytes < 1:
            raise InvalidArgument(f"chunks of {chunk_bytes} bytes cannot be sent; chunk_bytes must be 1 or more")
        self.address = RegistryAddress.parse(address) if isinstance(address, str) else address
        self._chunk_bytes = chunk_bytes
        self._client = Client(self.address, self._credentials(credentials), retries)

    def names(self) -> list[str]:
        """Return the names of all repositories, sorted. They may hold other artifacts than archives.

        Raises:
            Unsupported: the registry does not list them, like most large ones.
        """
        try:
            found = pages.names(self._client)
        except (InvalidArgument, PermissionDenied) as error:
            raise Unsupported(f"{self.address} does not list its models: {error}; name one") from error
        if found is None:
            raise Unsupported(f"{self.address} does not list its models; name one, such as {self.address}/team/digits")
        return sorted(found)

    def tags(self, name: str) -> dict[str, str]:
        """Return tag -> digest of a model; empty if there is no such model."""
        blobs = self._blobs(name)
        tags = pages.tags(self._client, blobs.name)
        digests: dict[str, str | None] = {}

        def ask(tag: str) -> None:
            digests[tag] = blobs.digest_of(tag)

        Transfer().each(ask, tags, _WORKERS)
        return {tag: digest for tag in tags if (digest := digests[tag]) is not None}

    def digest_of(self, name: str, tag: str) -> str | None:
        """Return the digest that a model's tag points to; None if there is no such tag. Other tags are not read.

        Raises:
            InvalidArgument: ``tag`` is not a tag.
        """
        return self._blobs(name).digest_of(str(alias_of(name, tag).tag))

    def find(self, reference: str | Reference) -> tuple[Archive, Reference]:
        """Return the archive with its attachments, and the reference with its tag and digest filled in.

        A reference by digest alone gets a tag only if one points to that digest.

        Raises:
            NotFound: there is no such name, tag or digest; the message lists those that exist.
            InvalidArchive: it is not an archive, or its content does not match its digest.
        """
        ref = self._parse(reference)
        blobs = self._blobs(ref.name)
        tag = ref.tag
        if tag is None and ref.digest is None:
            tag = self._latest(blobs, ref)
        found = blobs.get_manifest(tag or str(ref.digest))
        if found is None:
            raise self._missing(blobs, ref)
        if ref.digest not in (None, found[0].digest):
            raise NotFound(f"{self.address} has no '{ref}': {moved(ref, found[0].digest)}")
        descriptor, content = found
        archive = self._archive(blobs, descriptor, content, ref)
        if tag is None:
            tag = self._tag_of(descriptor.digest, ref.name)
        return archive, Reference(ref.name, tag, descriptor.digest, ref.variant, registry=self.address)

    def push(
        self, archive: Archive, reference: str | Reference, *, expect: str = ANY, transfer: Transfer | None = None
    ) -> Reference:
        """Copy an archive with its attachments to the registry, and point a tag at it.

        Args:
            archive: from any place. From another repository of this registry no weights are transferred.
            reference: ``name:tag``, with or without this registry's address.
            expect: the digest that the tag must have, ``"none"`` for a new tag; checked before the tag is moved, but
                not atomically.
            transfer: counts copied bytes.

        Raises:
            AlreadyExists: the version holds another archive.
            TagMoved: the tag differs from ``expect``.
            InvalidArchive: a blob of the archive is damaged; no tag is moved.
            InvalidArgument: the registry refuses it.
            Unavailable: the registry cannot be reached.
        """
        ref = self._parse(reference)
        if ref.tag is None or not ref.pushable:
            raise InvalidArgument(f"'{ref}' is not a target of copies; write name:tag, such as {ref.name}:1")
        blobs = self._blobs(ref.name, "push")
        self._check_tag(blobs, ref.tag, archive.digest, expect)
        archive.check_own()
        archive.copy_to(blobs, transfer)
        self._list(blobs, archive)
        return self._move(blobs, ref.tag, archive.descriptor, expect)

    def promote(self, reference: str | Reference, alias: str, *, expect: str = ANY) -> Reference:
        """Point an alias, such as ``prod``, at the archive of a reference.

        Raises:
            InvalidArgument: ``alias`` is not a tag.
            NotFound: there is no such name, tag or digest.
            AlreadyExists: ``alias`` is a version that holds another archive.
            TagMoved: the alias differs from ``expect``.
        """
        target = alias_of(self._parse(reference).name, alias)
        archive, found = self.find(reference)
        return self._move(self._blobs(found.name, "push"), str(target.tag), archive.descriptor, expect)

    def remove(self, reference: str | Reference, *, expect: str = ANY) -> Reference:
        """Remove a tag.

        Many registries can only delete a manifest with all its tags. That is done only if it has no other tag.

        Raises:
            NotFound: there is no such tag, or it points to another digest than the reference's.
            TagMoved: the tag differs from ``expect``.
            Unsupported: the registry deletes nothing, or would delete other tags too.
        """
        ref = self._parse(reference)
        if ref.tag is None or ref.variant:
            raise InvalidArgument(f"'{ref}' cannot be removed; name a tag, such as {ref.name}:1")
        blobs = self._blobs(ref.name)
        digest = blobs.digest_of(ref.tag)
        if digest is None:
            raise self._missing(blobs, ref)
        if ref.digest not in (None, digest):
            raise NotFound(f"{self.address} has no '{ref}': {moved(ref, digest)}")
        check_expected(f"{ref.name}:{ref.tag}", digest, expect)
        self._delete(blobs, ref.tag, digest)
        return Reference(ref.name, ref.tag, digest, registry=self.address)

    def attach(self, archive: Archive, name: str, *, replace: bool = False) -> None:
        """Store the attachments of an existing archive, in addition to or instead of earlier ones.

        Raises:
            NotFound: the archive is not there.
            Unsupported: with ``replace``, the registry has the referrers API, which lists every attachment.
            Unavailable: the registry cannot be reached.
        """
        blobs = self._blobs(name, "push")
        if not blobs.has(archive.descriptor):
            raise NotFound(f"{self.address} has no '{name}@{archive.digest}'")
        if replace:
            referrers.check_replaceable(blobs, archive.digest)
        archive.copy_attached(blobs)
        self._list(blobs, archive, replace=replace)

    def __repr__(self) -> str:
        return f"Registry({str(self.address)!r})"

    def _credentials(self, given: Credentials | None) -> Callable[[str], Credentials | None]:
        netloc = self.address.netloc
        return lambda name: given if given is not None else credential_files.find(netloc, name)

    def _blobs(self, name: str, purpose: str = "") -> RegistryBlobs:
        return RegistryBlobs(self._client, valid_name(name), self._chunk_bytes, purpose)

    def _parse(self, reference: str | Reference) -> Reference:
        ref = reference if isinstance(reference, Reference) else Reference.parse(reference)
        if ref.registry not in (None, self.address):
            raise InvalidArgument(f"'{ref}' is in another registry than {self.address}")
        return Reference(ref.name, ref.tag, ref.digest, ref.variant, registry=self.address)

    def _latest(self, blobs: RegistryBlobs, ref: Reference) -> str:
        """Return the highest version, or the only tag.

        Raises:
            NotFound: there is none.
        """
        tags = pages.tags(self._client, blobs.name)
        if not tags:
            raise self._missing(blobs, ref)
        return latest(tags, ref)

    def _tag_of(self, digest: str, name: str) -> str | None:
        try:
            return next((tag for tag, there in self.tags(name).items() if there == digest), None)
        except (InvalidArgument, PermissionDenied):  # some registries serve manifests but list nothing
            return None

    def _missing(self, blobs: RegistryBlobs, ref: Reference) -> NotFound:
        tags = self._listed(blobs)
        if tags is None:
            return NotFound(f"{self.address} has no '{ref}'")
        if not tags:
            return NotFound(f"{self.address} has no model '{ref.name}'")
        return NotFound(f"{self.address} has no '{ref}'; '{ref.name}' has: {some(tags)}")

    def _listed(self, blobs: RegistryBlobs) -> list[str] | None:
        """Return a model's tags for a message; None if listing them is refused."""
        try:
            return pages.tags(self._client, blobs.name)
        except (InvalidArgument, PermissionDenied):
            return None

    def _archive(self, blobs: RegistryBlobs, descriptor: Descriptor, content: bytes, ref: Reference) -> Archive:
        if descriptor.media_type != manifest.INDEX:
            raise InvalidArchive(f"'{ref}' is not an Ingot archive, but {_kind(descriptor, content)}")
        try:
            attached = (*referrers.attached(blobs, descriptor.digest), *cosign_tags.attached(blobs, descriptor.digest))
            return Archive(blobs, descriptor, attachments.known(attached))
        except InvalidArchive as error:
            raise InvalidArchive(f"'{ref}' is not an Ingot archive, or is damaged: {error}") from error

    @staticmethod
    def _list(blobs: RegistryBlobs, archive: Archive, *, replace: bool = False) -> None:
        """List an archive's attachments, which were copied, where other clients find them."""
        own = tuple(item for item in archive.attached if item.artifact_type in attachments.REFERRERS)
        referrers.attach(blobs, archive.digest, own, replace=replace)
        cosign_tags.attach(blobs, archive.digest, archive.blobs, archive.attached)

    def _check_tag(self, blobs: RegistryBlobs, tag: str, digest: str, expect: str) -> str | None:
        """Return the current digest of a tag if it may be moved to another.

        Raises:
            AlreadyExists: it is a version that holds another archive.
            TagMoved: it differs from ``expect``.
        """
        there = blobs.digest_of(tag)
        check_expected(f"{blobs.name}:{tag}", there, expect)
        if is_version(tag) and there not in (None, digest):
            free = next_version(self._listed(blobs) or (tag,))
            raise AlreadyExists(
                f"'{blobs.name}:{tag}' in {self.address} holds another archive ({str(there)[:19]}...) and a version "
                f"never changes; copy it as another version, such as {blobs.name}:{free}"
            )
        return there

    def _move(self, blobs: RegistryBlobs, tag: str, descriptor: Descriptor, expect: str) -> Reference:
        if self._check_tag(blobs, tag, descriptor.digest, expect) != descriptor.digest:
            with blobs.open(descriptor) as stream:
                blobs.put_manifest(tag, stream.read(), descriptor.media_type)
        return Reference(blobs.name, tag, descriptor.digest, registry=self.address)

    def _delete(self, blobs: RegistryBlobs, tag: str, digest: str) -> None:
        refusals = (400, 404, 405, 415, 501)
        if blobs.delete_manifest(tag, refusals) not in refusals:
            return
        sharing = [other for other, there in self.tags(blobs.name).items() if there == digest and other != tag]
        if sharing:
            raise Unsupported(
                f"{self.address} cannot delete a single tag: with '{blobs.name}:{tag}' it would delete "
                f"{some(sharing)}, which is the same archive"
            )
        if blobs.delete_manifest(digest, refusals) in refusals:
            raise Unsupported(f"{self.address} does not allow deletion; its administrator can enable it")


def _kind(descriptor: Descriptor, content: bytes) -> str:
    """Return the kind of a manifest, as it declares itself."""
    try:
        document = json.loads(content)
        kind = document.get("artifactType") or document["config"]["mediaType"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        kind = descriptor.media_type
    if kind in ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"):
        return "a container image"
    if "manifest.list" in str(kind):
        return "a list of container images"
    return f"'{str(kind)[:100]}'" if kind else "something unknown"
