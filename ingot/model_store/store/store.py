"""The local store: a folder of archives under names and tags, safe for many processes.

STORE/
  store.json                    the schema version
  blobs/sha256/<hex>            every blob, once, read-only
  repos/<name>/index.json       tag -> archive
  repos/<name>/reflog.jsonl     the previous targets of each tag, with time and user
  repos/<name>/.lock            held only while index.json is replaced; readers take no lock
  tmp/                          blobs that are being written
  leases/                       blobs that running pushes need
  derived/                      data computed from archives to load faster; may be deleted at any time
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ingot.errors import FULL_DISK, AlreadyExists, IngotError, InvalidArchive, InvalidArgument, ModelNotFound, NotFound
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format import attachments, manifest
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import (
    Reference,
    alias_of,
    attachments_tag,
    choose,
    is_attachments_tag,
    is_version,
    moved,
    next_version,
)
from ingot.model_store.store import gc
from ingot.model_store.store.folder import StoreFolder
from ingot.model_store.store.leases import Leases
from ingot.model_store.store.tags import ANY, NONE, Action, Move, Tags, check_expected, targets

log = logging.getLogger(__name__)


def default_root() -> Path:
    """Return ``$INGOT_HOME``, or ``~/.ingot``."""
    return Path(os.environ.get("INGOT_HOME") or Path.home() / ".ingot")


class Store:
    """Archives by name and tag.

    :class:`ingot.model_store.registry.Registry` has the same methods for an OCI registry.

    Examples:
        >>> store = ingot.Store("store")
        >>> reference = store.push(ingot.Archive.open("net.ingot"), "net:1")
        >>> store.promote("net:1", "prod").tag, sorted(store.tags("net"))
        ('prod', ['1', 'prod'])
        >>> store.get("net:prod").digest == reference.digest
        True

    Args:
        root: the folder; by default ``$INGOT_HOME``, else ``~/.ingot``. It is created by the first push.
    """

    def __init__(self, root: str | os.PathLike[str] | None = None):
        self.root = Path(root) if root is not None else default_root()
        self.tmp = self.root / "tmp"
        self.blobs = BlobFolder(self.root / "blobs", tmp=self.tmp, durable=True)
        self.leases = Leases(self.root)
        self._folder = StoreFolder(self.root)

    def push(
        self,
        archive: Archive,
        reference: str | Reference,
        *,
        expect: str = ANY,
        transfer: Transfer | None = None,
        recheck: bool = False,
    ) -> Reference:
        """Copy an archive with its attachments into the store, and point a tag at it.

        A version tag (``1``, ``1.2.0``, ``v2``) is never moved; pushing the same archive again changes nothing. Any
        other tag is an alias and moves.

        Args:
            archive: from any place.
            reference: ``name:tag``.
            expect: the digest that the tag must have now, ``"none"`` for a new tag; by default anything.
            transfer: counts copied bytes.
            recheck: verify existing blobs instead of trusting their names and sizes.

        Returns:
            The reference with the archive's digest.

        Raises:
            InvalidArgument: the reference has no tag, or the store cannot be written.
            StorageFull: the disk is full; the copied part is removed.
            InvalidArchive: a blob of the archive is damaged; no tag is moved.
            AlreadyExists: the version holds another archive.
            TagMoved: the tag differs from ``expect``.
        """
        ref = _parse(reference)
        if ref.tag is None or not ref.pushable:
            raise InvalidArgument(f"'{ref}' is not a target of copies; write name:tag, such as {ref.name}:1")
        with self._folder.writing():
            self._check_free(ref.name, ref.tag, archive.digest, expect)
            with self._nothing_left_of(archive), self.leases.hold(_digests(archive)):
                sink = self.blobs.verifying() if recheck else self.blobs
                # First, so that the archive never appears without its signatures, even if this process dies.
                self._attach(archive, ref.name, sink)
                archive.copy_to(sink, transfer).check_own()  # of the copy, whose blobs are local and checked
                return self._move(ref.name, ref.tag, archive, "push", expect)

    def promote(self, reference: str | Reference, alias: str, *, expect: str = ANY) -> Reference:
        """Point an alias, such as ``prod``, at the archive of a reference. Readers see the old or the new one.

        Args:
            reference: the archive to promote.
            alias: a tag of the same model.
            expect: the digest that the alias must have now, ``"none"`` for a new one; by default anything.

        Returns:
            The alias with the digest.

        Raises:
            NotFound: the store has no such name, tag or digest.
            AlreadyExists: ``alias`` is a version that holds another archive.
            TagMoved: the alias differs from ``expect``; it is not changed.
        """
        archive, found = self.find(reference)
        target = alias_of(found.name, alias)
        with self._holding(archive):
            return self._move(found.name, str(target.tag), archive, "promote", expect)

    def rollback(self, reference: str | Reference, *, expect: str = ANY, to: str = "", reason: str = "") -> Reference:
        """Point an alias at its previous target. A second rollback goes one further back.

        Args:
            reference: the alias.
            expect: as for :meth:`promote`.
            to: the digest of an earlier target; by default the previous one.
            reason: for the history.

        Raises:
            NotFound: no previous target is known, or it was collected.
            InvalidArgument: the reference is not an alias; versions never change.
        """
        ref = _parse(reference)
        tags = self.of(ref.name)
        if ref.tag is None or not ref.pushable:
            raise InvalidArgument(f"'{ref}' cannot be rolled back; name an alias, such as {ref.name}:prod")
        *earlier, now = targets(tags.history(), ref.tag) or [None]
        before = [to] if to else [digest for digest in earlier if digest is not None]
        if not before:
            raise NotFound(f"'{ref}' has no previous target; ingot store history {ref.name} shows its moves")
        try:
            archive = self.open(self.descriptor(before[-1]), tags.read())
        except InvalidArchive as error:
            raise NotFound(f"'{ref}' pointed to {before[-1]} before, which is now incomplete: {error}") from error
        if not archive.attached:
            archive = self._with_attached_elsewhere(archive, ref.name)
        with self._holding(archive):
            self._attach(archive, ref.name, self.blobs)
            # Expect the target that was read, so that no concurrent move is undone.
            expect = (now or NONE) if expect == ANY else expect
            return self._move(ref.name, ref.tag, archive, "rollback", expect, reason)

    def remove(self, reference: str | Reference, *, expect: str = ANY) -> Reference:
        """Remove a tag. Its blobs are kept until they are collected; until then :meth:`rollback` restores the tag.

        Raises:
            NotFound: there is no such tag.
        """
        ref = _parse(reference)
        if ref.tag is None or ref.variant:
            raise InvalidArgument(f"'{ref}' cannot be removed; name a tag, such as {ref.name}:1")
        tag, entry = self._locate(ref, self._entries(ref.name))  # the archive itself may be damaged
        with self._folder.writing(), self.of(ref.name).locked() as change:
            change.replace(tag, None, "remove", expect=entry.digest if expect == ANY else expect)
        return Reference(ref.name, tag, entry.digest)

    def attach(self, archive: Archive, name: str, *, replace: bool = False) -> None:
        """Store the attachments of an existing archive, in addition to or instead of earlier ones.

        Raises:
            NotFound: the archive is not here.
        """
        if archive.digest not in self.tags(name).values():
            raise NotFound(f"the store at {self.root} has no '{name}@{archive.digest}'")
        with self._folder.writing(), self.leases.hold(_digests(archive)):
            self._attach(archive, name, self.blobs, replace=replace)

    def get(self, reference: str | Reference) -> Archive:
        """Return the archive of a reference; without a tag, the highest version, or the only tag.

        Raises:
            NotFound: the store has no such name, tag or digest; the message lists those that exist.
        """
        return self.find(reference)[0]

    def resolve(self, reference: str | Reference) -> Reference:
        """Return the reference with its tag and digest filled in.

        Raises:
            NotFound: the store has no such name, tag or digest.
        """
        return self.find(reference)[1]

    def find(self, reference: str | Reference) -> tuple[Archive, Reference]:
        """Return the archive and the resolved reference, both from one reading of the tags.

        Raises:
            NotFound: the store has no such name, tag or digest.
        """
        ref = _parse(reference)
        self._folder.check()
        entries = self.of(ref.name).read()
        tag, entry = self._locate(ref, _shown(entries))
        return self.open(entry, entries), Reference(ref.name, tag, entry.digest, ref.variant)

    def names(self) -> list[str]:
        """Return the names of all models, sorted.

        Raises:
            InvalidArgument: the store is not a folder, or a part of it cannot be read.
        """
        return self._folder.names()

    def tags(self, name: str) -> dict[str, str]:
        """Return tag -> digest of a model; empty if there is no such model."""
        return {tag: entry.digest for tag, entry in self._entries(name).items()}

    def digest_of(self, name: str, tag: str) -> str | None:
        """Return the digest that a model's tag points to; None if there is no such tag.

        Raises:
            InvalidArgument: ``tag`` is not a tag.
        """
        return self.tags(name).get(str(alias_of(name, tag).tag))

    def history(self, name: str) -> list[Move]:
        """Return the moves of a model's tags, oldest first.

        Raises:
            NotFound: the store has no such model.
        """
        self._folder.check()
        moves = self.of(Reference.parse(name).name).history()
        if not moves and not self.root.exists():
            raise NotFound(f"there is no store at {self.root} yet")
        if not moves:
            raise NotFound(f"the store at {self.root} has no model '{name}'; ingot store list shows its models")
        return moves

    def next_version(self, name: str) -> str:
        """Return the lowest integer version above all current and former versions; ``1`` for a new model."""
        return next_version({*self.tags(name), *(move.tag for move in self.of(name).history())})

    def of(self, name: str) -> Tags:
        """Return the stored tags of a model.

        Raises:
            InvalidArgument: their folder is a link.
        """
        return self._folder.tags_of(name)

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

    def open(self, descriptor: Descriptor, entries: Mapping[str, Descriptor]) -> Archive:
        """Return an archive with the attachments that the entries of a model list.

        Raises:
            InvalidArchive: one of its documents is missing or damaged.
        """
        return Archive(self.blobs, descriptor, self._listed(entries.get(attachments_tag(descriptor.digest))))

    def _listed(self, listing: Descriptor | None) -> tuple[Descriptor, ...]:
        """Return the attachments in an entry; none if it is damaged, so that the archive remains usable."""
        try:
            return attachments.listed(self.blobs, listing) if listing is not None else ()
        except InvalidArchive as error:
            log.warning("attachments of an archive cannot be read and are ignored: %s", error)
            return ()

    def _locate(self, ref: Reference, entries: Mapping[str, Descriptor]) -> tuple[str, Descriptor]:
        """Return the tag that a reference names, and its archive's descriptor.

        Raises:
            NotFound: it names none.
        """
        if not entries:
            known = ", ".join(name for name in self.names() if self.tags(name)) or "nothing yet"
            raise ModelNotFound(f"the store at {self.root} has no model '{ref.name}'; it holds: {known}")
        tag = choose({tag: entry.digest for tag, entry in entries.items()}, ref)
        if tag is None and ref.tag is not None and ref.tag in entries:
            raise ModelNotFound(f"the store at {self.root} has no '{ref}': {moved(ref, entries[ref.tag].digest)}")
        if tag is None:
            raise ModelNotFound(f"the store at {self.root} has no '{ref}'; '{ref.name}' has: {', '.join(entries)}")
        return tag, entries[tag]

    def _entries(self, name: str) -> dict[str, Descriptor]:
        self._folder.check()
        return _shown(self.of(name).read())

    def _move(self, name: str, tag: str, archive: Archive, action: Action, expect: str, reason: str = "") -> Reference:
        with self.of(name).locked() as change:
            self._check_free(name, tag, archive.digest, expect)
            change.replace(tag, archive.descriptor, action, expect=expect, reason=reason)
        return Reference(name, tag, archive.digest)

    def _attach(self, archive: Archive, name: str, sink: BlobFolder, *, replace: bool = False) -> None:
        """Copy an archive's attachments, and add them to those listed before, unless these are replaced.

        A damaged list is rebuilt from the archive's own attachments.
        """
        if not archive.attached and not replace:
            return
        archive.copy_attached(sink)
        tag = attachments_tag(archive.digest)
        with self.of(name).locked() as change:
            before = () if replace else self._listed(change.tags.read().get(tag))
            merged = attachments.merge(before, archive.attached)
            listing = self.blobs.put(manifest.encode(merged), manifest.INDEX) if merged.manifests else None
            change.replace(tag, listing, "push")

    def _with_attached_elsewhere(self, archive: Archive, name: str) -> Archive:
        """Return an archive with the attachments that another model lists.

        They were dropped here when the archive was collected, which returned when it was pushed to another model.
        """
        tag = attachments_tag(archive.digest)
        for other in self.names():
            with contextlib.suppress(InvalidArchive):  # damage of another model does not matter here
                if other != name and (listing := self.of(other).read().get(tag)) is not None:
                    return Archive(self.blobs, archive.descriptor, self._listed(listing))
        return archive

    @contextmanager
    def _nothing_left_of(self, archive: Archive) -> Iterator[None]:
        """Remove the copied part of an archive if the disk was full, to free the space.

        After any other failure, the copied blobs stay, so that the next push copies only the rest.
        """
        new = [item for item in archive.all_descriptors() if not self.blobs.has(item)]
        try:
            yield
        except OSError as error:
            if error.errno in FULL_DISK:
                with contextlib.suppress(IngotError, OSError):  # the push's own error takes precedence
                    gc.discard(self, new)
            raise

    @contextmanager
    def _holding(self, archive: Archive) -> Iterator[None]:
        """Protect an existing archive from collection.

        Raises:
            NotFound: it was collected already.
        """
        with self._folder.writing(), self.leases.hold(_digests(archive)):
            if not all(self.blobs.has(item) for item in archive.descriptors()):
                raise NotFound(f"'{archive.name}@{archive.digest}' is not complete here, or was just collected")
            yield

    def _check_free(self, name: str, tag: str, digest: str, expect: str) -> None:
        """Check that a tag may be moved, before blobs are copied and again when it is moved.

        Raises:
            TagMoved: it differs from ``expect``.
            AlreadyExists: it is a version that holds, or held before it was removed, another archive.
        """
        entries = self._entries(name)
        check_expected(f"{name}:{tag}", entries[tag].digest if tag in entries else None, expect)
        if not is_version(tag):
            return
        taken = entries[tag].digest if tag in entries else None
        if taken is None:
            held = [move.new for move in self.of(name).history() if move.tag == tag and move.new is not None]
            taken = held[-1] if held else None
        if taken not in (None, digest):
            raise AlreadyExists(
                f"'{name}:{tag}' {'holds' if tag in entries else 'held'} another archive ({str(taken)[:19]}...) and a "
                f"version never changes; copy it as another version, such as {name}:{self.next_version(name)}"
            )


def _parse(reference: str | Reference) -> Reference:
    ref = reference if isinstance(reference, Reference) else Reference.parse(reference)
    if ref.registry is not None:
        raise InvalidArgument(f"'{ref}' is in a registry, not in the local store; ingot copy copies it here")
    return ref


def _digests(archive: Archive) -> list[str]:
    return [item.digest for item in archive.all_descriptors()]


def _shown(entries: Mapping[str, Descriptor]) -> dict[str, Descriptor]:
    return {tag: entry for tag, entry in entries.items() if not is_attachments_tag(tag)}
