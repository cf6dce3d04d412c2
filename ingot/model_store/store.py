"""The local store: a folder of archives under names and tags, safe for many processes.

STORE/
  store.json                    the schema's version
  blobs/sha256/<hex>            every blob, once, read-only
  repos/<name>/index.json       tag -> archive
  repos/<name>/reflog.jsonl     what each tag pointed to, when, and by whom
  repos/<name>/.lock            held only while index.json is replaced; readers take no lock
  tmp/                          blobs that are being written
  leases/                       what pushes under way need
  derived/                      what engines made of archives, to load faster; can be deleted at any time
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ingot.errors import AlreadyExists, InvalidArchive, InvalidArgument, NotFound
from ingot.model_store import attachments, manifest
from ingot.model_store.archive import Archive
from ingot.model_store.blobs import BlobFolder
from ingot.model_store.files import atomic_file
from ingot.model_store.leases import Leases
from ingot.model_store.manifest import Descriptor
from ingot.model_store.references import (
    Reference,
    alias_of,
    attachments_tag,
    choose,
    is_attachments_tag,
    is_version,
    next_version,
)
from ingot.model_store.tags import ANY, Action, Change, Move, Tags, check_expected, targets
from ingot.model_store.transfer import Transfer


class _Schema(BaseModel):
    """``store.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1


def default_root() -> Path:
    """Return ``$INGOT_HOME``, or ``~/.ingot``."""
    return Path(os.environ.get("INGOT_HOME") or Path.home() / ".ingot")


