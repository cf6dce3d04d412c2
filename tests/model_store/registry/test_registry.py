from __future__ import annotations

import base64
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from ingot.errors import (
    InvalidArchive,
    InvalidArgument,
    Unauthenticated,
    Unsupported,
)
from ingot.model_store import Store, Transfer
from ingot.model_store.places import Place, open_place
from ingot.model_store.registry import Credentials, Registry
from tests.model_store.registry.servers import docker_registry
from tests.model_store.samples import archive
from tests.support import RequireTool

FIRST, SECOND = archive(b"one"), archive(b"two")
_numbers = count()


@pytest.fixture
def place(registry: str) -> Registry:
    return Registry(registry)


@pytest.fixture
def name() -> str:
    """A model of this test alone."""
    return f"team/tiny{next(_numbers)}"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


class TestPush:
    def test_a_pushed_archive_can_be_read_back(self, place: Registry, name: str, store: Store) -> None:
        pushed = place.push(FIRST, f"{name}:1")
        assert str(pushed) == f"{place.address}/{name}:1@{FIRST.digest}"
        got, found = place.find(f"{place.address}/{name}:1")
        assert (got.digest, found) == (FIRST.digest, pushed)
        got.verify()
        store.push(got, "tiny:1")
        assert store.get("tiny:1").variant("fp32").path().read_bytes() == b"onefp32"

    def test_pushing_the_same_again_moves_nothing(self, place: Registry, name: str) -> None:
        place.push(FIRST, f"{name}:1")
        transfer = Transfer()
        place.push(FIRST, f"{name}:1", transfer=transfer)
        assert (transfer.moved, transfer.skipped) == (0, transfer.total)

    def test_shared_blobs_of_two_versions_are_moved_once(self, place: Registry, name: str) -> None:
        weights = (b"w" * 100_000,)
        transfer = Transfer()
        place.push(archive(b"one", weights), f"{name}:1")
        place.push(archive(b"two", weights), f"{name}:2", transfer=transfer)
        assert transfer.done == transfer.total
        assert transfer.skipped > 100_000 > transfer.moved

    @pytest.mark.matrix
    def test_blobs_of_another_repository_are_mounted_without_a_copy(self, place: Registry, name: str) -> None:
        weights = (b"m" * 100_000,)
        place.push(archive(b"one", weights), f"{name}:1")
        transfer = Transfer()
        place.push(place.find(f"{name}:1")[0], f"other/{name}:1", transfer=transfer)
        assert transfer.skipped > 100_000 > transfer.moved
        place.find(f"other/{name}:1")[0].verify()

    def test_a_damaged_blob_is_not_sent_and_no_tag_is_made(self, place: Registry, name: str, store: Store) -> None:
        weights = b"d" * 100_000
        store.push(archive(b"one", (weights,)), "tiny:1")
        damaged = store.get("tiny:1")
        path = store.blobs.path(damaged.variant("fp32").weights[0])
        path.chmod(0o644)
        path.write_bytes(b"e" * 100_000)
        with pytest.raises(InvalidArchive, match=f"{path.name}.* is damaged"):
            place.push(damaged, f"{name}:1")
        assert place.tags(name) == {}

    @pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 20])
    def test_chunks_arrive_as_one_blob(self, registry: str, name: str, chunk_bytes: int) -> None:
        place = Registry(registry, chunk_bytes=chunk_bytes * 1000)
        place.push(archive(name.encode(), (name.encode() * 1000, b"")), f"{name}:1")
        place.find(f"{name}:1")[0].verify()


class TestFind:
    def test_another_registry_is_not_meant(self, place: Registry) -> None:
        with pytest.raises(InvalidArgument, match="is in another registry than"):
            place.find("oci://elsewhere/tiny:1")


class TestRemove:
    def test_a_tag_is_kept_where_others_would_go_with_it(self, place: Registry, name: str) -> None:
        place.push(FIRST, f"{name}:1")
        place.promote(f"{name}:1", "prod")
        with pytest.raises(Unsupported, match=f"with '{name}:prod' it would delete 1, which is the same archive"):
            place.remove(f"{name}:prod")
        assert set(place.tags(name)) == {"1", "prod"}

    @pytest.mark.matrix
    def test_a_registry_that_deletes_nothing_is_reported(self, require_tool: RequireTool, tmp_path: Path) -> None:
        with docker_registry(require_tool("docker-registry"), tmp_path, delete=False) as port:
            place = Registry(f"oci://127.0.0.1:{port}")
            place.push(FIRST, "tiny:1")
            with pytest.raises(Unsupported, match="does not allow deletion; its administrator can enable it"):
                place.remove("tiny:1")


