"""The store's commands as a user types them, each in its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.model_store import Archive
from tests.model_store.registry.proxy import Fault, serving
from tests.model_store.samples import archive
from tests.support import RunIngot, refused, succeeded

FIRST, SECOND = archive(b"one"), archive(b"two")  # whose weights and goldens are the same


@pytest.fixture
def pushed(run_ingot: RunIngot, tmp_path: Path) -> None:
    for tag, item in (("1", FIRST), ("2", SECOND)):
        item.save(tmp_path / f"{tag}.ingot")
        succeeded(run_ingot("copy", f"{tag}.ingot", f"tiny:{tag}"))


def read(output: str) -> Any:
    return json.loads(output)


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_promotion_and_the_way_back(run_ingot: RunIngot) -> None:
    assert succeeded(run_ingot("store", "promote", "tiny:1", "prod")) == f"tiny:prod  {FIRST.digest}\n"
    moved = run_ingot("store", "promote", "tiny:2", "prod", "--expect", FIRST.digest)
    assert succeeded(moved) == f"tiny:prod  {SECOND.digest}\n"
    assert moved.stderr == f"tiny:prod was {FIRST.digest}\n"
    assert "it was moved meanwhile" in refused(run_ingot("store", "promote", "tiny:1", "prod", "--expect", "none"))
    moves = (
        ("store", "promote", "tiny:1", "prod"),
        ("store", "rollback", "tiny:prod"),
        ("store", "remove", "tiny:prod"),
    )
    copies = (("copy", "1.ingot", "tiny:prod"), ("copy", "tiny:1", "tiny:prod"))
    for command in (*moves, *copies):
        assert "--expect is '', which is not a digest" in refused(run_ingot(*command, "--expect", ""))
    assert "give sha256: and 64 hex digits, or none" in refused(run_ingot(*moves[0], "--expect", FIRST.digest.upper()))
    back = read(succeeded(run_ingot("store", "rollback", "tiny:prod", "--json")))
    named = {"reference": "tiny:prod", "name": "tiny", "tag": "prod"}
    assert back == {**named, "digest": FIRST.digest, "before": SECOND.digest}
    message = refused(run_ingot("inspect", f"tiny:prod@{SECOND.digest}"))
    assert f"'tiny:prod' is {FIRST.digest} now; a digest without a tag is independent" in message
    assert "has no previous target" in refused(run_ingot("store", "rollback", "tiny:prod"))
    lines = succeeded(run_ingot("store", "history", "tiny:prod")).splitlines()
    assert [line.split()[2:5] for line in lines] == [
        ["rollback", "tiny:prod", FIRST.digest],
        ["promote", "tiny:prod", SECOND.digest],
        ["promote", "tiny:prod", FIRST.digest],
    ]
    told = read(succeeded(run_ingot("store", "history", "tiny", "--json")))
    assert [(move["tag"], move["action"]) for move in told[-2:]] == [("2", "push"), ("1", "push")]
    assert "no history of 'tiny:canary'" in refused(run_ingot("store", "history", "tiny:canary"))
    succeeded(run_ingot("store", "remove", "tiny:prod"))
    assert run_ingot("store", "rollback", "tiny:prod").stderr == "tiny:prod was removed, and is restored\n"


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_removing_collecting_and_checking(run_ingot: RunIngot) -> None:
    assert succeeded(run_ingot("store", "remove", "tiny:2")) == f"tiny:2 removed, was {SECOND.digest}\n"
    shown = succeeded(run_ingot("store", "gc")).splitlines()
    assert shown[0].startswith("0 files, 0 B were removed; ")
    assert shown[1].startswith("9 files, ")
    assert shown[1].endswith(" are unused and will be removed after the grace period (24h)")
    would = read(succeeded(run_ingot("store", "gc", "--grace", "0s", "--dry-run", "--json")))
    assert len(would["files"]) == 9
    assert would["dry_run"]
    assert succeeded(run_ingot("store", "gc", "--grace", "0s")).startswith("9 files, ")
    assert succeeded(run_ingot("store", "fsck")) == "1 archives, 11 blobs: no problems\n"
    assert "which is now incomplete" in refused(run_ingot("store", "rollback", "tiny:2"))
    assert "--grace 'soon' is not a duration; write it as 30s" in refused(run_ingot("store", "gc", "--grace", "soon"))


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_damage_is_reported_quarantined_and_repaired(run_ingot: RunIngot, tmp_path: Path) -> None:
    (path,) = (tmp_path / "home" / "blobs" / "sha256").glob(FIRST.variant().graph.hex)
    path.chmod(0o644)
    path.write_bytes(bytes(path.stat().st_size))
    found = run_ingot("store", "fsck")
    assert found.returncode == 1
    assert found.stdout.splitlines()[0].startswith(f"blob sha256:{path.name}: its content has the digest sha256:")
    assert found.stdout.splitlines()[0].endswith("; needed by tiny:1")
    repaired = run_ingot("store", "fsck", "--repair", "--json")
    assert repaired.returncode == 1
    assert read(repaired.stdout)["problems"][0]["repaired"]
    succeeded(run_ingot("copy", "1.ingot", "tiny:1"))
    assert succeeded(run_ingot("store", "fsck", "--quick")) == "2 archives, 20 blobs: no problems\n"
    assert "leave out --quick" in refused(run_ingot("store", "fsck", "--quick", "--repair"))


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_files_names_and_stores(run_ingot: RunIngot, tmp_path: Path) -> None:
    told = read(succeeded(run_ingot("copy", "tiny:1", "saved.ingot", "--json")))
    assert told == {"file": "saved.ingot", "digest": FIRST.digest, "size": (tmp_path / "saved.ingot").stat().st_size}
    assert Archive.open(tmp_path / "saved.ingot").digest == FIRST.digest
    other = ("--store", tmp_path / "other")
    loaded = read(succeeded(run_ingot("copy", "saved.ingot", *other, "--json")))
    assert loaded["reference"] == "tiny:1"
    assert loaded["moved"] == loaded["size"]
    assert read(succeeded(run_ingot("copy", "saved.ingot", *other, "--json")))["reference"] == "tiny:1"
    assert succeeded(run_ingot("copy", "2.ingot", *other)) == f"tiny:2  {SECOND.digest}\n"
    copied = run_ingot("copy", "tiny:2", "team/tiny:prod")
    assert succeeded(copied) == f"team/tiny:prod  {SECOND.digest}\n"
    assert copied.stderr.startswith("team/tiny:prod is new\n0 B copied, ")
    assert succeeded(run_ingot("store", "list", "team/tiny")) == f"team/tiny:prod  {SECOND.digest}\n"
    assert [item["tag"] for item in read(succeeded(run_ingot("store", "list", "--json")))] == ["prod", "1", "2"]
    for tag in ("10", "v1.9", "canary"):
        succeeded(run_ingot("copy", "tiny:2", f"tiny:{tag}"))
    lines = [line.split() for line in succeeded(run_ingot("store", "list", "tiny")).splitlines()]
    assert [line[0] for line in lines] == ["tiny:1", "tiny:v1.9", "tiny:2", "tiny:10", "tiny:canary"]
    assert lines[-1][1:] == [SECOND.digest, "=", "10"]
    last = read(succeeded(run_ingot("store", "list", "tiny", "--json")))[-1]
    named = {"reference": "tiny:canary", "name": "tiny", "tag": "canary"}
    assert last == {**named, "digest": SECOND.digest, "version": "10"}
    assert "; below that name are: team/tiny" in refused(run_ingot("store", "list", "team"))
    assert "; there are: team/tiny, tiny" in refused(run_ingot("store", "list", "none"))


@pytest.mark.matrix
def test_a_missing_store_is_reported(run_ingot: RunIngot, tmp_path: Path) -> None:
    result = run_ingot("store", "list")
    assert succeeded(result) == ""
    assert f"there is no store at {tmp_path / 'home'} yet" in result.stderr
    assert "there is no store at" in refused(run_ingot("store", "history", "tiny"))
    for command in ("fsck", "gc"):
        assert "which INGOT_HOME names" in refused(run_ingot("store", command))
        assert "there is no store at mispelt, which --store names" in refused(
            run_ingot("store", command, "--store", "mispelt")
        )
    assert not (tmp_path / "home").exists()


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_archives_in_a_registry_are_listed_by_full_name(run_ingot: RunIngot, registry: str) -> None:
    model = f"{registry}/named/tiny"
    assert succeeded(run_ingot("copy", "tiny:1", f"{model}:1")) == f"{model}:1  {FIRST.digest}\n"
    promoted = run_ingot("store", "promote", f"{model}:1", "prod")
    assert promoted.stdout == f"{model}:prod  {FIRST.digest}\n"
    assert promoted.stderr == f"{model}:prod is new\n"
    assert succeeded(run_ingot("store", "list", model)).splitlines()[1] == f"{model}:prod  {FIRST.digest}  = 1"
    told = read(succeeded(run_ingot("store", "list", model, "--json")))
    assert [(item["reference"], item["name"]) for item in told] == [(f"{model}:1", model), (f"{model}:prod", model)]
    assert read(succeeded(run_ingot("copy", f"{model}:1", f"{model}:2", "--json")))["reference"] == f"{model}:2"
    assert read(succeeded(run_ingot("copy", "1.ingot", f"{model}:3", "--json")))["digest"] == FIRST.digest


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_an_untagged_archive_is_pulled_under_a_given_name(run_ingot: RunIngot, registry: str) -> None:
    remote = f"{registry}/cli/untagged"
    for tag in ("1", "2"):
        succeeded(run_ingot("copy", f"tiny:{tag}", f"{remote}:prod"))
    lost = f"{remote}@{FIRST.digest}"
    assert f"no tag points to '{lost}'; give its name in the store, such as cli/untagged:1" in refused(
        run_ingot("copy", lost)
    )
    assert succeeded(run_ingot("copy", lost, "found:1")) == f"found:1  {FIRST.digest}\n"
    assert "None" not in succeeded(run_ingot("store", "list"))


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_a_promotion_asks_a_registry_for_one_tag(run_ingot: RunIngot, registry: str) -> None:
    with serving(upstream=int(registry.rpartition(":")[2])) as proxy:
        remote = f"{proxy.address}/cli/promoted"
        for tag in ("1", "2"):
            succeeded(run_ingot("copy", f"tiny:{tag}", f"{remote}:{tag}"))
        proxy.faults = [Fault("tags/list", times=1000, status=403)]
        moved = run_ingot("store", "promote", f"{remote}:1", "prod")
        assert succeeded(moved) == f"{remote}:prod  {FIRST.digest}\n"
        assert moved.stderr == f"{remote}:prod is new\n"
        proxy.log.clear()
        moved = run_ingot("store", "promote", f"{remote}:2", "prod", "--expect", FIRST.digest)
        assert succeeded(moved) == f"{remote}:prod  {SECOND.digest}\n"
        assert moved.stderr == f"{remote}:prod was {FIRST.digest}\n"
        assert proxy.asked("tags/list|manifests/1$") == []
        assert "a version never changes" in refused(run_ingot("store", "promote", f"{remote}:2", "1"))
        assert "has no" in refused(run_ingot("store", "promote", f"{remote}:3", "prod"))


@pytest.mark.matrix
@pytest.mark.usefixtures("pushed")
def test_all_commands_accept_the_same_references(run_ingot: RunIngot, tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    succeeded(run_ingot("trust", "keygen"))
    address = f"file://{tmp_path}/1.ingot"
    unsigned = [
        run_ingot("trust", "verify", source, "--key", "ingot.pub") for source in (address, "./1.ingot", "tiny:1")
    ]
    assert all("it is unsigned" in refused(result) for result in unsigned)
    assert "cannot be written; sign a file" in refused(run_ingot("trust", "sign", address, "--key", "ingot.key"))
    assert succeeded(run_ingot("copy", address, "copied:1")) == f"copied:1  {FIRST.digest}\n"
    assert succeeded(run_ingot("copy", address, "saved.ingot")).startswith("saved.ingot: tiny, ")
    assert json.loads(succeeded(run_ingot("inspect", f"{address}#int8", "--json")))["digest"] == FIRST.digest
    assert json.loads(succeeded(run_ingot("diff", address, "tiny:1", "--json")))
    assert "'1.ingot' is used with all its variants here; leave #int8 out" in refused(
        run_ingot("copy", "1.ingot#int8", "tiny:3")
    )
    for command in (("inspect", "x.onnx"), ("copy", "x.onnx", "x:1"), ("copy", "x.onnx")):
        (tmp_path / "x.onnx").write_bytes(b"x")
        assert "ingot export converts it" in refused(run_ingot(*command))


@pytest.mark.usefixtures("pushed")
class TestRefused:
    @pytest.mark.matrix
    def test_wrong_references(self, run_ingot: RunIngot) -> None:
        cases = {
            ("copy", "tiny:1", "s3://bucket/1.ingot"): "cannot be written; copy the archive to a file",
            ("copy", "tiny:1", "1.onnx"): "is written as an archive; name it 1.ingot",
            ("copy", "tiny:1", "2.ingot", "--expect", "none"): "--expect is for tags, and '2.ingot' is a file",
            ("copy", "tiny:1", "2.ingot", "--chunk-mb", "1"): "--chunk-mb is for tags, and '2.ingot' is a file",
            ("copy", "1.ingot", "--chunk-mb", "1"): "--chunk-mb is for uploads to a registry; leave it out",
            (
                "copy",
                "1.ingot",
                "oci/host__443/tiny:1",
            ): "names in oci/ are reserved for archives that servers pull; choose another",
            ("copy", "1.ingot", "tiny"): "write name:tag, such as tiny:1",
            ("copy", "none.ingot", "tiny:3"): "there is no file none.ingot",
            ("copy", "oci://127.0.0.1:1/tiny:1", "cls"): "cannot become 'cls'; write name:tag, such as cls:1",
            ("copy", "tiny:1"): "'tiny:1' is in the store already; name a target: name:tag, oci://host/name:tag or",
            ("copy", "tiny:1#int8", "tiny:3"): "'tiny:1' is used with all its variants here; leave #int8 out",
            ("copy", "tiny:1", "oci://nope"): "is not a model reference",
            ("copy", "tiny:1", "nowhere/a.ingot"): "there is no folder nowhere",
            ("store", "promote", "tiny:1", "2"): "a version never changes",
            ("store", "promote", "tiny:1", "a b"): "'a b' is not a tag",
            (
                "store",
                "rollback",
                "oci://127.0.0.1:1/tiny:prod",
            ): "registries keep no history of tags; promote a version",
            ("store", "history", "oci://127.0.0.1:1/tiny"): "registries keep no history of tags",
            ("store", "remove", "tiny"): "name a tag, such as tiny:1",
            ("store", "list", "tiny:1"): "ingot inspect shows it",
            ("store", "list", "none"): "there is no model 'none'",
        }
        for command, message in cases.items():
            assert message in refused(run_ingot(*command)), command

    @pytest.mark.matrix
    def test_a_store_of_a_newer_schema(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        (tmp_path / "home" / "store.json").write_text('{"schema_version": 2}')
        commands = ("store list", "copy 1.ingot tiny:3", "store gc", "store fsck", "serve tiny:1")
        for command in commands:
            assert "was made by a newer Ingot" in refused(run_ingot(*command.split()))

    def test_a_file_that_was_tampered_with_is_not_loaded(self, run_ingot: RunIngot, tmp_path: Path) -> None:
        path = tmp_path / "1.ingot"
        path.write_bytes(path.read_bytes().replace(b"some weights", b"evil weights"))
        assert "is damaged" in refused(run_ingot("copy", "1.ingot", "--store", tmp_path / "other"))
        assert succeeded(run_ingot("store", "list", "--store", tmp_path / "other")) == ""


@pytest.mark.usefixtures("pushed")
def test_a_damaged_file_is_reported_although_the_store_has_its_blobs(run_ingot: RunIngot, tmp_path: Path) -> None:
    path = tmp_path / "1.ingot"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"some weights", b"same weights"))
    message = refused(run_ingot("copy", "1.ingot", "tiny:1"))
    assert message.startswith("1.ingot: blob sha256:")
    assert message.endswith("is damaged: its content has another digest")
    succeeded(run_ingot("store", "fsck"))  # the store's own blobs are whole
    path.write_bytes(whole)
    succeeded(run_ingot("copy", "1.ingot", "tiny:1"))
