from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive
from ingot.model_store import BlobFolder, CacheEntry, DerivedCache, Store
from tests.model_store.samples import archive
from tests.support import ROOT

LARGE = 5 << 20  # over what is hashed whenever the entry is used


@pytest.fixture
def entry(tmp_path: Path) -> CacheEntry:
    return DerivedCache(tmp_path / "derived").entry("a" * 64, "engine-1")


def fill(folder: Path) -> None:
    (folder / "graph").write_bytes(b"a graph")
    (folder / "weights").write_bytes(bytes(LARGE))


def unused(folder: Path) -> None:
    pytest.fail("there was nothing to be made")


def leftovers(entry: CacheEntry) -> list[Path]:
    return [path for path in entry.path.parent.iterdir() if path.name not in (entry.key, f".{entry.key}.lock")]


class TestBuild:
    def test_a_built_entry_is_found(self, entry: CacheEntry) -> None:
        assert not entry.find()
        assert entry.build(fill, 1)
        assert entry.find()
        assert (entry.path / "graph").read_bytes() == b"a graph"
        assert entry.size == LARGE + 7
        assert leftovers(entry) == []
        entry.verify()

    def test_an_existing_entry_is_not_built_again(self, entry: CacheEntry) -> None:
        entry.build(fill, 1)
        assert not entry.build(unused, 1)

    @pytest.mark.matrix
    def test_one_of_several_processes_builds_for_all(self, entry: CacheEntry) -> None:
        code = (
            "import sys, time; from pathlib import Path; from ingot.model_store.store.derived import CacheEntry\n"
            "def fill(folder):\n"
            "    time.sleep(0.2)\n"
            "    (folder / 'graph').write_text('a graph')\n"
            "entry = CacheEntry(Path(sys.argv[1]))\n"
            "print(entry.build(fill, 1), entry.find())"
        )
        command = [sys.executable, "-c", code, str(entry.path)]
        racing = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(4)]
        answers = sorted(process.communicate(timeout=60)[0].strip() for process in racing)
        assert answers == ["False True"] * 3 + ["True True"]

    def test_a_build_that_fails_leaves_nothing(self, entry: CacheEntry) -> None:
        def fail(folder: Path) -> None:
            fill(folder)
            raise ValueError("no more")

        with pytest.raises(ValueError, match="no more"):
            entry.build(fail, 1)
        assert not entry.find()
        assert leftovers(entry) == []

    def test_leftovers_of_a_killed_process_are_removed(self, entry: CacheEntry) -> None:
        left = entry.path.with_name(f".{entry.key}.0123.tmp")
        left.mkdir(parents=True)
        (left / "weights").write_bytes(b"half of them")
        entry.build(fill, 1)
        assert leftovers(entry) == []

    def test_a_disk_without_room_is_left_alone(self, entry: CacheEntry) -> None:
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            entry.build(unused, shutil.disk_usage(entry.path.parents[2]).free)

    def test_a_store_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "derived").write_text("in the way")
        with pytest.raises(OSError, match="derived"):
            DerivedCache(tmp_path / "derived").entry("a" * 64, "engine-1").build(unused, 1)


def cut_short(entry: CacheEntry) -> None:
    os.truncate(entry.path / "weights", 1 << 20)


def written_over(entry: CacheEntry) -> None:
    path = entry.path / "weights"
    path.chmod(0o644)
    path.write_bytes(bytes([1]) * LARGE)
    os.utime(path, (0, 0))  # the test is faster than the whole seconds that are compared


def changed_graph(entry: CacheEntry) -> None:
    (entry.path / "graph").chmod(0o644)
    (entry.path / "graph").write_bytes(b"A graph")


def missing(entry: CacheEntry) -> None:
    (entry.path / "graph").unlink()


def linked(entry: CacheEntry) -> None:
    elsewhere = entry.path.parent / "elsewhere"
    (entry.path / "graph").rename(elsewhere)
    (entry.path / "graph").symlink_to(elsewhere)


def no_record(entry: CacheEntry) -> None:
    (entry.path / "entry.json").unlink()


def damaged_record(entry: CacheEntry) -> None:
    (entry.path / "entry.json").write_text('{"schema_version": 1, "files": [')


def newer_record(entry: CacheEntry) -> None:
    (entry.path / "entry.json").write_text('{"schema_version": 2, "files": []}')


def record_of_other_folders(entry: CacheEntry) -> None:
    record = (entry.path / "entry.json").read_text()
    (entry.path / "entry.json").write_text(record.replace('"graph"', '"../graph"'))


def huge_record(entry: CacheEntry) -> None:
    os.truncate(entry.path / "entry.json", 1 << 30)


DAMAGES = [
    cut_short,
    written_over,
    changed_graph,
    missing,
    linked,
    no_record,
    damaged_record,
    newer_record,
    record_of_other_folders,
    huge_record,
]


class TestDamage:
    @pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
    def test_an_entry_that_is_damaged_is_removed_and_built_again(
        self, entry: CacheEntry, damage: Callable[[CacheEntry], None]
    ) -> None:
        entry.build(fill, 1)
        damage(entry)
        with pytest.raises(InvalidArchive, match="may be removed"):
            entry.verify()
        assert not entry.find()
        assert not entry.path.exists()
        assert entry.build(fill, 1)
        assert entry.find()

    def test_changed_bits_of_a_large_file_are_found_by_reading_it(self, entry: CacheEntry) -> None:
        entry.build(fill, 1)
        weights = entry.path / "weights"
        status = weights.stat()
        weights.chmod(0o644)
        weights.write_bytes(bytes([1]) * LARGE)
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert entry.find()
        with pytest.raises(InvalidArchive, match="weights is missing or damaged"):
            entry.verify()

    def test_a_copy_of_the_store_keeps_its_entries(self, entry: CacheEntry, tmp_path: Path) -> None:
        entry.build(fill, 1)
        copy = tmp_path / "copy"
        shutil.copytree(entry.path, copy / entry.key)
        for path in (copy / entry.key).iterdir():
            os.utime(path, (path.stat().st_atime, int(path.stat().st_mtime)))  # as archives of files keep it
        assert CacheEntry(copy / entry.key).find()


class TestRemoval:
    def test_an_open_file_stays_readable(self, entry: CacheEntry) -> None:
        entry.build(fill, 1)
        with (entry.path / "graph").open("rb") as stream:
            entry.remove()
            assert stream.read() == b"a graph"
        assert not entry.find()
        assert leftovers(entry) == []

    def test_removing_a_missing_entry_changes_nothing(self, entry: CacheEntry) -> None:
        entry.remove()
        assert not entry.path.parent.exists()

    def test_the_use_of_an_entry_is_noted(self, entry: CacheEntry) -> None:
        assert entry.size == 0
        entry.build(fill, 1)
        os.utime(entry.record, (0, 0))
        entry.find()
        assert entry.record.stat().st_mtime > 0

    def test_a_cache_lists_its_entries(self, tmp_path: Path) -> None:
        cache = DerivedCache(tmp_path / "derived")
        assert list(cache.entries()) == []
        made = [("a" * 64, "engine-1"), ("a" * 64, "engine-2"), ("b" * 64, "engine-1")]
        for manifest, key in made:
            cache.entry(manifest, key).build(fill, 1)
        assert [(item.manifest_hex, item.key) for item in cache.entries()] == made


def test_only_a_store_has_a_cache(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.push(archive(), "tiny:1")
    cache = DerivedCache.for_blobs(store.get("tiny:1").blobs)
    assert cache is not None
    assert cache.root == store.root / "derived"
    assert DerivedCache.for_blobs(BlobFolder.scratch()) is None
