"""Garbage collection of a store: unreferenced blobs, remains of interrupted copies, and derived files."""

from __future__ import annotations

import contextlib
import math
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from ingot.errors import InvalidArchive, write_error
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import attachments, manifest
from ingot.model_store.format.archive import Archive
from ingot.model_store.references import attachments_tag, is_attachments_tag
from ingot.model_store.store.derived import DerivedCache
from ingot.model_store.store.leases import Leases, is_locked
from ingot.model_store.store.tags import Move, Tags, targets

GRACE = timedelta(days=1)
KEPT_MOVES = 10
UNUSED = timedelta(days=30)
"""Additional time after the grace for which derived files of kept archives may be unused."""


class Store(Protocol):
    """The required interface of a store, which itself calls :func:`discard`."""

    root: Path
    tmp: Path
    blobs: BlobFolder
    leases: Leases

    def names(self) -> list[str]: ...
    def of(self, name: str) -> Tags: ...
    def descriptor(self, digest: str) -> Descriptor: ...
    def open(self, descriptor: Descriptor, entries: Mapping[str, Descriptor]) -> Archive: ...


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of a collection: removed files (with ``dry_run``: candidates), their bytes, and kept blobs.

    ``waiting`` unneeded files of ``waiting_size`` bytes are still within the grace time.
    """

    files: tuple[Path, ...]
    size: int
    kept: int
    dry_run: bool
    waiting: int = 0
    waiting_size: int = 0


def collect(
    store: Store, *, grace: timedelta = GRACE, keep_moves: int = KEPT_MOVES, dry_run: bool = False
) -> Collected:
    """Remove everything that no tag, no recent move of a tag, and no running push refers to.

    Args:
        store: the store.
        grace: files written, and targets of tags, within this time are kept: they may be about to be used.
        keep_moves: number of previous targets of each alias to keep for rollbacks.
        dry_run: remove nothing.

    Raises:
        InvalidArchive: a tag's archive is damaged, so that its blobs are unknown; nothing is removed.
        InvalidArgument: the store cannot be written.
    """
    since = datetime.now(UTC) - grace
    names = store.names()
    if not store.root.exists():
        return Collected(files=(), size=0, kept=0, dry_run=dry_run)
    try:
        with store.leases.closed() as leased:
            needed = set(leased)
            graced: set[str] = set()
            for name in names:
                needing, lately = _reachable(store, name, since, keep_moves, leased, dry_run=dry_run)
                needed |= needing
                graced |= lately
            marked = needed | graced
            found = [(path, _size(path)) for path in _garbage(store, marked, leased, since.timestamp())]
            removed = [(path, size) for path, size in found if dry_run or _remove(path, since.timestamp())]
            files = tuple(path for path, _ in removed)
            gone = {path for path, _ in found}
            waiting = [_size(path) for path in _loose(store, needed, leased, math.inf) if path not in gone]
            total = sum(size for _, size in removed)
            return Collected(
                files=files,
                size=total,
                kept=len(marked),
                dry_run=dry_run,
                waiting=len(waiting),
                waiting_size=sum(waiting),
            )
    except OSError as error:
        raise write_error(f"the store at {store.root} cannot be written", error) from error


def discard(store: Store, descriptors: Iterable[Descriptor]) -> None:
    """Remove the blobs and partial files of a failed push, except those that are still referenced.

    Raises:
        InvalidArchive: a tag's archive is damaged, so that its blobs are unknown; nothing is removed.
        OSError: the store cannot be written.
    """
    with store.leases.closed() as leased:
        needed = set(leased)
        since = datetime.now(UTC) - GRACE
        for name in store.names():
            needed.update(*_reachable(store, name, since, KEPT_MOVES, leased, dry_run=True))
        for item in descriptors:
            if item.digest not in needed:
                store.blobs.path(item).unlink(missing_ok=True)
                (store.tmp / f"{item.hex}.part").unlink(missing_ok=True)


def _reachable(
    store: Store, name: str, since: datetime, keep_moves: int, leased: set[str], *, dry_run: bool
) -> tuple[set[str], set[str]]:
    """Return the digests of all blobs that a model needs, and of those that it needed recently.

    Attachments of archives that are gone and not being pushed are dropped.
    """
    tags = store.of(name)
    with contextlib.nullcontext() if dry_run else tags.locked() as change:
        there = tags.read()
        archives = {entry.digest: entry for tag, entry in there.items() if not is_attachments_tag(tag)}
        marked: set[str] = set()
        for descriptor in archives.values():
            try:
                marked |= _blobs(store, descriptor, there)
            except InvalidArchive as error:
                raise InvalidArchive(
                    f"nothing was collected, as the blobs of '{name}@{descriptor.digest}' are unknown: {error}; "
                    "see ingot store fsck, then copy the archive here again (ingot copy), or remove its tags"
                ) from error
        history = tags.history()
        graced: set[str] = set()
        for digests, found in ((_earlier(history, there, keep_moves), marked), (_recent(history, since), graced)):
            for digest in set(digests) - set(archives):
                with contextlib.suppress(InvalidArchive):  # collected earlier with a shorter grace
                    descriptor = store.descriptor(digest)
                    found |= _blobs(store, descriptor, there)
                    archives[digest] = descriptor
        living = {attachments_tag(digest) for digest in archives}
        for tag in there:
            if not is_attachments_tag(tag) or tag in living:
                continue
            hexadecimal = tag.removeprefix("sha256-")
            if (store.blobs.folder / hexadecimal).exists() or f"sha256:{hexadecimal}" in leased:
                # Attachments arrive before their archive and leave after it. The archive may be restored, or belong to
                # another model.
                marked |= _attached(store, tag, there[tag])
            elif change is not None:
                change.replace(tag, None, "remove")
    return marked, graced


def _recent(history: list[Move], since: datetime) -> Iterator[str]:
    """Yield digests that tags pointed to recently."""
    yield from (move.old for move in history if move.time >= since and move.old is not None)


def _earlier(history: list[Move], there: dict[str, Descriptor], keep_moves: int) -> Iterator[str]:
    """Yield digests that tags can be rolled back to."""
    for tag in there:
        yield from (digest for digest in targets(history, tag)[-keep_moves - 1 :] if digest is not None)


def _blobs(store: Store, descriptor: Descriptor, there: dict[str, Descriptor]) -> set[str]:
    listing = there.get(attachments_tag(descriptor.digest))
    found = {item.digest for item in store.open(descriptor, there).all_descriptors()}
    return found | {listing.digest} if listing else found


def _attached(store: Store, tag: str, listing: Descriptor) -> set[str]:
    """Return the digests of the attachments of an archive without a tag, and of their list."""
    found = {listing.digest}
    subject = Descriptor(media_type=manifest.INDEX, digest=tag.replace("-", ":", 1), size=0)
    with contextlib.suppress(InvalidArchive):
        for descriptor in attachments.listed(store.blobs, listing):
            document = attachments.load(store.blobs, descriptor, subject)
            found.update(item.digest for item in (descriptor, document.config, *document.layers))
    return found


def _garbage(store: Store, marked: set[str], leased: set[str], before: float) -> Iterator[Path]:
    yield from _loose(store, marked, leased, before)
    yield from _derived(DerivedCache(store.root / "derived"), marked, before)


def _loose(store: Store, marked: set[str], leased: set[str], before: float) -> Iterator[Path]:
    """Yield unneeded blobs, and remains of interrupted copies."""
    for path in _files(store.blobs.folder):
        if f"sha256:{path.name}" not in marked and _old(path, before):
            yield path
    unfinished = [*_files(store.tmp), *store.root.glob(".tmp-*"), *(store.root / "repos").rglob(".tmp-*")]
    for path in unfinished:
        # A push that holds a lease may be about to resume a part.
        wanted = path.suffix == ".part" and f"sha256:{path.stem}" in leased
        if path.is_file() and not path.is_symlink() and not wanted and _old(path, before) and not is_locked(path):
            yield path


def _derived(cache: DerivedCache, marked: set[str], before: float) -> Iterator[Path]:
    """Yield derived files of archives that are gone, or that have not been used for long; they can be rebuilt."""
    for path in _files(cache.root):
        if f"sha256:{path.name}" not in marked and _old(path, before):
            yield path
    for entry in cache.entries():
        if f"sha256:{entry.manifest_hex}" not in marked:
            continue
        if _old(entry.record, before - UNUSED.total_seconds()):
            yield entry.path
        yield from (path for path in entry.leftovers() if _old(path, before))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _old(path: Path, before: float) -> bool:
    """Return whether a file was written before a time; False if it does not exist."""
    try:
        return path.stat().st_mtime <= before
    except FileNotFoundError:
        return False


def _size(path: Path) -> int:
    """Return the bytes of a file or folder; files that disappear meanwhile count as zero."""
    total = 0
    for item in path.rglob("*") if path.is_dir() else (path,):
        with contextlib.suppress(FileNotFoundError):
            found = item.stat()
            total += found.st_size if stat.S_ISREG(found.st_mode) else 0
    return total


def _remove(path: Path, before: float) -> bool:
    """Remove a file or folder; return whether it is gone.

    A list of signatures may be written again after it was found to be garbage.
    """
    if path.is_file() and not _old(path, before):
        return False
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    return not path.exists()
