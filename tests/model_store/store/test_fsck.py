"""A check of the store finds every fault, names the archives concerned, and makes them repairable."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive
from ingot.model_store import Store, Transfer
from ingot.model_store.store.fsck import check
from ingot.model_store.store.gc import collect
from tests.model_store.samples import archive

FIRST, SECOND = archive(b"one"), archive(b"two", (b"other weights, of another size",) * 3)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.push(FIRST, "tiny:1")
    store.push(SECOND, "team/tiny:2")
    return store


def overwrite(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def test_a_whole_store_is_clean_and_all_of_it_was_read(store: Store) -> None:
    transfer = Transfer()
    found = check(store, transfer=transfer)
    sizes = {item.digest: item.size for item in (*FIRST.descriptors(), *SECOND.descriptors())}
    assert found.clean
    assert (found.archives, found.blobs, found.size) == (2, len(sizes), sum(sizes.values()))
    assert transfer.done == transfer.total


def test_an_empty_store_is_clean(tmp_path: Path) -> None:
    assert check(Store(tmp_path / "none")).clean


def test_a_damaged_blob_is_reported_with_its_users(store: Store) -> None:
    path = store.get("tiny:1").variant().path()
    overwrite(path, bytes(path.stat().st_size))
    (problem,) = check(store).problems
    assert (problem.kind, problem.subject, problem.needed_by) == ("blob", f"sha256:{path.name}", ("tiny:1",))
    assert check(store, quick=True).clean


def test_quarantined_blobs_are_restored_by_the_next_push(store: Store) -> None:
    path = store.get("tiny:1").variant().path()
    overwrite(path, bytes(path.stat().st_size))
    (problem,) = check(store, repair=True).problems
    assert problem.repaired
    assert (store.root / "damaged" / path.name).exists()
    (problem,) = check(store).problems
    assert (problem.kind, problem.subject) == ("archive", "tiny:1")
    assert "is missing" in problem.detail
    store.push(FIRST, "tiny:1")
    assert check(store).clean


@pytest.mark.parametrize("quick", [False, True])
def test_a_missing_blob_and_one_of_another_size(store: Store, quick: bool) -> None:
    first, second = (store.get(name).variant().path() for name in ("tiny:1", "team/tiny:2"))
    first.unlink()
    overwrite(second, b"short")
    problems = {(item.kind, item.subject, item.detail.partition(" ")[2]) for item in check(store, quick=quick).problems}
    assert ("archive", "tiny:1", f"sha256:{first.name} is missing") in problems
    assert ("archive", "team/tiny:2", f"sha256:{second.name} has 5 bytes, but its manifest says 7") in problems


def test_a_blob_of_another_size_is_healed_by_the_next_push(store: Store) -> None:
    overwrite(store.get("tiny:1").variant().path(), b"short")
    store.push(FIRST, "tiny:1")
    assert check(store).clean


@pytest.mark.parametrize("which", ["index", "manifest", "serving"])
def test_a_damaged_document(store: Store, which: str) -> None:
    variant = FIRST.variant()
    layer = next(item for item in variant.manifest.layers if "serving" in item.media_type)
    damaged = {"index": FIRST.descriptor, "manifest": variant.descriptor, "serving": layer}[which]
    overwrite(store.blobs.path(damaged), b" " * damaged.size)
    subjects = {(item.kind, item.subject) for item in check(store).problems}
    assert ("archive", "tiny:1") in subjects
    assert ("blob", damaged.digest) in subjects


def test_a_damaged_index_of_tags_leaves_the_other_models_checked(store: Store) -> None:
    store.of("tiny").index.write_bytes(b"{")
    overwrite(store.get("team/tiny:2").variant().path(), b"short")
    kinds = {(item.kind, item.subject) for item in check(store).problems}
    assert {("index", "tiny"), ("archive", "team/tiny:2")} <= kinds


def test_a_tag_that_disagrees_with_its_digest(store: Store) -> None:
    index = store.of("tiny").index
    manifest = FIRST.variant().descriptor
    index.write_bytes(index.read_bytes().replace(FIRST.digest.encode(), manifest.digest.encode()))
    (problem,) = check(store).problems
    assert (problem.kind, problem.subject) == ("archive", "tiny:1")


@pytest.mark.parametrize("which", ["list", "manifest", "envelope"])
def test_a_damaged_signature_is_reported_and_a_push_restores_it(store: Store, which: str) -> None:
    signed = store.get("tiny:1").with_signature(b"{}")
    store.attach(signed, "tiny")
    assert check(store).clean
    listing = next(entry for tag, entry in store.of("tiny").read().items() if tag.startswith("sha256-"))
    envelope = next(item for item in signed.attached_descriptors() if "dsse" in item.media_type)
    damaged = {"list": listing, "manifest": signed.attached[0], "envelope": envelope}[which]
    overwrite(store.blobs.path(damaged), b" " * damaged.size)
    found = check(store, repair=True).problems
    assert ("blob", damaged.digest) in {(item.kind, item.subject) for item in found}
    assert store.get("tiny:1").digest == FIRST.digest  # readable, as only a policy checks signatures
    assert {item.subject for item in check(store).problems} == {"tiny:1"}
    store.push(signed, "tiny:1")
    assert check(store).clean
    assert store.get("tiny:1").signatures() == (b"{}",)


def test_a_damaged_log_is_reported_and_repaired(store: Store) -> None:
    for item in (FIRST, SECOND):
        store.push(item, "tiny:prod")
    log = store.of("tiny").reflog
    lines = log.read_bytes().splitlines()
    log.write_bytes(b"\n".join([lines[0], b'{"time": "yesterday"}', *lines[1:]]) + b"\n")
    with pytest.raises(InvalidArchive, match=r"line 2 of .*reflog.jsonl is damaged; ingot store fsck --repair"):
        store.rollback("tiny:prod")
    (problem,) = check(store, repair=True).problems
    assert (problem.kind, problem.subject, problem.repaired) == ("log", "tiny", True)
    assert b"yesterday" in (store.root / "damaged" / "tiny" / "reflog.jsonl").read_bytes()
    assert check(store).clean
    assert store.rollback("tiny:prod").digest == FIRST.digest


def test_a_missing_index_is_reported(store: Store) -> None:
    store.of("tiny").index.unlink()
    assert ("index", "tiny") in {(item.kind, item.subject) for item in check(store).problems}
    with pytest.raises(InvalidArchive, match="is missing, although tags were moved"):
        collect(store, grace=timedelta(0))


def test_unreadable_files_are_not_called_damaged(store: Store) -> None:
    (store.blobs.folder / ("0" * 64)).mkdir()
    (problem,) = check(store, repair=True).problems
    assert problem.detail.startswith("it cannot be read: ")
    assert not problem.repaired
    assert (store.blobs.folder / ("0" * 64)).exists()
