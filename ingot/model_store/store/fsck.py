"""Checking a store: whether every archive is complete and every blob matches its digest."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ingot.errors import IngotError, InvalidArchive, InvalidArgument, write_error
from ingot.model_store.blobs.blobs import CHUNK_BYTES
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.transfer import Transfer
from ingot.model_store.format import attachments
from ingot.model_store.references import attachments_tag, is_attachments_tag

if TYPE_CHECKING:
    from ingot.model_store.store.store import Store

Kind = Literal["index", "log", "archive", "blob"]


@dataclass(frozen=True)
class Problem:
    """A problem with a model's index or log, with an archive that a tag names, or with a blob's content."""

    kind: Kind
    subject: str
    detail: str
    _: KW_ONLY
    needed_by: tuple[str, ...] = ()
    repaired: bool = False


@dataclass(frozen=True)
class Checked:
    """The result of a check. ``size`` is the number of bytes that were read."""

    problems: tuple[Problem, ...]
    archives: int
    blobs: int
    size: int

    @property
    def clean(self) -> bool:
        return not self.problems


def check(store: Store, *, quick: bool = False, repair: bool = False, transfer: Transfer | None = None) -> Checked:
    """Check a store. Others may use and change it meanwhile.

    Args:
        store: the store.
        quick: check documents, names and sizes, but do not read the blobs.
        repair: move damaged blobs, and damaged lines of logs, into the store's folder ``damaged``, so that pushing or
            pulling an archive again restores the blobs.
        transfer: counts the bytes that are read.

    Raises:
        InvalidArgument: the store cannot be read, or not be written to repair it.
        StorageFull: the disk is too full to repair it.
    """
    transfer = transfer or Transfer()
    problems: list[Problem] = []
    needed: dict[str, list[str]] = defaultdict(list)
    archives = 0
    for name in store.names():
        try:
            tags = store.of(name).read()
        except InvalidArchive as error:
            problems.append(Problem("index", name, str(error)))
            continue
        problems += _log(store, name, repair=repair)
        for tag in tags:
            if not is_attachments_tag(tag):
                archives += 1
                problems += _archive(store, name, tag, tags, needed)
    found = sorted(store.blobs.folder.iterdir()) if store.blobs.folder.is_dir() else []
    if not quick:
        problems += _blobs(store, found, needed, transfer, repair=repair)
    return Checked(tuple(problems), archives, len(found), transfer.moved)


def _archive(
    store: Store, name: str, tag: str, entries: dict[str, Descriptor], needed: dict[str, list[str]]
) -> Iterator[Problem]:
    """Yield problems of the archive of a tag, and record which blobs it needs."""
    entry = entries[tag]
    for item in (entry, entries.get(attachments_tag(entry.digest))):
        if item is not None:
            needed[item.digest].append(f"{name}:{tag}")
    try:
        archive = store.open(entry, entries)
        descriptors = {item.digest: item for item in archive.all_descriptors()}
    except InvalidArchive as error:
        faults = [str(error)]
    else:
        for digest in descriptors:
            needed[digest].append(f"{name}:{tag}")
        faults = [fault for item in descriptors.values() if (fault := _fault(store, item))]
        faults += _attachment_faults(store, entry, entries.get(attachments_tag(entry.digest)))
    for fault in faults:
        moved = store.of(name).read().get(tag) != entry  # moved during the check; its blobs may have been collected
        if not moved:
            yield Problem("archive", f"{name}:{tag}", fault)


def _attachment_faults(store: Store, entry: Descriptor, listing: Descriptor | None) -> Iterator[str]:
    """Yield problems of an archive's attachments, which readers of the archive skip."""
    if listing is None:
        return
    try:
        attached = attachments.listed(store.blobs, listing)
    except InvalidArchive as error:
        yield f"its list of signatures: {error}"
        return
    for descriptor in attached:
        try:
            attachments.load(store.blobs, descriptor, entry)
        except InvalidArchive as error:
            yield f"a signature of it: {error}"


def _log(store: Store, name: str, *, repair: bool) -> Iterator[Problem]:
    tags = store.of(name)
    try:
        tags.history()
    except InvalidArchive as error:
        if repair:
            try:
                with tags.locked(recover=False) as change:
                    change.repair_log(store.root / "damaged" / name.replace("/", "_") / tags.reflog.name)
            except OSError as fault:
                raise _unwritable(store, fault) from fault
        yield Problem("log", name, str(error), repaired=repair)


def _fault(store: Store, descriptor: Descriptor) -> str | None:
    try:
        store.blobs.open(descriptor).close()
    except (InvalidArchive, InvalidArgument) as error:
        return str(error)
    return None


def _blobs(
    store: Store, found: list[Path], needed: dict[str, list[str]], transfer: Transfer, *, repair: bool
) -> list[Problem]:
    problems: list[Problem] = []

    def read(path: Path) -> None:
        users = tuple(dict.fromkeys(needed.get(f"sha256:{path.name}", ())))
        try:
            digest = _digest(path, transfer)
        except OSError as error:  # it may be intact
            problems.append(
                Problem("blob", f"sha256:{path.name}", f"it cannot be read: {error.strerror}", needed_by=users)
            )
            return
        if digest in (None, path.name):
            return
        if repair:
            _put_aside(store, path)
        detail = f"its content has the digest sha256:{digest}"
        problems.append(Problem("blob", f"sha256:{path.name}", detail, needed_by=users, repaired=repair))

    transfer.expect(sum(_size(path) for path in found))
    transfer.each(read, found, store.blobs.workers)
    return sorted(problems, key=lambda problem: problem.subject)


def _digest(path: Path, transfer: Transfer) -> str | None:
    """Return the hex digest of a file; None if it is gone. Raises OSError if it cannot be read."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK_BYTES):
                sha.update(chunk)
                transfer.advance(len(chunk))
    except FileNotFoundError:  # collected meanwhile
        return None
    return sha.hexdigest()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _put_aside(store: Store, path: Path) -> None:
    folder = store.root / "damaged"
    try:
        folder.mkdir(exist_ok=True)
        path.replace(folder / path.name)
    except OSError as error:
        raise _unwritable(store, error) from error


def _unwritable(store: Store, error: OSError) -> IngotError:
    return write_error(f"the store at {store.root} cannot be written", error)
