"""A check of the store finds whatever is wrong with it, tells what suffers, and makes way for its repair."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.model_store import Store
from ingot.model_store.fsck import check
from ingot.model_store.transfer import Transfer
from tests.model_store.samples import archive

FIRST, SECOND = archive(b"one"), archive(b"two")


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


def test_a_damaged_blob_is_told_with_what_needs_it(store: Store) -> None:
    path = store.get("tiny:1").variant().path()
    overwrite(path, bytes(path.stat().st_size))
    (problem,) = check(store).problems
    assert (problem.kind, problem.subject, problem.needed_by) == ("blob", f"sha256:{path.name}", ("tiny:1",))
    assert check(store, quick=True).clean


def test_what_was_put_aside_comes_back_with_the_next_push(store: Store) -> None:
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
    assert ("archive", "team/tiny:2", f"sha256:{second.name} has 5 bytes, its manifest says 7") in problems


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
    index.write_bytes(index.read_bytes().replace(FIRST.digest.encode(), SECOND.digest.encode()))
    problems = check(store).problems
    if FIRST.descriptor.size == SECOND.descriptor.size:  # it is another archive now, and whole
        assert problems == ()
    else:
        assert problems[0].subject == "tiny:1"


def test_a_damaged_signature(store: Store) -> None:
    signed = store.get("tiny:1").with_signature(b"{}")
    store.attach(signed, "tiny")
    assert check(store).clean
    manifest = signed.attached[0]
    overwrite(store.blobs.path(manifest), b" " * manifest.size)
    assert ("archive", "tiny:1") in {(item.kind, item.subject) for item in check(store).problems}
