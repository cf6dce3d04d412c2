"""``ingot trust keygen``, ``sign`` and ``verify`` as a user types them, each in its own process."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from ingot.model_store import Archive, Store
from tests.model_store.samples import archive
from tests.support import RunIngot, refused, succeeded

FIRST, SECOND = archive(b"one"), archive(b"two")


@pytest.fixture
def keyid(run_ingot: RunIngot) -> str:
    """A key ``ingot.key`` and ``ingot.pub`` in the folder that commands run in; returns its id."""
    return str(json.loads(succeeded(run_ingot("trust", "keygen", "--json")))["keyid"])


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """The store of the commands, with ``team/tiny:1`` and ``team/tiny:2``."""
    store = Store(tmp_path / "home")
    store.push(FIRST, "team/tiny:1")
    store.push(SECOND, "team/tiny:2")
    return store


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "trust.toml"
    path.write_text('[[rule]]\nnames = "team/*"\nkeys = ["ingot.pub"]\n')
    return path


@pytest.mark.matrix
def test_the_way_of_a_team(run_ingot: RunIngot, store: Store, keyid: str, policy: Path, tmp_path: Path) -> None:
    assert "it is unsigned" in refused(run_ingot("trust", "verify", "team/tiny:1", "--trust", policy))
    line = f"tiny  {FIRST.digest}  signed by {keyid}\n"
    assert succeeded(run_ingot("trust", "sign", "team/tiny:1", "--key", "ingot.key")) == line
    again = run_ingot("trust", "sign", "team/tiny:1", "--key", "ingot.key", "--json")
    assert json.loads(succeeded(again)) == {"name": "tiny", "digest": FIRST.digest, "keyid": keyid, "added": False}
    assert "is signed by this key already" in again.stderr
    shown = succeeded(run_ingot("trust", "verify", "team/tiny:1", "--trust", policy))
    assert shown.startswith(f"team/tiny:1  {FIRST.digest}\nsigned by {keyid}, 20")
    assert "by rule 1 (names = 'team/*'); code not allowed" in shown
    told = json.loads(succeeded(run_ingot("trust", "verify", "team/tiny:1", "--key", "ingot.pub", "--json")))
    assert (told["result"], told["signed_by"], told["blobs_checked"]) == ("valid", keyid, True)
    assert [claim["keyid"] for claim in told["signatures"]] == [keyid]
    assert "it is unsigned" in refused(run_ingot("trust", "verify", "team/tiny:2", "--trust", policy))


@pytest.mark.matrix
def test_other_signatures_are_dropped_on_demand(run_ingot: RunIngot, store: Store, keyid: str, tmp_path: Path) -> None:
    new = json.loads(succeeded(run_ingot("trust", "keygen", "--out", "new", "--json")))["keyid"]
    succeeded(run_ingot("copy", "team/tiny:1", "tiny.ingot"))
    for model in ("team/tiny:1", "tiny.ingot"):
        for key, more in (("ingot.key", []), ("new.key", []), ("new.key", ["--replace"])):
            told = json.loads(succeeded(run_ingot("trust", "sign", model, "--key", key, *more, "--json")))
            assert told["added"], (model, key)
        signatures = json.loads(succeeded(run_ingot("inspect", model, "--json")))["signatures"]
        assert [claim["keyid"] for claim in signatures] == [new]


@pytest.mark.matrix
def test_untrusted_archives_are_reported_in_json_too(
    run_ingot: RunIngot, store: Store, keyid: str, policy: Path, tmp_path: Path
) -> None:
    succeeded(run_ingot("trust", "keygen", "--out", "other"))
    succeeded(run_ingot("trust", "sign", "team/tiny:1", "--key", "other.key"))
    result = run_ingot("trust", "verify", "team/tiny:1", "--trust", policy, "--json")
    told = json.loads(result.stdout)
    assert (result.returncode, told["result"], len(told["signatures"])) == (1, "refused", 1)
    assert f"error: {told['reason']}\n" == result.stderr
    FIRST.save(tmp_path / "tiny.ingot")
    message = refused(run_ingot("trust", "verify", "tiny.ingot", "--trust", policy))
    assert message.startswith("tiny.ingot (sha256:")
    assert message.endswith("no rule names 'tiny'; the rules are for: team/*")


def test_a_file_is_signed_in_place(run_ingot: RunIngot, keyid: str, tmp_path: Path) -> None:
    FIRST.save(tmp_path / "tiny.ingot")
    succeeded(run_ingot("trust", "sign", "tiny.ingot", "--key", "ingot.key"))
    assert Archive.open(tmp_path / "tiny.ingot").digest == FIRST.digest
    assert f"signed by {keyid}" in succeeded(run_ingot("trust", "verify", "./tiny.ingot", "--key", "ingot.pub"))
    SECOND.save(tmp_path / "tiny.ingot")
    assert "it is unsigned" in refused(run_ingot("trust", "verify", "tiny.ingot", "--key", "ingot.pub"))


def test_an_archive_that_was_signed_and_then_damaged_is_refused(
    run_ingot: RunIngot, store: Store, keyid: str, policy: Path
) -> None:
    succeeded(run_ingot("trust", "sign", "team/tiny:1", "--key", "ingot.key"))
    graph = store.get("team/tiny:1").variant("fp32").path()
    graph.chmod(0o644)
    graph.write_bytes(b"x" * graph.stat().st_size)
    assert "is damaged: its content has another digest" in refused(
        run_ingot("trust", "verify", "team/tiny:1", "--trust", policy)
    )


def test_keys_are_made_for_their_owner_alone_and_never_overwritten(run_ingot: RunIngot, tmp_path: Path) -> None:
    made = run_ingot("trust", "keygen", "-o", "keys.of.team")
    assert succeeded(made).startswith("keys.of.team.key  to sign with")
    assert "is not encrypted" in made.stderr
    private = tmp_path / "keys.of.team.key"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    before = private.read_bytes()
    assert "keys.of.team.key already exists" in refused(run_ingot("trust", "keygen", "-o", "keys.of.team"))
    private.unlink()
    assert "keys.of.team.pub already exists" in refused(run_ingot("trust", "keygen", "-o", "keys.of.team"))
    assert not private.exists()
    private.symlink_to(tmp_path / "elsewhere")
    assert "already exists" in refused(run_ingot("trust", "keygen", "-o", "keys.of.team"))
    assert not (tmp_path / "elsewhere").exists()
    assert before.startswith(b"-----BEGIN PRIVATE KEY-----")


@pytest.mark.matrix
def test_an_encrypted_key_needs_its_password(
    run_ingot: RunIngot, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INGOT_KEY_PASSWORD", "right")
    assert "not encrypted" not in run_ingot("trust", "keygen").stderr
    assert (tmp_path / "ingot.key").read_bytes().startswith(b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
    sign = ("trust", "sign", "team/tiny:1", "--key", "ingot.key")
    monkeypatch.setenv("INGOT_KEY_PASSWORD", "wrong")
    assert "ingot.key cannot be decrypted: the password is wrong" in refused(run_ingot(*sign))
    monkeypatch.delenv("INGOT_KEY_PASSWORD")
    assert "set INGOT_KEY_PASSWORD" in refused(run_ingot(*sign))
    monkeypatch.setenv("INGOT_KEY_PASSWORD", "right")
    succeeded(run_ingot(*sign))


def test_a_key_that_others_can_read_is_remarked_upon(
    run_ingot: RunIngot, store: Store, keyid: str, tmp_path: Path
) -> None:
    (tmp_path / "ingot.key").chmod(0o644)
    result = run_ingot("trust", "sign", "team/tiny:1", "--key", "ingot.key")
    succeeded(result)
    assert "ingot.key can be read by other users of this machine; chmod 600 ingot.key" in result.stderr


@pytest.mark.matrix
def test_the_policy_can_come_from_the_environment(
    run_ingot: RunIngot, store: Store, keyid: str, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "there is no trust policy" in refused(run_ingot("trust", "verify", "team/tiny:1"))
    monkeypatch.setenv("INGOT_TRUST", str(policy))
    assert "rule 1 (names = 'team/*')" in refused(run_ingot("trust", "verify", "team/tiny:1"))
    succeeded(run_ingot("trust", "sign", "team/tiny:1", "--key", "ingot.key"))
    succeeded(run_ingot("trust", "verify", "team/tiny:1"))
    succeeded(run_ingot("trust", "verify", "team/tiny:1", "--key", "ingot.pub"))


def test_an_archive_that_a_policy_accepts_unsigned_is_reported_as_such(
    run_ingot: RunIngot, store: Store, policy: Path
) -> None:
    policy.write_text("require_signature = false\n")
    assert "unsigned, which the policy allows" in succeeded(
        run_ingot("trust", "verify", "team/tiny:1", "--trust", policy)
    )


@pytest.mark.matrix
def test_impossible_commands_are_refused(run_ingot: RunIngot, store: Store, keyid: str, policy: Path) -> None:
    both = run_ingot("trust", "verify", "team/tiny:1", "--trust", policy, "--key", "ingot.pub")
    assert "cannot be given together" in refused(both)
    for command in ("sign", "verify"):
        key = "ingot.key" if command == "sign" else "ingot.pub"
        assert "leave #int8 out" in refused(run_ingot("trust", command, "team/tiny:1#int8", "--key", key))
        assert "there is no file lost" in refused(run_ingot("trust", command, "team/tiny:1", "--key", "lost"))
        assert "has no model 'lost'" in refused(run_ingot("trust", command, "lost:1", "--key", key))
    assert "is a public key, not a private key" in refused(
        run_ingot("trust", "sign", "team/tiny:1", "--key", "ingot.pub")
    )
    assert "is a private key, not a public key" in refused(
        run_ingot("trust", "verify", "team/tiny:1", "--key", "ingot.key")
    )


@pytest.mark.matrix
def test_an_archive_in_a_registry_is_signed_there_and_keeps_its_signature(
    run_ingot: RunIngot, registry: str, store: Store, keyid: str, policy: Path
) -> None:
    remote = f"{registry}/team/tiny:1"
    succeeded(run_ingot("copy", "team/tiny:1", remote))
    assert "it is unsigned" in refused(run_ingot("copy", remote, "team/pulled:1", "--trust", policy))
    assert "it is unsigned" in refused(run_ingot("copy", remote, "team/pulled:1", "--trust", policy))
    succeeded(run_ingot("trust", "sign", remote, "--key", "ingot.key"))
    told = json.loads(succeeded(run_ingot("trust", "verify", remote, "--trust", policy, "--json")))
    assert (told["result"], told["signed_by"], told["blobs_checked"]) == ("valid", keyid, False)
    assert "pulled" not in " ".join(store.names())
    succeeded(run_ingot("copy", remote, "--trust", policy))
    succeeded(run_ingot("trust", "verify", "team/tiny:1", "--trust", policy))


@pytest.mark.matrix
def test_a_policy_holds_for_pushed_and_saved_archives_too(
    run_ingot: RunIngot, registry: str, store: Store, keyid: str, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = f"{registry}/team/trusted/tiny:1"
    policy.write_text('[[rule]]\nnames = "**"\nkeys = ["ingot.pub"]\n')
    succeeded(run_ingot("copy", "team/tiny:1", remote))
    monkeypatch.setenv("INGOT_TRUST", str(policy))
    for command in (("copy", remote, "tiny:1"), ("copy", "team/tiny:1", remote), ("copy", remote, "tiny.ingot")):
        assert "it is unsigned" in refused(run_ingot(*command))
    succeeded(run_ingot("trust", "sign", remote, "--key", "ingot.key"))
    for command in (("copy", remote, "tiny:1"), ("copy", "tiny:1", remote), ("copy", remote, "tiny.ingot")):
        succeeded(run_ingot(*command))


@pytest.mark.matrix
def test_with_a_policy_existing_archives_are_read_and_repaired(
    run_ingot: RunIngot, registry: str, store: Store, keyid: str, policy: Path
) -> None:
    remote = f"{registry}/team/rechecked/tiny:1"
    succeeded(run_ingot("copy", "team/tiny:1", remote))
    succeeded(run_ingot("trust", "sign", remote, "--key", "ingot.key"))
    graph = store.get("team/tiny:1").variant("fp32").path()
    graph.chmod(0o644)
    graph.write_bytes(b"x" * graph.stat().st_size)
    policy.write_text('[[rule]]\nnames = "**"\nkeys = ["ingot.pub"]\n')
    succeeded(run_ingot("copy", remote, "tiny:1", "--trust", policy))
    store.get("tiny:1").verify()


@pytest.mark.matrix
def test_a_file_is_loaded_only_if_it_is_trusted(run_ingot: RunIngot, keyid: str, policy: Path, tmp_path: Path) -> None:
    policy.write_text('[[rule]]\nnames = "**"\nkeys = ["ingot.pub"]\n')
    FIRST.save(tmp_path / "tiny.ingot")
    assert "it is unsigned" in refused(run_ingot("copy", "tiny.ingot", "tiny:1", "--trust", policy))
    succeeded(run_ingot("trust", "sign", "tiny.ingot", "--key", "ingot.key"))
    succeeded(run_ingot("copy", "tiny.ingot", "tiny:1", "--trust", policy))
    succeeded(run_ingot("trust", "verify", "tiny:1", "--trust", policy))


class TestBundles:
    """``--format oms``: bundles of OpenSSF Model Signing."""

    def test_an_archive_file(self, run_ingot: RunIngot, keyid: str, tmp_path: Path) -> None:
        FIRST.save(tmp_path / "tiny.ingot")
        line = succeeded(run_ingot("trust", "sign", "tiny.ingot", "--key", "ingot.key", "--format", "oms"))
        assert line == f"tiny.ingot.sig  signs tiny.ingot, by {keyid}\n"
        shown = succeeded(run_ingot("trust", "verify", "tiny.ingot", "--key", "ingot.pub"))
        assert f"signed by {keyid} (format oms)\n" in shown
        (tmp_path / "tiny.ingot.sig").rename(tmp_path / "apart.sig")
        told = run_ingot("trust", "verify", "tiny.ingot", "--key", "ingot.pub", "--bundle", "apart.sig", "--json")
        assert json.loads(succeeded(told))["format"] == "oms"
        SECOND.save(tmp_path / "tiny.ingot")
        assert "'tiny.ingot' was changed" in refused(
            run_ingot("trust", "verify", "tiny.ingot", "--key", "ingot.pub", "--bundle", "apart.sig")
        )

    def test_a_folder(self, run_ingot: RunIngot, keyid: str, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/weights").write_text("1")
        told = succeeded(run_ingot("trust", "sign", "model", "--key", "ingot.key", "--format", "oms", "--json"))
        assert json.loads(told) == {"bundle": "model.sig", "model": "model", "keyid": keyid}
        assert f"signed by {keyid}" in succeeded(run_ingot("trust", "verify", "./model", "--key", "ingot.pub"))
        (tmp_path / "model/weights").write_text("2")
        assert "'weights' was changed" in refused(run_ingot("trust", "verify", "./model", "--key", "ingot.pub"))
        assert "policies are for archives; give the key" in refused(run_ingot("trust", "verify", "./model"))

    def test_a_policy_decides(self, run_ingot: RunIngot, keyid: str, tmp_path: Path) -> None:
        FIRST.save(tmp_path / "tiny.ingot")
        succeeded(run_ingot("trust", "sign", "tiny.ingot", "--key", "ingot.key", "--format", "oms"))
        rule = '[[rule]]\nnames = "tiny"\nkeys = ["ingot.pub"]\n'
        (tmp_path / "trust.toml").write_text(rule)
        assert "it is unsigned" in refused(run_ingot("copy", "tiny.ingot", "--trust", "trust.toml"))
        (tmp_path / "trust.toml").write_text(rule + 'formats = ["oms"]\n')
        succeeded(run_ingot("copy", "tiny.ingot", "--trust", "trust.toml"))
        assert "it is unsigned" in refused(run_ingot("trust", "verify", "tiny", "--trust", "trust.toml"))

    @pytest.mark.matrix
    def test_nothing_else_is_overwritten(self, run_ingot: RunIngot, keyid: str, tmp_path: Path) -> None:
        FIRST.save(tmp_path / "tiny.ingot")
        sign = ["trust", "sign", "tiny.ingot", "--key", "ingot.key", "--format", "oms", "--out"]
        assert "is also the file of the model" in refused(run_ingot(*sign, "tiny.ingot"))
        assert "is also the file of the key" in refused(run_ingot(*sign, "ingot.key"))
        assert "exists and is not a bundle" in refused(run_ingot(*sign, "ingot.pub"))
        succeeded(run_ingot(*sign, "a.sig"))
        succeeded(run_ingot(*sign, "a.sig"))

    @pytest.mark.matrix
    def test_wrong_options_are_refused(self, run_ingot: RunIngot, store: Store, keyid: str) -> None:
        sign = ["trust", "sign", "team/tiny:1", "--key", "ingot.key"]
        assert "--format is 'gpg'; there are: ingot, oms" in refused(run_ingot(*sign, "--format", "gpg"))
        assert "there is no file or folder team/tiny:1" in refused(run_ingot(*sign, "--format", "oms"))
        assert "leave one out" in refused(run_ingot(*sign, "--format", "oms", "--replace"))
        assert "--out names the bundle" in refused(run_ingot(*sign, "--out", "x.sig"))
        verify = run_ingot("trust", "verify", "team/tiny:1", "--key", "ingot.pub", "--bundle", "x.sig")
        assert "--bundle is for files" in refused(verify)
