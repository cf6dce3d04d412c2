"""Bundles of OpenSSF Model Signing: what we sign, model-signing verifies, and the other way round."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingot import Archive
from ingot.errors import InvalidArchive, InvalidArgument, NotFound, Untrusted
from ingot.model_store import Reference
from ingot.model_store.format.attachments import BUNDLE
from ingot.model_store.trust import oms
from ingot.model_store.trust.dsse import encoding
from ingot.model_store.trust.keys import PrivateKey
from ingot.model_store.trust.policy import Policy
from tests.model_store.samples import archive
from tests.model_store.signers import KEY, OTHER, encode
from tests.support import matrix

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)
KEYS = {KEY.public.keyid: KEY.public}
LARGE = [PrivateKey(ec.generate_private_key(curve)) for curve in (ec.SECP384R1(), ec.SECP521R1())]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of files, with what is not signed."""
    folder = tmp_path / "model"
    for name in (
        "weights.bin",
        "config.json",
        "sub dir/\u6a21\u578b.bin",
        "sub dir/.git/kept",
        ".git/HEAD",
        ".gitignore",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "empty").touch()
    return folder


@pytest.fixture
def bundle(model: Path) -> Path:
    return write(model, oms.sign(model, KEY, out=oms.beside(model)))


def write(model: Path, content: bytes) -> Path:
    path = oms.beside(model)
    path.write_bytes(content)
    return path


def statement(bundle: Path) -> dict[str, Any]:
    document = json.loads(bundle.read_bytes())
    return dict(json.loads(base64.b64decode(document["dsseEnvelope"]["payload"])))


def signed(document: dict[str, Any], key: PrivateKey = KEY, **fields: Any) -> bytes:
    """Return a bundle of a statement whose signature holds."""
    payload = json.dumps(document).encode()
    envelope = {
        "payload": encode(payload),
        "payloadType": "application/vnd.in-toto+json",
        "signatures": [{"sig": encode(key.sign(encoding(payload)))}],
    }
    bundle = {"mediaType": BUNDLE, "verificationMaterial": {"publicKey": {}}, "dsseEnvelope": envelope}
    return json.dumps({**bundle, **fields}).encode()