class TestAttachments:
    def test_they_travel_with_the_archive(self, place: Registry, name: str, store: Store) -> None:
        place.push(FIRST.with_signature(b"{1}"), f"{name}:1")
        got = place.find(f"{name}:1")[0]
        assert got.signatures() == (b"{1}",)
        store.push(got, "tiny:1")
        assert store.get("tiny:1").signatures() == (b"{1}",)

    @pytest.mark.matrix
    def test_they_are_added_to_existing_ones_and_are_not_tags(self, place: Registry, name: str) -> None:
        place.push(FIRST.with_signature(b"{1}"), f"{name}:1")
        for content in (b"{2}", b"{2}", b"{3}"):
            place.attach(place.find(f"{name}:1")[0].with_signature(content), name)
        assert sorted(place.find(f"{name}:1")[0].signatures()) == [b"{1}", b"{2}", b"{3}"]
        assert place.tags(name) == {"1": FIRST.digest}

    @pytest.mark.matrix
    def test_none_is_lost_when_several_are_attached_at_once(self, place: Registry, name: str) -> None:
        place.push(FIRST, f"{name}:1")
        signed = [FIRST.with_signature(f"{{{number}}}".encode()) for number in range(4)]
        with ThreadPoolExecutor() as pool:
            for done in [pool.submit(place.attach, item, name) for item in signed]:
                done.result()
        assert len(place.find(f"{name}:1")[0].signatures()) == 4


class TestPassword:
    def test_it_opens_the_registry(self, registry_with_password: tuple[str, str, str], name: str) -> None:
        address, user, password = registry_with_password
        place = Registry(address, credentials=Credentials(user, password))
        place.push(FIRST, f"{name}:1")
        place.find(f"{name}:1")[0].verify()
        assert name in place.names()

    @pytest.mark.usefixtures("without_logins")
    def test_without_credentials_the_error_explains_how_to_log_in(
        self, registry_with_password: tuple[str, str, str]
    ) -> None:
        address = registry_with_password[0]
        host = address.removeprefix("oci://")
        with pytest.raises(
            Unauthenticated,
            match=f"refuses access to 'tiny' .401: .*docker login {host}, as a user",
        ):
            Registry(address).find("tiny:1")

    def test_a_wrong_one_is_refused_and_not_shown(self, registry_with_password: tuple[str, str, str]) -> None:
        address, user, _ = registry_with_password
        place = Registry(address, credentials=Credentials(user, "hunter2"))
        with pytest.raises(Unauthenticated, match="refuses the credentials for 'tiny'") as caught:
            place.find("tiny:1")
        assert "hunter2" not in f"{caught.value!r} {place!r} {Credentials(user, 'hunter2')!r}"

    def test_wrong_credentials_in_a_file_are_reported_with_the_file_and_purpose(
        self, registry_with_password: tuple[str, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        address, user, _ = registry_with_password
        file, host = tmp_path / "auth.json", address.removeprefix("oci://")
        auth = base64.b64encode(f"{user}:hunter2".encode()).decode()
        file.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(file))
        for verb, call in (
            ("pull", lambda: Registry(address).find("tiny:1")),
            ("push", lambda: Registry(address).push(FIRST, "tiny:1")),
        ):
            with pytest.raises(Unauthenticated, match=f"refuses the credentials of {file} .* who may {verb}$"):
                call()


class TestSkopeo:
    """An independent client reads archives that we write, and writes archives that we read."""

    def test_a_layout_that_it_copies_from_the_registry_has_the_same_digests(
        self, place: Registry, name: str, require_tool: RequireTool, tmp_path: Path
    ) -> None:
        place.push(FIRST, f"{name}:1")
        source = f"docker://{place.address.netloc}/{name}:1"
        skopeo(require_tool, "--src-tls-verify=false", source, f"oci:{tmp_path / 'layout'}:1")
        (entry,) = json.loads((tmp_path / "layout" / "index.json").read_text())["manifests"]
        assert entry["digest"] == FIRST.digest
        copied = {path.name for path in (tmp_path / "layout" / "blobs" / "sha256").iterdir()}
        assert copied == {item.hex for item in FIRST.descriptors()}

    def test_its_copies_in_the_registry_are_found(
        self, place: Registry, name: str, require_tool: RequireTool, tmp_path: Path
    ) -> None:
        SECOND.save(tmp_path / "a.ingot")
        target = f"docker://{place.address.netloc}/{name}:2"
        skopeo(require_tool, "--dest-tls-verify=false", f"oci-archive:{tmp_path / 'a.ingot'}:tiny", target)
        got = place.find(f"{name}:2")[0]
        got.verify()
        assert got.digest == SECOND.digest


def skopeo(require_tool: RequireTool, *arguments: str) -> None:
    command = [require_tool("skopeo"), "copy", "--all", "--preserve-digests", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


class TestOpenPlace:
    def test_a_reference_leads_to_the_store_or_to_a_registry(self, registry: str, store: Store) -> None:
        local: Place
        local, ref = open_place("tiny:1", store)
        assert (local, str(ref)) == (store, "tiny:1")
        remote, ref = open_place(f"{registry}/tiny:1", store)
        assert isinstance(remote, Registry)
        assert (str(remote.address), ref.name) == (registry, "tiny")
