"""Collection removes blobs that nothing needs, and only those."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest

from ingot.errors import InvalidArchive, InvalidArgument, NotFound, StorageFull
from ingot.model_store import Archive, DerivedCache, Store, Transfer
from ingot.model_store.references import attachments_tag
from ingot.model_store.store import gc
from ingot.model_store.store.gc import Collected, collect
from tests.model_store.samples import archive
from tests.support import RequireTool

FIRST, SECOND = archive(b"one"), archive(b"two")
NOW = timedelta(0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.push(FIRST, "tiny:1")
    store.push(SECOND, "tiny:2")
    return store


def own(item: Archive, other: Archive) -> set[str]:
    return {blob.hex for blob in item.descriptors()} - {blob.hex for blob in other.descriptors()}


def names(collected: Collected) -> set[str]:
    return {path.name for path in collected.files}


def test_blobs_that_tags_need_stay(store: Store) -> None:
    assert collect(store, grace=NOW).files == ()
    for tag in ("1", "2"):
        store.get(f"tiny:{tag}").verify()


def test_blobs_of_a_removed_tag_alone_go_and_shared_ones_stay(store: Store) -> None:
    store.remove("tiny:2")
    size = sum(store.blobs.path(item).stat().st_size for item in SECOND.descriptors() if item.hex in own(SECOND, FIRST))
    would = collect(store, grace=NOW, dry_run=True)
    assert names(would) == own(SECOND, FIRST)
    assert would.size == size
    assert all(path.exists() for path in would.files)
    assert names(collect(store, grace=NOW)) == own(SECOND, FIRST)
    assert not any(path.exists() for path in would.files)
    store.get("tiny:1").verify()
    assert collect(store, grace=NOW).files == ()


def test_within_the_grace_a_removed_tag_stays_and_can_be_brought_back(store: Store) -> None:
    store.remove("tiny:2")
    for path in store.blobs.folder.iterdir():
        os.utime(path, (1e9, 1e9))
    hour = timedelta(hours=1)
    stray = store.blobs.put(b"of a push that was killed", "application/octet-stream")
    found = collect(store, grace=hour)
    assert (found.files, found.waiting) == ((), len(own(SECOND, FIRST)) + 1)
    sizes = [item.size for item in {item.hex: item for item in SECOND.descriptors()}.values()]
    assert stray.size < found.waiting_size < sum(sizes)
    store.rollback("tiny:2")
    assert collect(store, grace=hour).waiting_size == stray.size
    store.get("tiny:2").verify()


def test_young_blobs_stay(store: Store) -> None:
    stray = store.blobs.put(b"of a push that was killed", "application/octet-stream")
    assert collect(store, grace=timedelta(hours=1)).files == ()
    assert names(collect(store, grace=NOW)) == {stray.hex}


def test_rollback_targets_of_an_alias_stay(store: Store) -> None:
    store.push(FIRST, "other:prod")
    store.push(SECOND, "other:prod")
    for tag in ("1", "2"):
        store.remove(f"tiny:{tag}")
    assert collect(store, grace=NOW, keep_moves=1).files == ()
    assert store.rollback("other:prod").digest == FIRST.digest
    store.push(SECOND, "other:prod")
    assert names(collect(store, grace=NOW, keep_moves=0)) == own(FIRST, SECOND)


def test_earlier_collected_blobs_are_not_missed_when_more_moves_are_kept(store: Store) -> None:
    store.promote("tiny:1", "prod")
    store.promote("tiny:2", "prod")
    store.remove("tiny:1")
    assert collect(store, grace=NOW, keep_moves=0).files != ()
    assert collect(store, grace=timedelta(days=1), keep_moves=10).files == ()


def test_a_push_under_way_keeps_its_blobs(store: Store) -> None:
    third = archive(b"three")
    third.copy_to(store.blobs)
    with store.leases.hold([item.digest for item in third.descriptors()]):
        assert collect(store, grace=NOW).files == ()
    assert collect(store, grace=NOW).files != ()


def test_the_lease_of_a_dead_process_counts_for_nothing(store: Store) -> None:
    stray = store.blobs.put(b"stray", "application/octet-stream")
    (store.root / "leases").mkdir(exist_ok=True)
    (store.root / "leases" / "dead").write_text(stray.digest)
    assert names(collect(store, grace=NOW)) == {stray.hex}
    assert list((store.root / "leases").iterdir()) == []


def test_parts_of_interrupted_copies_go_and_active_writes_stay(store: Store) -> None:
    (store.tmp / ("0" * 64 + ".part")).write_bytes(b"half")
    with store.blobs._private_file() as (_, path):
        living = path.name
        assert names(collect(store, grace=NOW)) == {"0" * 64 + ".part"}
        assert (store.tmp / living).exists()


def test_derived_files_go_with_their_archive(store: Store) -> None:
    of_first = store.root / "derived" / FIRST.variant().descriptor.hex
    of_nothing = store.root / "derived" / ("0" * 64)
    for folder in (of_first, of_nothing):
        (folder / "key").mkdir(parents=True)
        (folder / "key" / "model").write_bytes(b"content")
    collected = collect(store, grace=NOW)
    assert names(collected) == {"0" * 64}
    assert collected.size == len(b"content")
    assert of_first.exists()
    assert not of_nothing.exists()


def test_unused_derived_files_go_before_their_archive(store: Store) -> None:
    cache = DerivedCache(store.root / "derived")
    used, unused = (cache.entry(FIRST.variant().descriptor.hex, key) for key in ("used", "unused"))
    for entry in (used, unused):
        entry.build(lambda folder: None, 1)
        long_ago = time.time() - timedelta(days=31).total_seconds()
        os.utime(entry.record, (long_ago, long_ago))
    used.find()
    assert collect(store, grace=timedelta(days=2)).files == ()
    assert names(collect(store, grace=NOW)) == {"unused"}
    assert (used.find(), unused.find()) == (True, False)


def test_derived_files_of_a_killed_process_are_removed(store: Store) -> None:
    entry = DerivedCache(store.root / "derived").entry(FIRST.variant().descriptor.hex, "engine-1")
    left = entry.path.with_name(f".{entry.key}.0123.tmp")

    def fill(folder: Path) -> None:
        assert collect(store, grace=NOW).files == ()  # it is being built

    entry.build(fill, 1)
    left.mkdir()
    (left / "weights").write_bytes(b"half of them")
    assert collect(store, grace=timedelta(hours=1)).files == ()
    assert names(collect(store, grace=NOW)) == {left.name}
    assert entry.find()


def test_signatures_stay_as_long_as_what_they_sign(store: Store) -> None:
    signed = store.get("tiny:2").with_signature(b"{}")
    store.attach(signed, "tiny")
    assert collect(store, grace=NOW).files == ()
    assert store.get("tiny:2").signatures() == (b"{}",)
    store.remove("tiny:2")
    gone = names(collect(store, grace=NOW)) | names(collect(store, grace=NOW))
    assert {item.hex for item in signed.attached_descriptors()} < gone
    assert list(store.of("tiny").read()) == ["1"]


def forget_signed(store: Store) -> Archive:
    """Collect a signed archive that an alias pointed to, and return it."""
    signed = SECOND.with_signature(b"{}")
    store.push(signed, "tiny:prod")
    store.promote("tiny:1", "prod")
    store.remove("tiny:2")
    for _ in range(2):  # attachments are collected after the archive
        collect(store, grace=NOW, keep_moves=0)
    assert attachments_tag(signed.digest) not in store.of("tiny").read()
    with pytest.raises(NotFound, match="now incomplete"):
        store.rollback("tiny:prod")
    return signed


def test_a_rollback_to_what_another_model_brought_back_finds_its_signatures(store: Store) -> None:
    store.push(forget_signed(store), "other:1")
    store.push(FIRST, "damaged:1")  # which is checked first
    store.of("damaged").index.write_bytes(b"{")
    store.rollback("tiny:prod")
    assert store.get("tiny:prod").signatures() == (b"{}",)
    shutil.rmtree(store.of("damaged").folder)
    store.remove("other:1")
    assert collect(store, grace=NOW).files == ()
    assert store.get("tiny:prod").signatures() == (b"{}",)


def test_a_push_that_ends_early_leaves_no_archive_without_its_signatures(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed = forget_signed(store)
    monkeypatch.setattr(Archive, "check_own", Mock(side_effect=KeyboardInterrupt))  # all blobs are there, and no tag
    with pytest.raises(KeyboardInterrupt):
        store.push(signed, "tiny:3")
    assert "3" not in store.tags("tiny")
    store.rollback("tiny:prod")
    assert store.get("tiny:prod").signatures() == (b"{}",)


def test_attachments_of_an_active_push_stay(store: Store) -> None:
    signed = forget_signed(store)
    with store.leases.hold([item.digest for item in signed.all_descriptors()]):
        store._attach(signed, "tiny", store.blobs)
        assert collect(store, grace=NOW).files == ()
        assert attachments_tag(signed.digest) in store.of("tiny").read()
    collect(store, grace=NOW)
    assert attachments_tag(signed.digest) not in store.of("tiny").read()


def test_a_file_that_disappears_during_collection_is_skipped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    left = store.root / ".tmp-0"
    left.write_bytes(b"its writer gives it its name in a moment")
    monkeypatch.setattr(gc, "is_locked", lambda path: path.unlink(missing_ok=True))
    assert collect(store).waiting == 1
    assert not left.exists()


def test_nothing_is_collected_while_needs_are_unknown(store: Store) -> None:
    store.remove("tiny:2")
    store.blobs.path(FIRST.variant().descriptor).unlink()
    before = sorted(store.blobs.folder.iterdir())
    with pytest.raises(InvalidArchive, match=r"nothing was collected, as the blobs of 'tiny@sha256:.* are unknown"):
        collect(store, grace=NOW)
    assert sorted(store.blobs.folder.iterdir()) == before


def test_an_empty_store_has_nothing(tmp_path: Path) -> None:
    assert collect(Store(tmp_path / "none"), grace=NOW).files == ()


def test_a_reader_keeps_what_it_has_mapped(store: Store) -> None:
    path = store.get("tiny:2").variant().path()
    with path.open("rb") as stream:
        store.remove("tiny:2")
        collect(store, grace=NOW)
        assert not path.exists()
        assert stream.read() == b"twoint8"


@pytest.mark.parametrize("which", ["index", "manifest", "signatures"])
def test_a_damaged_archive_can_be_removed_and_then_collected(store: Store, which: str) -> None:
    signed = store.get("tiny:2").with_signature(b"{}")
    store.attach(signed, "tiny")
    listing = next(entry for tag, entry in store.of("tiny").read().items() if tag.startswith("sha256-"))
    damaged = {"index": SECOND.descriptor, "manifest": SECOND.variant().descriptor, "signatures": listing}[which]
    store.blobs.path(damaged).unlink()
    assert store.remove("tiny:2").digest == SECOND.digest
    collect(store, grace=NOW)
    store.get("tiny:1").verify()


def test_a_part_that_a_push_may_resume_stays(store: Store) -> None:
    third = archive(b"three")
    part = store.tmp / f"{third.variant().graph.hex}.part"
    part.write_bytes(b"half")
    with store.leases.hold([item.digest for item in third.descriptors()]):
        assert collect(store, grace=NOW).files == ()
    assert names(collect(store, grace=NOW)) == {part.name}


def test_leftovers_of_a_killed_writer_of_tags_are_removed(store: Store) -> None:
    left = [store.root / ".tmp-0", store.of("tiny").folder / ".tmp-1"]
    for path in left:
        path.write_bytes(b"half")
    assert names(collect(store, grace=NOW)) == {".tmp-0", ".tmp-1"}


def test_folders_where_files_belong_are_left_alone(store: Store) -> None:
    for folder in (store.tmp, store.root / "leases"):
        (folder / "dir").mkdir(parents=True)
    assert collect(store, grace=NOW).files == ()


def test_a_dry_run_of_a_store_that_is_not_there_makes_none(tmp_path: Path) -> None:
    collect(Store(tmp_path / "none"), grace=NOW, dry_run=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("step", ["promote", "rollback"])
def test_a_blob_collected_between_a_check_and_a_move_is_not_referenced(
    store: Store, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.promote("tiny:2", "prod")
    store.promote("tiny:1", "prod")
    store.remove("tiny:2")
    hold = store.leases.hold

    def late(digests: Iterable[str]) -> AbstractContextManager[None]:
        for item in own(SECOND, FIRST):
            (store.blobs.folder / item).unlink(missing_ok=True)
        return hold(digests)

    store.push(SECOND, "tiny:3")
    monkeypatch.setattr(store.leases, "hold", late)
    steps = {"promote": lambda: store.promote("tiny:3", "prod"), "rollback": lambda: store.rollback("tiny:prod")}
    with pytest.raises(NotFound, match="was just collected"):
        steps[step]()
    assert store.tags("tiny")["prod"] == FIRST.digest


class TestSharedStores:
    """Other users may write to the store too: links in it must not lead outside."""

    @pytest.mark.parametrize("folder", ["tmp", "leases", "derived", "blobs", "repos", "blobs/sha256", "repos/tiny"])
    def test_a_folder_that_is_a_link_is_refused(self, store: Store, tmp_path: Path, folder: str) -> None:
        photos = tmp_path / "photos"
        path = store.root / folder
        if path.exists():
            path.rename(photos)
        else:
            photos.mkdir()
        (photos / "old").write_text("mine")
        os.utime(photos / "old", (1e9, 1e9))
        path.symlink_to(photos)
        for act in (lambda: collect(store, grace=NOW), lambda: store.push(archive(b"three"), "tiny:3")):
            with pytest.raises(InvalidArgument, match="is a link, which is not allowed inside a store"):
                act()
        assert (photos / "old").read_text() == "mine"

    @pytest.mark.parametrize("name", ["repos/tiny/.lock", "repos/tiny/reflog.jsonl", ".gc.lock"])
    def test_a_file_that_is_a_link_is_not_written_to(self, store: Store, tmp_path: Path, name: str) -> None:
        victim = tmp_path / "profile"
        victim.write_text("mine")
        (store.root / name).unlink(missing_ok=True)
        (store.root / name).symlink_to(victim)
        with pytest.raises(InvalidArgument, match="is a link"):
            store.push(archive(b"three"), "tiny:3")
        assert victim.read_text() == "mine"

    def test_a_part_that_is_a_link_is_not_written_to(self, store: Store, tmp_path: Path) -> None:
        victim, third = tmp_path / "profile", archive(b"three")
        victim.write_text("mine")
        (store.tmp / f"{third.variant().graph.hex}.part").symlink_to(victim)
        with pytest.raises(InvalidArgument, match="is a link"):
            store.push(third, "tiny:3")
        assert (victim.read_text(), victim.stat().st_mode & 0o200) == ("mine", 0o200)

    @pytest.mark.parametrize("name", ["store.json", "repos/tiny/index.json"])
    def test_a_pipe_is_not_waited_for(self, store: Store, name: str) -> None:
        (store.root / name).unlink()
        os.mkfifo(store.root / name)
        with pytest.raises(InvalidArgument, match="cannot be read"):
            store.get("tiny:1")

    def test_a_planted_blob_is_not_taken_on_trust_if_one_asks(self, store: Store) -> None:
        third = archive(b"three")
        graph = third.variant().graph
        store.blobs.path(graph).write_bytes(b"evilfp3"[: graph.size].ljust(graph.size))
        store.push(third, "tiny:3", recheck=True)
        store.get("tiny:3").verify()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_model_is_not_treated_as_absent(store: Store) -> None:
    store.push(FIRST, "team/tiny:1")
    (store.root / "repos" / "team").chmod(0)
    try:
        with pytest.raises(InvalidArgument, match="cannot be read"):
            collect(store, grace=NOW)
    finally:
        (store.root / "repos" / "team").chmod(0o755)


class TestFullDisk:
    """A push to a full disk removes the blobs that it copied, but none that others need."""

    WEIGHTS = tuple(bytes([number]) * (300_000 + number) for number in range(8))

    @pytest.mark.matrix
    def test_the_command_leaves_nothing(self, tmp_path: Path, require_tool: RequireTool) -> None:
        archive(weights=self.WEIGHTS).save(tmp_path / "large.ingot")
        disk = tmp_path / "disk"
        disk.mkdir()
        push = [sys.executable, "-m", "ingot", "copy", "large.ingot", "large:1", "--store", str(disk / "store")]
        script = f"mount -t tmpfs -o size=2m tmpfs {disk} || exit 77; {shlex.join(push)}; du -sk {disk}; exit 0"
        own_disk = [require_tool("unshare"), "--user", "--map-root-user", "--mount", "sh", "-c", script]
        result = subprocess.run(own_disk, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        if result.returncode:
            pytest.skip(f"no separate file system can be mounted: {result.stderr}")
        assert "cannot be written: No space left on device" in result.stderr
        assert int(result.stdout.split()[0]) < 50, result.stdout  # KiB

    def test_blobs_that_others_need_stay(self, store: Store) -> None:
        before = set(store.blobs.folder.iterdir())
        leased = archive(b"of another push")
        leased.copy_to(store.blobs)
        larger = archive(b"one", weights=(*self.WEIGHTS, b"some weights"))  # shares blobs with stored archives

        def full(transfer: Transfer) -> None:
            if transfer.moved > 1_000_000:
                raise OSError(errno.ENOSPC, "No space left on device")

        with store.leases.hold(item.digest for item in leased.descriptors()):
            with pytest.raises(StorageFull, match="No space left on device"):
                store.push(larger, "larger:1", transfer=Transfer(full))
            assert set(store.blobs.folder.iterdir()) == before | {store.blobs.path(i) for i in leased.descriptors()}
        assert list(store.tmp.iterdir()) == []
        store.push(larger, "larger:1")
        store.get("larger:1").verify()

    def test_an_interrupted_push_stays_resumable(self, store: Store) -> None:
        before = len(list(store.blobs.folder.iterdir()))

        def interrupted(transfer: Transfer) -> None:
            if transfer.moved > 1_000_000:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            store.push(archive(weights=self.WEIGHTS), "larger:1", transfer=Transfer(interrupted))
        assert len(list(store.blobs.folder.iterdir())) > before
