from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive, InvalidArgument, NotFound
from ingot.model_store import Archive, BlobFolder, Store
from ingot.model_store.format import manifest
from tests.model_store import forgeries, samples
from tests.model_store.samples import archive
from tests.support import ROOT

FIRST, SECOND = archive(b"one"), archive(b"two")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def reflog(store: Store, name: str) -> list[dict[str, str | None]]:
    lines = (store.root / "repos" / name / "reflog.jsonl").read_text().splitlines()
    return [{key: entry[key] for key in ("tag", "old", "new")} for entry in map(json.loads, lines)]


class TestPush:
    def test_a_pushed_archive_can_be_read_back(self, store: Store, tmp_path: Path) -> None:
        FIRST.save(tmp_path / "a.ingot")
        pushed = store.push(Archive.open(tmp_path / "a.ingot"), "team/tiny:1")
        assert str(pushed) == f"team/tiny:1@{FIRST.digest}"
        got = store.get("team/tiny:1")
        got.verify()
        assert got.digest == FIRST.digest
        assert got.variant("fp32").path().read_bytes() == b"onefp32"

    def test_pushing_the_same_again_changes_nothing(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        before = everything(store.root)
        assert store.push(FIRST, "tiny:1").digest == FIRST.digest
        assert everything(store.root) == before

    def test_an_alias_moves_and_its_moves_are_logged(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        store.push(FIRST, "tiny:prod")
        store.push(SECOND, "tiny:prod")
        assert store.get("tiny:prod").digest == SECOND.digest
        assert store.tags("tiny") == {"1": FIRST.digest, "prod": SECOND.digest}
        assert reflog(store, "tiny") == [
            {"tag": "1", "old": None, "new": FIRST.digest},
            {"tag": "prod", "old": None, "new": FIRST.digest},
            {"tag": "prod", "old": FIRST.digest, "new": SECOND.digest},
        ]

    def test_versions_share_the_blobs_that_they_share(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        alone = len(blobs(store))
        store.push(SECOND, "tiny:2")
        shared = {item.digest for item in FIRST.descriptors()} & {item.digest for item in SECOND.descriptors()}
        assert len(blobs(store)) == 2 * alone - len(shared)

    def test_blobs_are_read_only_and_named_by_their_digest(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        assert {path.name for path in blobs(store)} == {item.hex for item in FIRST.descriptors()}
        assert all(path.stat().st_mode & 0o777 == 0o444 for path in blobs(store))

    def test_each_repository_is_an_oci_layout(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        folder = store.root / "repos" / "tiny"
        assert json.loads((folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
        (entry,) = json.loads((folder / "index.json").read_text())["manifests"]
        assert entry["digest"] == FIRST.digest
        assert entry["annotations"] == {"org.opencontainers.image.ref.name": "1"}

    def test_a_damaged_archive_is_not_stored(self, store: Store, tmp_path: Path) -> None:
        path = tmp_path / "a.ingot"
        FIRST.save(path)
        path.write_bytes(path.read_bytes().replace(b"some weights", b"somE weights"))
        with pytest.raises(InvalidArchive, match="is damaged"):
            store.push(Archive.open(path), "tiny:1")
        assert store.names() == []
        with pytest.raises(NotFound):
            store.get("tiny:1")
        store.push(FIRST, "tiny:1")  # nothing is left that could stand in the way
        store.get("tiny:1").verify()


class TestResolve:
    def test_an_empty_store_is_reported(self, store: Store) -> None:
        with pytest.raises(NotFound, match="has no model 'tiny'; it holds: nothing yet"):
            store.get("tiny:1")
        assert store.names() == []
        assert store.tags("tiny") == {}
        assert not store.root.exists()

    def test_the_content_is_listed(self, store: Store) -> None:
        store.push(FIRST, "team/tiny:1")
        store.push(FIRST, "other:2")
        with pytest.raises(NotFound, match="has no model 'tiny'; it holds: other, team/tiny"):
            store.get("tiny:1")
        with pytest.raises(NotFound, match="has no 'other:1'; 'other' has: 2"):
            store.get("other:1")

    def test_the_variant_stays_in_the_reference(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        assert str(store.resolve("tiny#int8")) == f"tiny:1@{FIRST.digest}#int8"

    @pytest.mark.parametrize(
        ("tags", "following"),
        [
            ([], "1"),
            (["1"], "2"),
            (["9", "10", "prod"], "11"),
            (["v3"], "4"),
            (["1.5"], "2"),
            (["0.1"], "1"),
            (["2-rc1"], "2"),
            (["7.1-beta"], "8"),
            (["prod"], "1"),
        ],
    )
    def test_the_next_version_is_above_all(self, store: Store, tags: list[str], following: str) -> None:
        for tag in tags:
            store.push(FIRST, f"tiny:{tag}")
        assert store.next_version("tiny") == following


class TestRoot:
    def test_the_environment_sets_its_location(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("INGOT_HOME", str(tmp_path / "home"))
        assert Store().root == tmp_path / "home"
        assert Store(tmp_path / "given").root == tmp_path / "given"
        monkeypatch.setenv("INGOT_HOME", "")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert Store().root == tmp_path / ".ingot"

    def test_a_store_that_is_not_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("text")
        store = Store(tmp_path / "file")
        with pytest.raises(InvalidArgument, match="cannot be read: it is not a folder"):
            store.names()
        with pytest.raises(InvalidArgument, match="cannot be read"):
            store.get("tiny:1")
        with pytest.raises(InvalidArgument, match="cannot be"):
            store.push(FIRST, "tiny:1")

    def test_a_store_that_cannot_be_written(self) -> None:
        with pytest.raises(InvalidArgument, match=r"/proc/ingot.* cannot be written"):
            Store("/proc/ingot").push(FIRST, "tiny:1")

    @pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
    def test_a_read_only_store(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        folder = store.root / "repos" / "tiny"
        folder.chmod(0o555)
        try:
            store.get("tiny:1").verify()  # readers need no lock
            with pytest.raises(InvalidArgument, match="cannot be written"):
                store.push(SECOND, "tiny:2")
        finally:
            folder.chmod(0o755)

    @pytest.mark.parametrize("content", [b"", b"text", b"[]", b'{"schemaVersion": 3}', b'{"a":' * 100_000])
    def test_a_damaged_index_is_named(self, store: Store, content: bytes) -> None:
        store.push(FIRST, "tiny:1")
        path = store.root / "repos" / "tiny" / "index.json"
        path.write_bytes(content)
        with pytest.raises(InvalidArchive, match=re.escape(str(path))):
            store.get("tiny:1")

    def test_a_missing_or_damaged_blob(self, store: Store) -> None:
        store.push(FIRST, "tiny:1")
        path = store.get("tiny:1").variant().path()
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(bytes(len(content)))
        with pytest.raises(InvalidArchive, match="is damaged"):
            store.get("tiny:1").verify()
        path.unlink()
        with pytest.raises(InvalidArchive, match="is missing"):
            store.get("tiny:1").verify()


PUSHER = """
import sys
from ingot.errors import AlreadyExists
from ingot.model_store import Store
from tests.model_store.samples import archive

store, me = Store(sys.argv[1]), sys.argv[2]
sys.stdin.read()  # all start together
for index in range(8):
    store.push(archive(f"{me}.{index}".encode()), f"shared:{me}.{index}")
    assert store.get(f"shared:{me}.{index}").variants
try:
    store.push(archive(me.encode()), "shared:1000")
    print("won")
except AlreadyExists:
    print("lost")
"""


@pytest.mark.matrix
def test_pushes_from_many_processes_lose_nothing(store: Store) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PUSHER, str(store.root), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for number in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, results
    assert sorted(out.strip() for out, _ in results) == ["lost", "lost", "lost", "won"]
    expected = {f"{number}.{index}" for number in range(4) for index in range(8)} | {"1000"}
    assert set(store.tags("shared")) == expected
    assert {entry["tag"] for entry in reflog(store, "shared")} == expected
    for tag in expected:
        store.get(f"shared:{tag}").verify()
    assert not list(store.root.rglob(".tmp-*"))


def blobs(store: Store) -> list[Path]:
    return sorted((store.root / "blobs" / "sha256").iterdir())


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestIsolation:
    def test_a_graph_that_names_a_blob_not_its_own_is_refused(self, store: Store) -> None:
        store.push(FIRST, "victim:1")
        stolen = store.get("victim:1").variant().weights[0].hex
        blobs = BlobFolder.scratch()
        graph = blobs.put(forgeries.adding(forgeries.external(stolen)), manifest.WEIGHT)
        thief = forgeries.forged(blobs, samples.serving(), graph)
        with pytest.raises(InvalidArchive, match="not its own"):
            store.push(thief, "thief:1")
        assert store.tags("thief") == {}

    @pytest.mark.parametrize("name", ["a/index.json", "oci-layout", "a/reflog.jsonl", "blobs/a"])
    def test_names_that_the_store_needs_itself(self, store: Store, name: str) -> None:
        with pytest.raises(InvalidArgument, match="is a reserved file name"):
            store.push(FIRST, f"{name}:1")

    def test_a_pinned_digest_is_never_another_archive(self, store: Store) -> None:
        store.push(FIRST, "tiny:prod")
        pinned = str(store.resolve("tiny:prod"))
        store.push(SECOND, "tiny:prod")
        with pytest.raises(NotFound):
            store.get(pinned)
