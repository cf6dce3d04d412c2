"""Where archives are kept: what the local store and a registry have in common, and how users name what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from ingot.errors import InvalidArgument, NotFound, PermissionDenied
from ingot.model_store.blobs.remote import is_object
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import Reference
from ingot.model_store.store.store import Store
from ingot.model_store.store.tags import ANY


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

    def attach(self, archive: Archive, name: str, *, replace: bool = False) -> None:
        """Store what is attached to an archive that is there already, beside or instead of what was attached before.

        Raises:
            NotFound: the archive is not there.
            Unsupported: a registry lists by itself what is attached, so that nothing can be replaced.
        """
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


@dataclass(frozen=True)
class Located:
    """Where an archive is that a user named: in a file, in object storage, or in a place under a reference.

    ``name`` is what the user wrote before the ``#``, and ``variant`` what is behind it. Of ``path``, ``url`` and
    ``place`` with ``reference`` one is given.
    """

    name: str
    variant: str | None = None
    path: Path | None = None
    url: str | None = None
    place: Place | None = None
    reference: Reference | None = None

    def find(self) -> tuple[Archive, Reference]:
        """Open the archive. The reference that comes with it is, of a file, the name that the archive gives itself.

        Raises:
            NotFound: there is no such file, object, name, tag or digest.
            InvalidArchive: it is no archive, or is damaged in the parts that are read here.
            Unavailable: the registry or the object storage cannot be reached.
        """
        if self.place is not None and self.reference is not None:
            with _file_of_that_name(self.name):
                return self.place.find(self.reference)
        if self.path is not None and self.path.suffix == ".onnx" and os.path.isfile(self.path):  # noqa: PTH113
            raise InvalidArgument(f"{self.name} is an ONNX model and no archive; ingot export makes one of it")
        archive = Archive.open(self.url or self.path or self.name)
        return archive, Reference(archive.name, variant=self.variant)

    def open(self) -> Archive:
        """Open the archive; raises as :meth:`find` does."""
        return self.find()[0]

    def whole(self) -> Located:
        """Return this if it names an archive with all its variants.

        Raises:
            InvalidArgument: it names one of them.
        """
        if self.variant is not None:
            raise InvalidArgument(f"'{self.name}' is taken with all its variants here; leave #{self.variant} out")
        return self


def locate(text: str, store: Store) -> Located:
    """Return where an archive is that a user named. Nothing is opened yet.

    Args:
        text: a file (a path that ends in .ingot or .onnx, or begins with ``.``, ``/`` or ``~``), an object's address
            (``s3://bucket/digits.ingot``, ``file:///digits.ingot``), or a reference of the store or of a registry; each
            with or without ``#variant``.
        store: the local one.

    Raises:
        InvalidArgument: it is neither.
    """
    name, variant = split_variant(text)
    if is_file(name):
        return locate_file(text)
    with _file_of_that_name(name):
        place, reference = open_place(name, store)
    return Located(name, variant, place=place, reference=replace(reference, variant=variant))


def locate_file(text: str) -> Located:
    """Return where a file or an object is, whatever the file is called.

    Raises:
        InvalidArgument: nothing can be called that.
    """
    name, variant = split_variant(text)
    if is_object(name):
        return Located(name, variant, url=name)
    if "\0" in name:
        raise InvalidArgument(f"'{name}' cannot be the name of a file")
    return Located(name, variant, path=Path(os.path.expanduser(name)))  # noqa: PTH111 - it has no answer to ~nobody


def is_file(text: str) -> bool:
    """Tell whether a user means a file or an object, and no reference."""
    if "://" in text:
        return is_object(text)
    return text.endswith((".ingot", ".onnx")) or text.startswith((".", "/", "~"))


def split_variant(text: str) -> tuple[str, str | None]:
    """Return what stands before and behind the last ``#``, or None for that; a file may have one in its own name."""
    name, mark, variant = text.rpartition("#")
    # Path's own methods raise on names that are too long.
    if not mark or os.path.exists(os.path.expanduser(text)):  # noqa: PTH110, PTH111
        return text, None
    return name, variant


@contextmanager
def _file_of_that_name(name: str) -> Iterator[None]:
    """Where something is not found or is no reference, tell how a file of that name is meant, if there is one."""
    try:
        yield
    except (NotFound, InvalidArgument, PermissionDenied) as error:
        if os.path.isfile(name):  # noqa: PTH113
            raise NotFound(f"{error}; for the file of that name write ./{name}") from error
        raise