def statement_of(model: Path) -> dict[str, Any]:
    bundle = json.loads(oms.sign(model, KEY, out=model.with_suffix(".sig")))
    return dict(json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"])))


class ModelSigning:
    """The package model-signing, in its own process."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __call__(self, action: str, key: PrivateKey, *arguments: object) -> subprocess.CompletedProcess[str]:
        private, public = self.folder / "key.pem", self.folder / "key.pub"
        private.write_bytes(key.pem())
        public.write_bytes(key.public.pem)
        option = ["--private_key", private] if action == "sign" else ["--public_key", public]
        command = [sys.executable, "-m", "model_signing", action, "key", *option, *arguments]
        return subprocess.run([str(item) for item in command], capture_output=True, text=True, check=False, timeout=120)


@pytest.fixture
def reference(tmp_path: Path) -> ModelSigning:
    pytest.importorskip("OpenSSL", reason="model-signing needs it")
    pytest.importorskip("in_toto_attestation", reason="model-signing is not installed")
    (tmp_path / "keys").mkdir()
    return ModelSigning(tmp_path / "keys")


class TestWithTheReferenceImplementation:
    @pytest.mark.matrix
    @pytest.mark.parametrize("key", matrix(KEY, *LARGE), ids=lambda key: str(key.public.curve))
    def test_it_verifies_ours(self, model: Path, key: PrivateKey, reference: ModelSigning) -> None:
        bundle = write(model, oms.sign(model, key, out=oms.beside(model)))
        answer = reference("verify", key, "--signature", bundle, model)
        assert (answer.returncode, answer.stdout.strip()) == (0, "Verification succeeded"), answer.stderr
        (model / "weights.bin").write_text("changed")
        assert "Hash mismatch for 'weights.bin'" in reference("verify", key, "--signature", bundle, model).stderr

    def test_it_verifies_ours_of_an_archive_file(self, tmp_path: Path, reference: ModelSigning) -> None:
        release = tmp_path / "release"
        release.mkdir()
        archive(b"one").save(release / "tiny.ingot")
        bundle = write(release / "tiny.ingot", oms.sign(release / "tiny.ingot", KEY, out=release / "tiny.ingot.sig"))
        (release / "notes.txt").write_text("not signed")
        command = ["--ignore_unsigned_files", "--signature", bundle, release]
        answer = reference("verify", KEY, *command)
        assert (answer.returncode, answer.stdout.strip()) == (0, "Verification succeeded"), answer.stderr
        archive(b"two").save(release / "tiny.ingot")
        assert reference("verify", KEY, *command).returncode != 0

    @pytest.mark.matrix
    def test_it_verifies_ours_of_an_unpacked_archive(self, tmp_path: Path, reference: ModelSigning) -> None:
        archive(b"one").save(tmp_path / "tiny.ingot")
        with tarfile.open(tmp_path / "tiny.ingot") as tar:
            tar.extractall(tmp_path / "tiny", filter="data")
        bundle = write(tmp_path / "tiny", oms.sign(tmp_path / "tiny", KEY, out=tmp_path / "tiny.sig"))
        answer = reference("verify", KEY, "--signature", bundle, tmp_path / "tiny")
        assert (answer.returncode, answer.stdout.strip()) == (0, "Verification succeeded"), answer.stderr
        names = [item["name"] for item in statement(bundle)["predicate"]["resources"]]
        assert {"index.json", "oci-layout"} < set(names)

    @pytest.mark.matrix
    @pytest.mark.parametrize("key", [KEY, *LARGE], ids=lambda key: str(key.public.curve))
    def test_we_verify_its_own(self, model: Path, key: PrivateKey, reference: ModelSigning) -> None:
        bundle = oms.beside(model)
        ignored = ["--ignore-paths", model / "config.json"]
        answer = reference("sign", key, "--signature", bundle, *ignored, model)
        assert answer.returncode == 0, answer.stderr
        assert oms.verify(model, bundle, {key.public.keyid: key.public}) == key.public.keyid
        (model / "config.json").write_text("ignored, as its signer said")
        assert oms.verify(model, bundle, {key.public.keyid: key.public}) == key.public.keyid
        (model / "weights.bin").write_text("changed")
        with pytest.raises(InvalidArchive, match=r"'weights\.bin' was changed"):
            oms.verify(model, bundle, {key.public.keyid: key.public})

    @pytest.mark.matrix
    def test_we_verify_its_own_of_a_single_file(self, tmp_path: Path, reference: ModelSigning) -> None:
        archive(b"one").save(tmp_path / "tiny.ingot")
        answer = reference("sign", KEY, "--signature", tmp_path / "tiny.ingot.sig", tmp_path / "tiny.ingot")
        assert answer.returncode == 0, answer.stderr
        assert oms.check(Archive.open(tmp_path / "tiny.ingot"), "team/tiny", KEYS).result == "valid"


class TestVerify:
    def test_files_of_git_and_the_bundle_are_not_signed(self, model: Path) -> None:
        inside = model / "signature"
        inside.write_bytes(oms.sign(model, KEY, out=inside))
        names = [item["name"] for item in statement(inside)["predicate"]["resources"]]
        assert names == ["config.json", "empty", "sub dir/.git/kept", "sub dir/\u6a21\u578b.bin", "weights.bin"]
        assert oms.verify(model, inside, KEYS) == KEY.public.keyid
        assert statement(inside)["subject"][0]["name"] == "model"

    def test_each_difference_is_named(self, model: Path, bundle: Path) -> None:
        (model / "weights.bin").write_text("changed")
        (model / "empty").unlink()
        (model / "more").touch()
        with pytest.raises(
            InvalidArchive, match=r"'empty' is missing, 'more' is not signed, 'weights\.bin' was changed"
        ):
            oms.verify(model, bundle, KEYS)

    def test_unsigned_files_are_ignored_on_demand(self, model: Path, bundle: Path) -> None:
        (model / "more").touch()
        (model / "link").symlink_to("/etc/passwd")
        assert oms.verify(model, bundle, KEYS, allow_unsigned=True) == KEY.public.keyid
        (model / "empty").write_text("x")
        with pytest.raises(InvalidArchive, match="'empty' was changed"):
            oms.verify(model, bundle, KEYS, allow_unsigned=True)
        (model / "empty").unlink()
        with pytest.raises(InvalidArchive, match="'empty' is missing"):
            oms.verify(model, bundle, KEYS, allow_unsigned=True)

    def test_parts_of_files(self, model: Path) -> None:
        """Entries of parts have the digest of a range of bytes; an empty file has no entry."""
        import hashlib

        content = b"0123456789"
        (model / "weights.bin").write_bytes(content)
        parts = [(0, 4), (4, 8), (8, 10)]
        entries = [
            {"name": f"weights.bin:{a}:{b}", "algorithm": "sha256", "digest": hashlib.sha256(content[a:b]).hexdigest()}
            for a, b in parts
        ]
        root = hashlib.sha256(b"".join(bytes.fromhex(str(item["digest"])) for item in entries)).hexdigest()
        method = {"method": "shards", "hash_type": "sha256", "shard_size": 4, "allow_symlinks": False}
        ignored = ["config.json", "sub dir", "empty"]
        document = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": "model", "digest": {"sha256": root}}],
            "predicateType": oms.PREDICATE_TYPE,
            "predicate": {"resources": entries, "serialization": {**method, "ignore_paths": ignored}},
        }
        bundle = write(model, signed(document))
        assert oms.verify(model, bundle, KEYS) == KEY.public.keyid
        (model / "weights.bin").write_bytes(b"0123x56789")
        with pytest.raises(InvalidArchive, match=r"'weights\.bin:4:8' was changed"):
            oms.verify(model, bundle, KEYS)

    @pytest.mark.parametrize("case", ["link", "dangling", "pipe"])
    def test_other_things_than_files_are_refused(self, model: Path, bundle: Path, case: str) -> None:
        odd = model / "odd"
        if case == "pipe":
            os.mkfifo(odd)
        else:
            odd.symlink_to(model / "weights.bin" if case == "link" else "/nowhere")
        with pytest.raises(InvalidArgument, match=r"odd is (a symbolic link|neither a file nor a folder)"):
            oms.sign(model, KEY, out=oms.beside(model))
        with pytest.raises(InvalidArgument, match=r"odd is (a symbolic link|neither a file nor a folder)"):
            oms.verify(model, bundle, KEYS)

    def test_nothing_to_sign_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model/.git").mkdir(parents=True)
        with pytest.raises(InvalidArgument, match="has no files to sign"):
            oms.sign(tmp_path / "model", KEY, out=tmp_path / "s")
        with pytest.raises(NotFound, match="there is no file or folder"):
            oms.sign(tmp_path / "missing", KEY, out=tmp_path / "s")

    def test_a_name_that_is_not_text_is_refused(self, model: Path) -> None:
        (Path(os.fsdecode(bytes(model) + b"/\xff"))).touch()
        with pytest.raises(InvalidArgument, match="is not UTF-8"):
            oms.sign(model, KEY, out=oms.beside(model))

    def test_the_key_must_be_accepted(self, model: Path, bundle: Path) -> None:
        with pytest.raises(Untrusted, match="is not signed by an accepted key"):
            oms.verify(model, bundle, {OTHER.public.keyid: OTHER.public})

    def test_a_changed_statement_is_refused(self, model: Path, bundle: Path) -> None:
        document = json.loads(bundle.read_bytes())
        changed = {**statement(bundle), "subject": []}
        document["dsseEnvelope"]["payload"] = encode(json.dumps(changed).encode())
        bundle.write_text(json.dumps(document))
        with pytest.raises(InvalidArchive, match="does not match its content, which was changed"):
            oms.verify(model, bundle, KEYS)

    @pytest.mark.parametrize(
        ("material", "message"),
        [
            (
                {"certificate": {"rawBytes": "AA=="}},
                "Sigstore's certificate of an identity, which Ingot does not verify",
            ),
            ({"x509CertificateChain": {"certificates": []}}, "a certificate, which Ingot does not verify"),
            ({}, "signed with nothing"),
        ],
    )
    def test_certificates_are_refused_with_the_remedy(
        self, model: Path, bundle: Path, material: dict[str, Any], message: str
    ) -> None:
        bundle.write_bytes(signed(statement(bundle), verificationMaterial=material))
        with pytest.raises(Untrusted, match=message):
            oms.verify(model, bundle, KEYS)

    def test_each_fault_of_a_signed_statement_is_refused(self, model: Path, bundle: Path) -> None:
        """Even an accepted key must not sign these: other verifiers could read them differently."""
        good = statement(bundle)
        predicate, first = good["predicate"], good["predicate"]["resources"][0]
        how = predicate["serialization"]
        faults: dict[str, dict[str, Any]] = {
            "'predicateType'": {"predicateType": "https://slsa.dev/provenance/v1"},
            "'_type'": {"_type": "https://in-toto.io/Statement/v0.1"},
            "'subject'": {"subject": good["subject"] * 2},
            "subject other than the files": {"subject": [{"name": "x", "digest": {"sha256": "0" * 64}}]},
            "lists a file twice": {"predicate": {**predicate, "resources": [first, first]}},
            "resources": {"predicate": {**predicate, "resources": []}},
            "digests of another kind": {
                "predicate": {**predicate, "resources": [{**first, "algorithm": "md5"}]},
            },
            "follows symbolic links": {"predicate": {**predicate, "serialization": {**how, "allow_symlinks": True}}},
            "shards without a size": {"predicate": {**predicate, "serialization": {**how, "method": "shards"}}},
        }
        for message, change in faults.items():
            bundle.write_bytes(signed({**good, **change}))
            with pytest.raises(InvalidArchive, match=message):
                oms.verify(model, bundle, KEYS)
        bundle.write_bytes(signed({**good, "later": 1}))
        assert oms.verify(model, bundle, KEYS) == KEY.public.keyid

    def test_an_unknown_hash_is_refused(self, model: Path, bundle: Path) -> None:
        good = statement(bundle)
        resources = [{**item, "algorithm": "blake3"} for item in good["predicate"]["resources"]]
        how = {**good["predicate"]["serialization"], "hash_type": "blake3"}
        bundle.write_bytes(signed({**good, "predicate": {"resources": resources, "serialization": how}}))
        with pytest.raises(InvalidArchive, match="'blake3' are not supported, but sha256 is"):
            oms.verify(model, bundle, KEYS)

    @pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside"])
    def test_a_name_that_leads_outside_is_not_opened(self, model: Path, bundle: Path, name: str) -> None:
        good = statement(bundle)
        entry = {**good["predicate"]["resources"][0], "name": name}
        import hashlib

        root = {"sha256": hashlib.sha256(bytes.fromhex(entry["digest"])).hexdigest()}
        subject, predicate = [{"name": "m", "digest": root}], {**good["predicate"], "resources": [entry]}
        bundle.write_bytes(signed({**good, "subject": subject, "predicate": predicate}))
        with pytest.raises(InvalidArchive, match="which is not inside"):
            oms.verify(model, bundle, KEYS, allow_unsigned=True)
        with pytest.raises(InvalidArchive, match="is missing"):
            oms.verify(model, bundle, KEYS)

    @pytest.mark.parametrize(
        "content", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"mediaType": 1, "mediaType": 2}'], ids=range(6)
    )
    def test_other_files_are_not_bundles(self, model: Path, content: bytes) -> None:
        bundle = write(model, content)
        assert not oms.is_bundle(bundle)
        with pytest.raises(InvalidArchive, match=r"model\.sig is not (valid JSON|in the format of OpenSSF)"):
            oms.verify(model, bundle, KEYS)

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.dictionaries(st.sampled_from(["_type", "subject", "predicateType", "resources", "serialization"]), JSON))
    @pytest.mark.matrix
    def test_any_change_of_a_signed_statement_leads_to_a_verdict(
        self, model: Path, tmp_path: Path, change: dict[str, Any]
    ) -> None:
        good = {**statement_of(model), **{key: value for key, value in change.items() if key[0] in "_sp"}}
        inside = {key: value for key, value in change.items() if key in good["predicate"]}
        bundle = tmp_path / "changed.sig"
        bundle.write_bytes(signed({**good, "predicate": {**good["predicate"], **inside}}))
        try:
            assert oms.verify(model, bundle, KEYS) == KEY.public.keyid
        except InvalidArgument:
            return


class TestPolicy:
    @pytest.fixture
    def policy(self, tmp_path: Path) -> Policy:
        (tmp_path / "team.pub").write_bytes(KEY.public.pem)
        text = '[[rule]]\nnames = "team/*"\nkeys = ["team.pub"]\nformats = ["ingot", "oms"]\nallow_code = true\n'
        (tmp_path / "trust.toml").write_text(text + '[[rule]]\nnames = "*"\nkeys = ["team.pub"]\n')
        return Policy.load(tmp_path / "trust.toml")

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        archive(b"one").save(tmp_path / "tiny.ingot")
        return tmp_path / "tiny.ingot"

    def test_a_rule_accepts_bundles_if_it_says_so(self, policy: Policy, file: Path) -> None:
        opened = Archive.open(file)
        with pytest.raises(Untrusted, match=r"it is unsigned.*formats: ingot, oms"):
            policy.check(opened, Reference("team/tiny"))
        write(file, oms.sign(file, KEY, out=oms.beside(file)))
        verdict = policy.check(opened, Reference("team/tiny"))
        assert (verdict.result, verdict.signed_by, verdict.format) == ("valid", KEY.public.keyid, "oms")
        assert verdict.allow_code
        with pytest.raises(Untrusted, match=r"rule 2.*it is unsigned.*formats: ingot\."):
            policy.check(opened, Reference("tiny"))

    def test_the_file_is_for_its_own_name_only(self, policy: Policy, file: Path) -> None:
        write(file, oms.sign(file, KEY, out=oms.beside(file)))
        with pytest.raises(Untrusted, match="it is signed under the name 'tiny' and not 'other'"):
            policy.check(Archive.open(file), Reference("team/other"))

    def test_a_changed_file_is_refused(self, policy: Policy, file: Path) -> None:
        write(file, oms.sign(file, KEY, out=oms.beside(file)))
        archive(b"two").save(file)
        with pytest.raises(Untrusted, match=r"'tiny\.ingot' was changed"):
            policy.check(Archive.open(file), Reference("team/tiny"))

    def test_a_damaged_bundle_does_not_affect_an_attached_signature(self, policy: Policy, file: Path) -> None:
        from ingot.model_store.trust import signing

        plain = Archive.open(file)
        plain.with_signature(signing.sign(plain, "tiny", KEY)).save(file)
        write(file, b"{}")
        assert policy.check(Archive.open(file), Reference("team/tiny")).format == "ingot"

    def test_an_unknown_format_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "team.pub").write_bytes(KEY.public.pem)
        for formats in ('["gpg"]', "[]"):
            (tmp_path / "t.toml").write_text(f'[[rule]]\nnames = "*"\nkeys = ["team.pub"]\nformats = {formats}\n')
            with pytest.raises(InvalidArgument, match="'formats"):
                Policy.load(tmp_path / "t.toml")
