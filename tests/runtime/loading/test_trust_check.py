"""Policies that admit models; tests/server/test_trust.py tests the refusals of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.errors import InvalidArchive, Untrusted
from ingot.model_store import Archive, BlobFolder, Reference, Store
from ingot.model_store.trust import signing
from ingot.model_store.trust.policy import Policy
from ingot.runtime import Metrics, Settings
from ingot.runtime.loading.trust_check import TrustCheck, check_blobs
from tests.model_store.samples import archive
from tests.model_store.signers import KEY

SETTINGS = Settings(derived_cache=True)
REFERENCE = Reference.parse("tiny:1")
SERVED = ("tiny", "1")


@pytest.fixture
def policy(tmp_path: Path) -> Policy:
    (tmp_path / "team.pub").write_bytes(KEY.public.pem)
    (tmp_path / "trust.toml").write_text('[[rule]]\nnames = "**"\nkeys = ["team.pub"]\nallow_code = true\n')
    return Policy.load(tmp_path / "trust.toml")


@pytest.fixture
def signed() -> Archive:
    made = archive()
    return made.with_signature(signing.sign(made, "tiny", KEY))


def test_without_a_policy_settings_stay_as_they_are() -> None:
    gate = TrustCheck(None, SETTINGS, Metrics())
    for terms in (gate.admit(archive(), REFERENCE, SERVED), gate.admit_file(Path("net.onnx"), SERVED)):
        assert terms.settings == SETTINGS
        assert "signed_by" not in terms.properties
        terms.check()
    assert gate.admit(archive(), REFERENCE, SERVED).properties == {"digest": archive().digest}
    gate.check(archive(), REFERENCE)


def test_under_a_policy_the_signature_decides_on_code_and_the_cache_is_left_out(
    policy: Policy, signed: Archive
) -> None:
    terms = TrustCheck(policy, SETTINGS, Metrics()).admit(signed, REFERENCE, SERVED)
    assert terms.settings == replace(SETTINGS, allow_code=True, derived_cache=False)
    assert terms.properties["signed_by"]
    terms.check()


def test_a_remote_model_is_refused_by_the_same_rule_without_being_counted(policy: Policy) -> None:
    metrics = Metrics()
    with pytest.raises(Untrusted):
        TrustCheck(policy, SETTINGS, metrics).check(archive(), REFERENCE)
    (counted,) = metrics.signature_checks.collect()
    assert counted.samples == []


def test_blobs_of_a_folder_are_read_when_the_model_is_loaded_and_those_of_a_file_are_not(
    policy: Policy, signed: Archive, tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    store.push(signed, "tiny:1")
    kept = store.get("tiny:1")
    gate = TrustCheck(policy, SETTINGS, Metrics())
    terms = gate.admit(kept, REFERENCE, SERVED)
    signed.save(tmp_path / "tiny.ingot")
    of_file = gate.admit(Archive.open(tmp_path / "tiny.ingot"), REFERENCE, SERVED)
    assert isinstance(kept.blobs, BlobFolder)
    weights = kept.blobs.path(kept.variant().weights[0])
    weights.chmod(0o644)
    weights.write_bytes(b"other weights")
    with pytest.raises(InvalidArchive):
        terms.check()
    of_file.check()


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"a graphfp33")])
def test_only_the_variant_that_is_served_must_be_whole(damage: Callable[[Path], object]) -> None:
    made = archive()
    assert isinstance(made.blobs, BlobFolder)
    path = made.blobs.path(made.variant("fp32").graph)
    path.chmod(0o644)
    damage(path)
    check_blobs(made, "int8", "tiny")
    for variant in ("fp32", None):
        with pytest.raises(InvalidArchive):
            check_blobs(made, variant, "tiny")