class Store:
    """Archives by name and tag.

    Args:
        root: the folder; by default ``$INGOT_HOME``, else ``~/.ingot``. It is made by the first push.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.root = Path(root) if root is not None else default_root()
        self.tmp = self.root / "tmp"
        self.blobs = BlobFolder(self.root / "blobs", tmp=self.tmp, durable=True)
        self.leases = Leases(self.root)

    def push(
        self, archive: Archive, reference: str | Reference, *, expect: str = ANY, transfer: Transfer | None = None
    ) -> Reference:
        """Copy an archive into the store, with what is attached to it, and point a tag at it.

        A version tag (``1``, ``1.2.0``, ``v2``) is never moved; pushing the same archive again changes nothing.
        Any other tag is an alias and moves.

        Args:
            archive: from anywhere.
            reference: ``name:tag``.
            expect: the digest that the tag must have now, ``"none"`` for a new tag; by default anything.
            transfer: is told of what is copied.

        Returns:
            The reference with the archive's digest.

        Raises:
            InvalidArgument: the reference has no tag, or the store cannot be written.
            InvalidArchive: a blob of the archive is damaged; no tag is moved.
            AlreadyExists: the version holds another archive.
            TagMoved: the tag is not what is expected.
        """
        ref = _parse(reference)
        if ref.tag is None or not ref.pushable:
            raise InvalidArgument(f"'{ref}' cannot be pushed to; write name:tag, such as {ref.name}:1")
        with self._writing():
            check_expected(f"{ref.name}:{ref.tag}", self.digest_of(ref.name, ref.tag), expect)
            self._check_free(ref.name, ref.tag, archive.digest)
            archive.check_own()
            with self.leases.hold(_digests(archive)):
                archive.copy_to(self.blobs, transfer)
                return self._move(ref.name, ref.tag, archive, "push", expect)

    def promote(self, reference: str | Reference, alias: str, *, expect: str = ANY) -> Reference:
        """Point an alias, such as ``prod``, at what a reference names. One step: readers see the old or the new.

        Args:
            reference: what is promoted.
            alias: a tag of the same model.
            expect: the digest that the alias must have now, ``"none"`` for a new one; by default anything.

        Returns:
            The alias with the digest.

        Raises:
            NotFound: the store holds no such name, tag or digest.
            AlreadyExists: ``alias`` is a version that holds another archive.
            TagMoved: the alias is not what is expected; it is left alone.
        """
        archive, found = self.find(reference)
        target = alias_of(found.name, alias)
        with self._writing(), self.leases.hold(_digests(archive)):
            return self._move(found.name, str(target.tag), archive, "promote", expect)

    def rollback(self, reference: str | Reference, *, expect: str = ANY) -> Reference:
        """Point an alias at what it pointed to before. A second rollback goes one further back.

        Raises:
            NotFound: nothing is known of before, or it was collected.
            InvalidArgument: the reference is no alias; a version never changes.
        """
        ref = _parse(reference)
        tags = self.of(ref.name)
        if ref.tag is None or not ref.pushable:
            raise InvalidArgument(f"'{ref}' cannot be rolled back; name an alias, such as {ref.name}:prod")
        before = [digest for digest in targets(tags.history(), ref.tag)[:-1] if digest is not None]
        if not before:
            raise NotFound(f"'{ref}' has nothing to go back to; ingot history {ref.name} shows what is known")
        try:
            archive = self._archive(ref.name, self.descriptor(before[-1]))
        except InvalidArchive as error:
            raise NotFound(f"'{ref}' pointed to {before[-1]} before, which is not whole any more: {error}") from error
        with self._writing(), self.leases.hold(_digests(archive)):
            return self._move(ref.name, ref.tag, archive, "rollback", expect)

    def remove(self, reference: str | Reference, *, expect: str = ANY) -> Reference:
        """Remove a tag. Its blobs stay until they are collected, and :meth:`rollback` brings the tag back until then.

        Raises:
            NotFound: there is no such tag.
        """
        ref = _parse(reference)
        if ref.tag is None or ref.variant:
            raise InvalidArgument(f"'{ref}' cannot be removed; name a tag, such as {ref.name}:1")
        found = self.resolve(ref)
        with self._writing(), self.of(ref.name).locked() as change:
            change.replace(ref.tag, None, "remove", expect=found.digest if expect == ANY and found.digest else expect)
        return found

    def attach(self, archive: Archive, name: str) -> None:
        """Store what is attached to an archive that is here already, beside what was attached before.

        Raises:
            NotFound: the archive is not here.
        """
        if archive.digest not in self.tags(name).values():
            raise NotFound(f"the store at {self.root} has no '{name}@{archive.digest}'")
        with self._writing(), self.leases.hold(_digests(archive)):
            archive.copy_attached(self.blobs)
            with self.of(name).locked() as change:
                self._attach(change, archive)

    def get(self, reference: str | Reference) -> Archive:
        """Return the archive that a reference names; without a tag, the highest version, or the only tag.

        Raises:
            NotFound: the store holds no such name, tag or digest; the message lists what there is.
        """
        return self.find(reference)[0]

    def resolve(self, reference: str | Reference) -> Reference:
        """Return the reference with its tag and digest filled in.

        Raises:
            NotFound: the store holds no such name, tag or digest.
        """
        return self.find(reference)[1]

    def find(self, reference: str | Reference) -> tuple[Archive, Reference]:
        """Return the archive and the resolved reference, both from one reading of the tags.

        Raises:
            NotFound: the store holds no such name, tag or digest.
        """
        ref = _parse(reference)
        entries = self._entries(ref.name)
        if not entries:
            known = ", ".join(self.names()) or "nothing yet"
            raise NotFound(f"the store at {self.root} has no model '{ref.name}'; it holds: {known}")
        tag = choose({tag: entry.digest for tag, entry in entries.items()}, ref)
        if tag is None:
            raise NotFound(f"the store at {self.root} has no '{ref}'; '{ref.name}' has: {', '.join(entries)}")
        found = Reference(ref.name, tag, entries[tag].digest, ref.variant)
        return self._archive(ref.name, entries[tag]), found

    def names(self) -> list[str]:
        """Return the names of all models, sorted.

        Raises:
            InvalidArgument: the store is not a folder.
        """
        self._check()
        repos = self.root / "repos"
        found = (path.parent.relative_to(repos).as_posix() for path in repos.rglob("index.json") if path.is_file())
        return sorted(found)

    def tags(self, name: str) -> dict[str, str]:
        """Return tag -> digest of a model; empty when there is no such model."""
        return {tag: entry.digest for tag, entry in self._entries(name).items()}

    def digest_of(self, name: str, tag: str) -> str | None:
        """Return the digest that a model's tag points to; None if there is no such tag.

        Raises:
            InvalidArgument: ``tag`` is no tag.
        """
        return self.tags(name).get(str(alias_of(name, tag).tag))

    def history(self, name: str) -> list[Move]:
        """Return what the tags of a model pointed to, the oldest move first.

        Raises:
            NotFound: the store has no such model.
        """
        self._check()
        moves = self.of(Reference.parse(name).name).history()
        if not moves:
            raise NotFound(f"the store at {self.root} knows nothing of '{name}'; ingot list shows what it holds")
        return moves

    def next_version(self, name: str) -> str:
        """Return the lowest whole version above all that a model has, or had; ``1`` for a new one."""
        return next_version({*self.tags(name), *(move.tag for move in self.of(name).history())})

    def of(self, name: str) -> Tags:
        """Return the tags of a model as they are kept."""
        return Tags(name, self.root / "repos" / name)

    def descriptor(self, digest: str) -> Descriptor:
        """Return the descriptor of an archive by its digest alone.

        Raises:
            InvalidArchive: its index is not here.
        """
        found = Descriptor(media_type=manifest.INDEX, digest=digest, size=0)
        try:
            return found.model_copy(update={"size": self.blobs.path(found).stat().st_size})
        except FileNotFoundError:
            raise InvalidArchive(f"blob {digest} is missing") from None

    def _archive(self, name: str, descriptor: Descriptor) -> Archive:
        listing = self.of(name).read().get(attachments_tag(descriptor.digest))
        attached = attachments.listed(self.blobs, listing) if listing else ()
        return Archive(self.blobs, descriptor, attached)

    def _entries(self, name: str) -> dict[str, Descriptor]:
        self._check()
        return {tag: entry for tag, entry in self.of(name).read().items() if not is_attachments_tag(tag)}

    def _check(self) -> None:
        """Raise InvalidArgument if the store is no folder, or is of a newer schema."""
        if self.root.exists() and not self.root.is_dir():
            raise InvalidArgument(f"the store at {self.root} cannot be read: it is not a folder")
        path = self.root / "store.json"
        try:
            manifest.decode(_Schema, path.read_bytes(), str(path))
        except FileNotFoundError:
            return  # of a version that wrote none, or not made yet
        except OSError as error:
            raise InvalidArgument(f"the store at {self.root} cannot be read: {error.strerror}") from error
        except InvalidArchive as error:
            raise InvalidArgument(
                f"the store at {self.root} was made by a newer Ingot, or is damaged: {error}"
            ) from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Make sure that the store can be written, and say so where it cannot."""
        self._check()
        try:
            path = self.root / "store.json"
            if not path.exists():
                self.root.mkdir(parents=True, exist_ok=True)
                with atomic_file(path, durable=True) as stream:
                    stream.write(manifest.encode(_Schema()))
            yield
        except OSError as error:
            raise InvalidArgument(f"the store at {self.root} cannot be written: {error.strerror or error}") from error

    def _move(self, name: str, tag: str, archive: Archive, action: Action, expect: str) -> Reference:
        with self.of(name).locked() as change:
            self._check_free(name, tag, archive.digest)
            change.replace(tag, archive.descriptor, action, expect=expect)
            if archive.attached and action == "push":
                self._attach(change, archive)
        return Reference(name, tag, archive.digest)

    def _attach(self, change: Change, archive: Archive) -> None:
        tag = attachments_tag(archive.digest)
        listing = change.tags.read().get(tag)
        before = attachments.listed(self.blobs, listing) if listing else ()
        merged = manifest.encode(attachments.merge(before, archive.attached))
        change.replace(tag, self.blobs.put(merged, manifest.INDEX), "push")

    def _check_free(self, name: str, tag: str, digest: str) -> None:
        """Raise AlreadyExists if a tag is a version that holds, or held before it was removed, another archive."""
        if not is_version(tag):
            return
        entries = self._entries(name)
        taken = entries[tag].digest if tag in entries else None
        if taken is None:
            held = [move.new for move in self.of(name).history() if move.tag == tag and move.new is not None]
            taken = held[-1] if held else None
        if taken not in (None, digest):
            raise AlreadyExists(
                f"'{name}:{tag}' {'holds' if tag in entries else 'held'} another archive ({str(taken)[:19]}...) and a "
                f"version never changes; push as another version, such as {name}:{self.next_version(name)}"
            )


def _parse(reference: str | Reference) -> Reference:
    ref = reference if isinstance(reference, Reference) else Reference.parse(reference)
    if ref.registry is not None:
        raise InvalidArgument(f"'{ref}' is in a registry, not in the local store; ingot pull brings it here")
    return ref


def _digests(archive: Archive) -> list[str]:
    return [item.digest for item in (*archive.descriptors(), *archive.attached_descriptors())]
