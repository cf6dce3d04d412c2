"""Where archives are kept: what the local store and an OCI registry have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ingot.model_store.archive import Archive
from ingot.model_store.references import Reference
from ingot.model_store.store import Store
from ingot.model_store.tags import ANY
from ingot.model_store.transfer import Transfer


class Place(Protocol):
    """A store or a registry. All its methods raise Unavailable where a registry cannot be reached."""

    def names(self) -> list[str]:
        """Return the names of all models, sorted."""
        ...

    def tags(self, name: str) -> Mapping[str, str]:
        """Return tag -> digest of a model; empty when there is no such model."""
        ...

    def digest_of(self, name: str, tag: str) -> str | None:
        """Return the digest that a model's tag points to; None if there is no such tag. No other tag is looked at.

        Raises:
            InvalidArgument: ``tag`` is no tag.
        """
        ...

    def find(self, reference: str | Reference) -> tuple[Archive, Reference]:
        """Return the archive, with what is attached to it, and the reference with its tag and digest filled in.

        Without a tag it is the highest version, or the only tag; with a digest alone, what has that digest. A registry
        finds that too when no tag points to it; then the tag stays None.

        Raises:
            NotFound: there is no such name, tag or digest; the message lists what there is. Or there are several tags,
                none is a version, and none was named.
        """
        ...

    def push(
        self, archive: Archive, reference: str | Reference, *, expect: str = ANY, transfer: Transfer | None = None
    ) -> Reference:
        """Copy an archive, with what is attached to it, and point a tag at it.

        Raises:
            AlreadyExists: the version holds another archive.
            TagMoved: the tag is not what is expected; if it is not from the start, nothing is copied.
        """
        ...

    def promote(self, reference: str | Reference, alias: str, *, expect: str = ANY) -> Reference:
        """Point an alias at what a reference names.

        Raises:
            InvalidArgument: ``alias`` is no tag.
            AlreadyExists: ``alias`` is a version that holds another archive.
            TagMoved: the alias is not what is expected.
        """
        ...

    def remove(self, reference: str | Reference, *, expect: str = ANY) -> Reference:
        """Remove a tag, if it points to the reference's digest, where it has one, and to what is expected.

        Raises:
            NotFound: there is no such tag, or it points to another digest than the reference's.
            TagMoved: the tag is not what is expected.
        """
        ...

    def attach(self, archive: Archive, name: str) -> None:
        """Store what is attached to an archive that is there already, beside what was attached before."""
        ...


def open_place(reference: str | Reference, store: Store, chunk_bytes: int | None = None) -> tuple[Place, Reference]:
    """Return where a reference leads, and the reference, parsed.

    Args:
        reference: ``name:tag`` of the local store, or ``oci://host/name:tag``.
        store: the local one.
        chunk_bytes: how much is uploaded to a registry in one request; None sends each blob whole.

    Raises:
        InvalidArgument: it is no reference.
    """
    ref = reference if isinstance(reference, Reference) else Reference.parse(reference)
    if ref.registry is None:
        return store, ref
    from ingot.model_store.registry import Registry

    return Registry(ref.registry, chunk_bytes=chunk_bytes), ref
