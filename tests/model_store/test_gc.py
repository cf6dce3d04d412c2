"""Collection takes what nothing needs, and nothing else."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive
from ingot.model_store import Archive, Store
from ingot.model_store.derived import DerivedCache
from ingot.model_store.gc import Collected, collect
from tests.model_store.samples import archive

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


def test_what_tags_need_stays(store: Store) -> None:
    assert collect(store, grace=NOW).files == ()
    for tag in ("1", "2"):
        store.get(f"tiny:{tag}").verify()


def test_what_a_removed_tag_alone_needed_goes_and_what_is_shared_stays(store: Store) -> None:
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
    assert collect(store, grace=timedelta(hours=1)).files == ()
    store.rollback("tiny:2")
    store.get("tiny:2").verify()


def test_young_blobs_stay(store: Store) -> None:
    stray = store.blobs.put(b"of a push that was killed", "application/octet-stream")
    assert collect(store, grace=timedelta(hours=1)).files == ()
    assert names(collect(store, grace=NOW)) == {stray.hex}


def test_what_an_alias_can_be_rolled_back_to_stays(store: Store) -> None:
    store.push(FIRST, "other:prod")
    store.push(SECOND, "other:prod")
    for tag in ("1", "2"):
        store.remove(f"tiny:{tag}")
    assert collect(store, grace=NOW, keep_moves=1).files == ()
    assert store.rollback("other:prod").digest == FIRST.digest
    store.push(SECOND, "other:prod")
    assert names(collect(store, grace=NOW, keep_moves=0)) == own(FIRST, SECOND)


def test_what_was_collected_before_is_not_missed_when_more_is_kept(store: Store) -> None:
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


def test_what_interrupted_copies_left_goes_and_what_is_being_written_stays(store: Store) -> None:
    (store.tmp / ("0" * 64 + ".part")).write_bytes(b"half")
    with store.blobs._private_file() as stream:
        living = Path(stream.name).name
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


def test_derived_files_that_nobody_uses_go_before_their_archive(store: Store) -> None:
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


def test_what_a_killed_process_left_of_derived_files_goes(store: Store) -> None:
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


def test_nothing_is_collected_while_it_is_unknown_what_is_needed(store: Store) -> None:
    store.remove("tiny:2")
    store.blobs.path(FIRST.variant().descriptor).unlink()
    before = sorted(store.blobs.folder.iterdir())
    with pytest.raises(InvalidArchive, match=r"nothing was collected, for it is unknown what 'tiny@sha256:.* needs"):
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
