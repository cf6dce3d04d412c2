"""Copies of blobs: verified, resumed where they ended, and cancelled together."""

from __future__ import annotations

import io
import os
import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from ingot.errors import InvalidArchive, InvalidArgument, Unavailable
from ingot.model_store import BlobFolder, Descriptor, Transfer
from ingot.model_store.blobs.folder import remove_scratch
from ingot.model_store.blobs.transfer import Cancelled

CONTENT = bytes(range(256)) * 20_000  # some chunks, and a part of one


class Source:
    """Blobs in memory; reads fail after ``breaks`` bytes in all, if set."""

    def __init__(self, content: bytes = CONTENT, breaks: int | None = None):
        self.content = content
        self.breaks = breaks
        self.starts: list[int] = []

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        self.starts.append(start)
        if self.breaks is None:
            return io.BytesIO(self.content[start:])
        return Breaking(self.content[start : self.breaks])


class Breaking(io.BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        chunk = super().read(size)
        if not chunk:
            raise Unavailable("the connection was lost")
        return chunk


@pytest.fixture
def folder(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


@pytest.fixture
def descriptor(tmp_path: Path) -> Descriptor:
    return BlobFolder(tmp_path / "elsewhere").put(CONTENT, "application/octet-stream")


def leftovers(folder: BlobFolder) -> list[str]:
    return sorted(path.name for path in (folder.root / "tmp").iterdir())


def test_an_interrupted_copy_resumes_where_it_ended(folder: BlobFolder, descriptor: Descriptor) -> None:
    with pytest.raises(Unavailable):
        folder.copy(Source(breaks=3_000_000), descriptor)
    assert not folder.has(descriptor)
    source, transfer = Source(), Transfer()
    folder.copy(source, descriptor, transfer)
    assert source.starts == [3_000_000]
    assert (transfer.skipped, transfer.moved) == (3_000_000, len(CONTENT) - 3_000_000)
    assert folder.path(descriptor).read_bytes() == CONTENT
    assert leftovers(folder) == []


def test_an_existing_part_may_be_damaged(folder: BlobFolder, descriptor: Descriptor) -> None:
    with pytest.raises(Unavailable):
        folder.copy(Source(content=bytes(len(CONTENT)), breaks=1000), descriptor)
    source, transfer = Source(), Transfer()
    folder.copy(source, descriptor, transfer)
    assert source.starts == [1000, 0]
    assert transfer.done == len(CONTENT)
    assert folder.path(descriptor).read_bytes() == CONTENT


def test_damage_is_found_and_nothing_of_it_kept(folder: BlobFolder, descriptor: Descriptor) -> None:
    with pytest.raises(InvalidArchive, match="is damaged"):
        folder.copy(Source(content=bytes(len(CONTENT))), descriptor)
    assert not folder.has(descriptor)
    source = Source()
    folder.copy(source, descriptor)
    assert source.starts == [0]


def test_a_source_that_ends_too_early(folder: BlobFolder, descriptor: Descriptor) -> None:
    with pytest.raises(InvalidArchive, match=r"is truncated: 1 of \d+ bytes missing"):
        folder.copy(Source(content=CONTENT[:-1]), descriptor)
    assert not folder.has(descriptor)


def test_a_source_that_does_not_end_is_not_read_on(folder: BlobFolder, descriptor: Descriptor) -> None:
    folder.copy(Source(content=CONTENT + b"more"), descriptor)
    assert folder.path(descriptor).read_bytes() == CONTENT


def test_blobs_that_exist_are_not_requested(folder: BlobFolder, descriptor: Descriptor) -> None:
    folder.copy(Source(), descriptor)
    source, transfer = Source(), Transfer()
    folder.copy(source, descriptor, transfer)
    assert source.starts == []
    assert transfer.skipped == len(CONTENT)


def test_a_full_disk_leaves_nothing_that_would_keep_it_full(folder: BlobFolder, descriptor: Descriptor) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            folder.copy(Source(), descriptor)
        with pytest.raises(InvalidArgument, match="cannot be written"):
            folder.put(CONTENT, "application/octet-stream")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert leftovers(folder) == []
    assert not folder.has(descriptor)


def test_an_empty_blob(folder: BlobFolder, tmp_path: Path) -> None:
    empty = BlobFolder(tmp_path / "elsewhere").put(b"", "application/octet-stream")
    folder.copy(Source(content=b""), empty)
    assert folder.path(empty).read_bytes() == b""


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_permissions_follow_the_umask(folder: BlobFolder, descriptor: Descriptor, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder.copy(Source(), descriptor)
    finally:
        os.umask(before)
    assert folder.path(descriptor).stat().st_mode & 0o777 == 0o444 & ~mask


class TestTransfer:
    def test_the_first_error_ends_all_and_is_raised(self) -> None:
        transfer, started = Transfer(), threading.Event()

        def work(item: int) -> None:
            if item == 0:
                started.wait(30)
                raise InvalidArchive("damaged")
            started.set()
            while True:  # until it is cancelled
                transfer.advance(1)

        with pytest.raises(InvalidArchive, match="damaged"):
            transfer.each(work, range(10), 2)
        with pytest.raises(Cancelled):
            transfer.advance(1)

    def test_a_report_is_given_after_every_change(self) -> None:
        seen: list[tuple[int, int]] = []
        transfer = Transfer(lambda state: seen.append((state.done, state.total)))
        transfer.expect(10)
        transfer.skip(4)
        transfer.each(transfer.advance, [3, 3], 1)
        assert seen == [(0, 10), (4, 10), (7, 10), (10, 10)]


def test_a_blob_cannot_be_linked_into_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    blob = BlobFolder(tmp_path / "source").put(CONTENT, "x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidArgument, match=r"file/store.* cannot be written: Not a directory"):
        BlobFolder(tmp_path / "file" / "store").link(BlobFolder(tmp_path / "source").path(blob), "x")


class Held(Source):
    """A source that waits for permission before its first byte."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.allowed = threading.Event(), threading.Event()

    def open(self, descriptor: Descriptor, start: int = 0) -> BinaryIO:
        self.opened.set()
        assert self.allowed.wait(60)
        return super().open(descriptor, start)


class Waiting(Transfer):
    """A transfer that notes when it waits for another."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Event()

    def pause(self, seconds: float) -> None:
        self.waits.set()
        super().pause(seconds)


def test_a_blob_that_another_process_copies_is_not_copied_twice(folder: BlobFolder, descriptor: Descriptor) -> None:
    first, second, transfer = Held(), Source(), Waiting()
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(folder.copy, first, descriptor)
        assert first.opened.wait(60)
        waiting = pool.submit(folder.copy, second, descriptor, transfer)
        assert transfer.waits.wait(60)
        first.allowed.set()
        copying.result()
        waiting.result()
    assert second.starts == []
    assert (transfer.moved, transfer.skipped) == (0, len(CONTENT))
    assert leftovers(folder) == []


def test_a_copy_that_stalls_elsewhere_is_not_waited_for(
    folder: BlobFolder, descriptor: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingot.model_store.blobs.folder.STALLED_SECONDS", 0.1)
    first, second = Held(), Source()
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(folder.copy, first, descriptor)
        assert first.opened.wait(60)
        folder.copy(second, descriptor)
        assert second.starts == [0]
        first.allowed.set()
        copying.result()
    assert folder.path(descriptor).read_bytes() == CONTENT
    assert leftovers(folder) == []


def test_a_cancelled_copy_waits_for_no_other(folder: BlobFolder, descriptor: Descriptor) -> None:
    first, transfer = Held(), Waiting()
    with ThreadPoolExecutor() as pool:
        copying = pool.submit(folder.copy, first, descriptor)
        assert first.opened.wait(60)
        waiting = pool.submit(folder.copy, Source(), descriptor, transfer)
        assert transfer.waits.wait(60)
        transfer._cancel()
        with pytest.raises(Cancelled):
            waiting.result(60)
        first.allowed.set()
        copying.result()


def test_temporary_folders_are_removed_before_a_process_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server ends so at a second Ctrl-C, or while a model is loaded."""
    monkeypatch.setattr("ingot.model_store.blobs.folder._removals", [])  # without those of other tests
    kept, gone = BlobFolder.scratch(), BlobFolder.scratch()
    root = gone.root
    del gone
    assert not root.exists()
    assert kept.root.exists()
    remove_scratch()
    assert not kept.root.exists()
    remove_scratch()
