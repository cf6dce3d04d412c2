"""Signatures and attestations as cosign attaches them: ours, those of other tools, and those of attackers."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import InvalidArgument, Untrusted
from ingot.model_store import Archive, BlobFolder, Reference, Store
from ingot.model_store.blobs.blobs import read
from ingot.model_store.format import attachments, manifest
from ingot.model_store.registry import Registry
from ingot.model_store.trust import cosign, signing
from ingot.model_store.trust.keys import PrivateKey
from ingot.model_store.trust.policy import Policy
from tests.model_store.samples import archive
from tests.model_store.signers import KEY, OTHER, dump, encode, envelope, statement
from tests.support import RequireTool, RunIngot, refused, succeeded

MODEL, ANOTHER = archive(b"one"), archive(b"two")
KEYS = {KEY.public.keyid: KEY.public}
DSSE, SIMPLE, BUNDLE = attachments.ENVELOPE, attachments.SIMPLE_SIGNING, attachments.BUNDLE
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=8,
)
ACCEPT = {"Accept": manifest.MANIFEST}
_numbers = count()


def payload(digest: str = MODEL.digest, reference: str = "registry.example/team/tiny", **critical: Any) -> bytes:
    return dump(
        {
            "critical": {
                "identity": {"docker-reference": reference},
                "image": {"docker-manifest-digest": digest},
                "type": "cosign container image signature",
                **critical,
            },
            "optional": None,
        }
    )


def attached(
    content: bytes,
    media_type: str = SIMPLE,
    key: PrivateKey = KEY,
    model: Archive = MODEL,
    signature: str | None = None,
) -> Archive:
    """Return a model with what a tool other than Ingot attached."""
    scratch = BlobFolder.scratch()
    simple = media_type == SIMPLE
    kind = attachments.COSIGN_SIGNATURE if simple else attachments.COSIGN_ATTESTATION
    made = encode(key.sign(content)) if signature is None and simple else signature or ""
    annotations = {"dev.cosignproject.cosign/signature": made}
    return model.with_attached(scratch, [attachments.make_cosign(scratch, kind, content, media_type, annotations)])


def bundled(content: bytes, model: Archive = MODEL, subject: Archive = MODEL) -> Archive:
    """Return a model with a bundle of cosign 3."""
    scratch = BlobFolder.scratch()
    made = attachments.make_bundle(scratch, subject.descriptor, content, cosign.SIGN_PREDICATE)
    return model.with_attached(scratch, [made])


def bundle(document: dict[str, Any], key: PrivateKey = KEY, **fields: Any) -> bytes:
    material = {"publicKey": {"hint": "x"}, "tlogEntries": [{"logIndex": "1"}]}
    sealed = envelope(dump(document), key)
    return dump({"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": sealed, **fields})


def by_cosign(model: Archive = MODEL, **fields: Any) -> dict[str, Any]:
    """Return a statement as cosign 3 makes it: its subject has no name."""
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"digest": {"sha256": model.descriptor.hex}, "annotations": {}}],
        "predicateType": "https://sigstore.dev/cosign/sign/v1",
        "predicate": {},
        **fields,
    }


def result(signed: Archive, name: str = "team/tiny") -> tuple[str, str]:
    finding = cosign.check(signed, name, KEYS)
    assert finding.format == ("cosign" if finding.result == "valid" else "ingot")
    return finding.result, "; ".join(finding.faults)


@pytest.fixture
def place(registry: str) -> Registry:
    return Registry(registry)


@pytest.fixture
def name() -> str:
    return f"cosign{next(_numbers)}/tiny"


def sign_in(place: Registry, name: str, key: PrivateKey = KEY) -> Archive:
    found, reference = place.find(f"{name}:1")
    place.attach(cosign.sign(found, reference, key), name)
    return place.find(f"{name}:1")[0]


class TestInARegistry:
    """With docker-registry."""

    @pytest.mark.matrix
    def test_it_is_where_cosign_looks(self, place: Registry, name: str) -> None:
        place.push(MODEL, f"{name}:1")
        sign_in(place, name)
        tag = MODEL.digest.replace(":", "-")
        for suffix, media_type in ((".sig", SIMPLE), (".att", DSSE)):
            answer = httpx.get(f"{place.address.url}/v2/{name}/manifests/{tag}{suffix}", headers=ACCEPT)
            document = answer.json()
            assert document["mediaType"] == answer.headers["Content-Type"] == manifest.MANIFEST
            assert document["config"]["mediaType"] == "application/vnd.oci.image.config.v1+json"
            (layer,) = document["layers"]
            assert layer["mediaType"] == media_type
            config = httpx.get(f"{place.address.url}/v2/{name}/blobs/{document['config']['digest']}").json()
            assert config["rootfs"] == {"type": "layers", "diff_ids": [layer["digest"]]}
        assert set(place.tags(name)) == {"1"}
        assert str(place.find(name)[1].tag) == "1"

    @pytest.mark.matrix
    def test_version_3_finds_a_bundle_in_the_list_of_referrers(self, place: Registry, name: str) -> None:
        place.push(MODEL, f"{name}:1")
        sign_in(place, name)
        url = f"{place.address.url}/v2/{name}/manifests/"
        listed = httpx.get(url + MODEL.digest.replace(":", "-"), headers={"Accept": manifest.INDEX}).json()
        (entry,) = (entry for entry in listed["manifests"] if entry["artifactType"] == BUNDLE)
        document = httpx.get(url + entry["digest"], headers=ACCEPT).json()
        assert document["subject"]["digest"] == MODEL.digest
        assert document["annotations"]["dev.sigstore.bundle.predicateType"] == cosign.SIGN_PREDICATE
        assert [layer["mediaType"] for layer in document["layers"]] == [document["artifactType"]] == [BUNDLE]

    @pytest.mark.matrix
    def test_every_signer_extends_the_same_manifest(self, place: Registry, name: str) -> None:
        place.push(MODEL, f"{name}:1")
        sign_in(place, name)
        both = sign_in(place, name, OTHER)
        assert len(both.attached) == 4  # two manifests, and a bundle of each
        for key in (KEY, OTHER):
            assert cosign.check(both, name, {key.public.keyid: key.public}).result == "valid"
        assert len(cosign.describe(both)) == 6

    @pytest.mark.matrix
    def test_layers_of_other_tools_are_kept_as_they_are(self, place: Registry, name: str) -> None:
        place.push(MODEL, f"{name}:1")
        sign_in(place, name, OTHER)
        url = f"{place.address.url}/v2/{name}/manifests/{MODEL.digest.replace(':', '-')}.sig"
        headers = {"Accept": manifest.MANIFEST, "Content-Type": manifest.MANIFEST}
        document = httpx.get(url, headers=headers).json()
        document["layers"][0]["annotations"]["dev.sigstore.cosign/bundle"] = "{}"
        document["layers"][0]["unknown"] = {"field": 1}
        assert httpx.put(url, headers=headers, content=json.dumps(document)).is_success
        sign_in(place, name)
        assert httpx.get(url, headers=headers).json()["layers"][0] == document["layers"][0]

    @pytest.mark.matrix
    def test_signatures_are_copied_with_the_archive(self, place: Registry, name: str, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        place.push(MODEL, f"{name}:1")
        store.push(sign_in(place, name), "tiny:1")
        store.get("tiny:1").save(tmp_path / "tiny.ingot")
        opened = Archive.open(tmp_path / "tiny.ingot")
        place.push(opened, "cosign-copied/tiny:1")
        for copy in (store.get("tiny:1"), opened, place.find("cosign-copied/tiny:1")[0]):
            assert cosign.check(copy, "tiny", KEYS).result == "valid"
            copy.verify()

    @pytest.mark.matrix
    def test_skopeo_finds_it(self, place: Registry, name: str, require_tool: RequireTool, tmp_path: Path) -> None:
        """Debian's build reads the attachment, and then refuses to verify any; only images are checked, not indexes."""
        place.push(MODEL, f"{name}:1")
        sign_in(place, name)
        host, (first, *_) = place.address.netloc, MODEL.variants
        single = f"{place.address.url}/v2/{name}/manifests/"
        sig = httpx.get(f"{single}{MODEL.digest.replace(':', '-')}.sig", headers=ACCEPT)
        away = f"{single}{first.descriptor.digest.replace(':', '-')}.sig"
        assert httpx.put(away, headers={"Content-Type": manifest.MANIFEST}, content=sig.content).is_success
        (tmp_path / "team.pub").write_bytes(KEY.public.pem)
        rule = {"type": "sigstoreSigned", "keyPath": str(tmp_path / "team.pub")}
        policy = {"default": [{"type": "reject"}], "transports": {"docker": {host: [rule]}}}
        (tmp_path / "policy.json").write_text(json.dumps(policy))
        (tmp_path / "registries").mkdir()
        (tmp_path / "registries/all.yaml").write_text(f"docker:\n  {host}:\n    use-sigstore-attachments: true\n")
        skopeo: list[str | Path] = [require_tool("skopeo"), "--debug", "--policy", tmp_path / "policy.json"]
        skopeo += ["--registries.d", tmp_path / "registries", "copy", "--src-tls-verify=false", "--remove-signatures"]
        skopeo += [f"docker://{host}/{name}@{first.descriptor.digest}", f"dir:{tmp_path / 'out'}"]
        shown = subprocess.run(skopeo, capture_output=True, text=True, check=False, timeout=60).stderr
        assert "Found a sigstore attachment manifest with 1 layers" in shown
        assert "Fetching sigstore attachment 1/1" in shown

    def test_junk_under_the_tags_does_not_affect_the_archive(self, place: Registry, name: str) -> None:
        place.push(MODEL, f"{name}:1")
        index = {"schemaVersion": 2, "mediaType": manifest.INDEX, "manifests": []}
        for suffix in (".sig", ".att"):
            url = f"{place.address.url}/v2/{name}/manifests/{MODEL.digest.replace(':', '-')}{suffix}"
            assert httpx.put(url, headers={"Content-Type": manifest.INDEX}, content=json.dumps(index)).is_success
        found = place.find(f"{name}:1")[0]
        assert found.attached == ()
        found.verify()

    @pytest.mark.matrix
    def test_on_the_command_line(self, run_ingot: RunIngot, place: Registry, name: str, tmp_path: Path) -> None:
        place.push(MODEL, f"{name}:1")
        (tmp_path / "team.key").write_bytes(KEY.pem())
        (tmp_path / "team.pub").write_bytes(KEY.public.pem)
        model = f"{place.address}/{name}:1"
        sign = ["trust", "sign", model, "--key", "team.key", "--format", "cosign"]
        assert succeeded(run_ingot(*sign)) == f"tiny  {MODEL.digest}  signed by {KEY.public.keyid}\n"
        assert "is signed by this key already" in run_ingot(*sign).stderr
        assert "--replace drops Ingot's signatures" in refused(run_ingot(*sign, "--replace"))
        told = json.loads(succeeded(run_ingot("trust", "verify", model, "--key", "team.pub", "--json")))
        assert (told["result"], told["format"], told["signed_by"]) == ("valid", "cosign", KEY.public.keyid)
        assert [claim["name"] for claim in told["signatures"]] == ["tiny"] * 3
        rule = f'[[rule]]\nnames = "{name}"\nkeys = ["team.pub"]\n[[rule]]\nnames = "oci/**"\nkeys = ["team.pub"]\n'
        (tmp_path / "trust.toml").write_text(rule)
        pull = ["copy", model, "--trust", "trust.toml"]
        assert "it is unsigned" in refused(run_ingot(*pull))
        (tmp_path / "trust.toml").write_text(
            rule.replace("]\n", ']\nformats = ["cosign"]\n').replace('[[rule]]\nformats = ["cosign"]', "[[rule]]")
        )
        succeeded(run_ingot(*pull))
        assert "(format cosign)" in succeeded(run_ingot("trust", "verify", f"{name}:1", "--trust", "trust.toml"))


class TestOtherImplementations:
    def test_securesystemslib_verifies_our_attestation(self) -> None:
        dsse = pytest.importorskip("securesystemslib.dsse")
        signer = pytest.importorskip("securesystemslib.signer")
        signed = cosign.sign(MODEL, Reference("team/tiny"), KEY)
        (item,) = (item for item in signed.attached if item.artifact_type == attachments.COSIGN_ATTESTATION)
        (layer,) = attachments.load(signed.blobs, item, MODEL.descriptor).layers
        parsed = dsse.Envelope.from_dict(json.loads(read(signed.blobs, layer)))
        public = {"public": KEY.public.pem.decode()}
        key = signer.SSlibKey(KEY.public.keyid, "ecdsa", "ecdsa-sha2-nistp256", public)
        assert list(parsed.verify([key], 1)) == [KEY.public.keyid]
        document = json.loads(parsed.payload)
        assert parsed.payload_type == "application/vnd.in-toto+json"
        assert document["subject"] == [{"name": "tiny", "digest": {"sha256": MODEL.descriptor.hex}}]
        assert layer.annotations["predicateType"] == document["predicateType"]
        parsed.payload = parsed.payload.replace(b"tiny", b"tine")
        with pytest.raises(Exception, match="do not match threshold"):
            parsed.verify([key], 1)

    def test_sigstores_model_and_securesystemslib_verify_our_bundle(self) -> None:
        """The first has no verifier of bundles that were signed with a key, and the second none of bundles."""
        dsse = pytest.importorskip("securesystemslib.dsse")
        models = pytest.importorskip("sigstore_models.bundle.v1")
        signed = cosign.sign(MODEL, Reference("team/tiny"), KEY)
        (item,) = (item for item in signed.attached if item.artifact_type == BUNDLE)
        (layer,) = attachments.load(signed.blobs, item, MODEL.descriptor).layers
        parsed = models.Bundle.from_json(read(signed.blobs, layer))
        sealed = parsed.dsse_envelope
        content = base64.b64decode(json.loads(read(signed.blobs, layer))["dsseEnvelope"]["payload"])
        key = load_pem_public_key(KEY.public.pem)
        assert isinstance(key, ec.EllipticCurvePublicKey)
        signature = base64.b64decode(json.loads(read(signed.blobs, layer))["dsseEnvelope"]["signatures"][0]["sig"])
        key.verify(signature, dsse.Envelope(content, sealed.payload_type, {}).pae(), ec.ECDSA(SHA256()))
        assert json.loads(content)["predicateType"] == "https://sigstore.dev/cosign/sign/v1"

    def test_an_attestation_of_securesystemslib_is_accepted(self) -> None:
        dsse = pytest.importorskip("securesystemslib.dsse")
        signer = pytest.importorskip("securesystemslib.signer")
        private = ec.generate_private_key(ec.SECP256R1())
        key = PrivateKey(private)
        made = dsse.Envelope(dump(statement(MODEL)), "application/vnd.in-toto+json", {})
        made.sign(signer.CryptoSigner(private))
        signed = attached(dump(made.to_dict()), DSSE)
        assert cosign.check(signed, "tiny", {key.public.keyid: key.public}).result == "valid"
        assert result(signed)[0] == "untrusted"

    def test_openssl_verifies_our_signature(self, require_tool: RequireTool, tmp_path: Path) -> None:
        signed = cosign.sign(MODEL, Reference.parse("oci://registry.example/team/tiny:1"), KEY)
        (item,) = (item for item in signed.attached if item.artifact_type == attachments.COSIGN_SIGNATURE)
        (layer,) = attachments.load(signed.blobs, item, MODEL.descriptor).layers
        content = read(signed.blobs, layer)
        for file, data in (
            ("content", content),
            ("sig", base64.b64decode(layer.annotations["dev.cosignproject.cosign/signature"])),
            ("pub", KEY.public.pem),
        ):
            (tmp_path / file).write_bytes(data)
        command = [require_tool("openssl"), "dgst", "-sha256", "-verify", "pub", "-signature", "sig", "content"]
        shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert shown.stdout == "Verified OK\n"
        critical = json.loads(content)["critical"]
        assert critical == {
            "identity": {"docker-reference": "registry.example/team/tiny"},
            "image": {"docker-manifest-digest": MODEL.digest},
            "type": "cosign container image signature",
        }


class TestCheck:
    @pytest.mark.matrix
    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from([SIMPLE, DSSE, BUNDLE]), st.binary(max_size=200) | JSON.map(dump))
    def test_any_content_leads_to_a_verdict(self, media_type: str, content: bytes) -> None:
        model = bundled(content) if media_type == BUNDLE else attached(content, media_type)
        assert result(model)[0] == "invalid"
        cosign.describe(model)

    @pytest.mark.matrix
    @settings(max_examples=100, deadline=None)
    @given(st.dictionaries(st.sampled_from(["_type", "subject", "predicateType", "predicate", "x"]), JSON))
    def test_any_change_of_a_signed_statement_leads_to_a_verdict(self, change: dict[str, Any]) -> None:
        changed = bundle({**by_cosign(), **change})
        assert result(bundled(changed))[0] in ("valid", "invalid")

    @pytest.mark.parametrize(
        "reference",
        ["tiny", "registry.example/team/tiny", "registry.example:5000/tiny:1", f"r.example/tiny@sha256:{'0' * 64}"],
    )
    def test_a_signature_for_the_name_is_accepted_wherever_it_was_made(self, reference: str) -> None:
        assert result(attached(payload(reference=reference))) == ("valid", "")

    def test_a_bundle_of_version_3_is_for_the_name_in_the_archive(self) -> None:
        assert result(bundled(bundle(by_cosign()))) == ("valid", "")
        assert "for another name, 'tiny' and not 'other'" in result(bundled(bundle(by_cosign())), "team/other")[1]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (bundle(by_cosign(ANOTHER)), "it is signed for another archive"),
            (bundle(by_cosign(predicateType="https://slsa.dev/provenance/v1")), "is not a signature"),
            (bundle(by_cosign(), mediaType="application/json"), "is not in cosign's format: 'mediaType'"),
            (bundle(by_cosign(), dsseEnvelope=None, messageSignature={}), "is not in cosign's format: 'dsseEnvelope'"),
            (bundle(by_cosign(subject=[])), "is not in cosign's format: 'subject'"),
            (b"{}", "is not in cosign's format"),
        ],
    )
    def test_each_fault_of_a_bundle_is_named(self, content: bytes, message: str) -> None:
        found, faults = result(bundled(content))
        assert found == "invalid"
        assert message in faults

    def test_a_bundle_of_another_subject_or_key_is_refused(self) -> None:
        assert result(bundled(bundle(by_cosign(), OTHER)))[0] == "untrusted"
        found, faults = result(bundled(bundle(by_cosign()), subject=ANOTHER))
        assert found == "invalid"
        assert "is not a signature of" in faults

    @pytest.mark.parametrize(
        ("signed", "message"),
        [
            (lambda: attached(payload(ANOTHER.digest)), "it is signed for another archive"),
            (lambda: attached(payload(reference="r.example/team/other")), "for another name, 'other' and not 'tiny'"),
            (lambda: attached(payload(type="other")), "is not in cosign's format: 'critical.type'"),
            (lambda: attached(payload(expires="2020")), "is not in cosign's format: 'critical.expires'"),
            (lambda: attached(payload().replace(b'"optional"', b'"critical"')), "'critical' occurs twice"),
            (lambda: attached(payload(reference="\x1b[31m/tiny")), "is not in cosign's format"),
            (lambda: attached(b"[]"), "is not in cosign's format"),
            (lambda: attached(payload(), signature="!"), "'annotation' is not base64"),
            (lambda: attached(b" " * (65 << 10)), "over the 64 KiB limit"),
            (lambda: attached(b"{}", "text/plain"), "has the unknown type 'text/plain'"),
            (lambda: attached(dump(envelope(dump(statement(ANOTHER)))), DSSE), "signed for another archive"),
            (lambda: attached(dump(envelope(dump(statement(MODEL, "other")))), DSSE), "another name, 'other'"),
            (
                lambda: attached(dump(envelope(dump(statement(MODEL, predicateType="https://vuln/v1")))), DSSE),
                "an attestation of the type 'https://vuln/v1' is not a signature",
            ),
            (
                lambda: attached(dump(envelope(dump(statement(MODEL)), kind="text/plain")), DSSE),
                "is not in cosign's format: 'payloadType'",
            ),
        ],
    )
    def test_each_fault_is_named(self, signed: Callable[[], Archive], message: str) -> None:
        found, faults = result(signed())
        assert found == "invalid"
        assert message in faults

    def test_only_accepted_keys_count(self) -> None:
        assert result(attached(payload(), key=OTHER)) == ("untrusted", "no accepted key made its cosign signatures")
        assert result(attached(payload(), signature=encode(KEY.sign(payload(ANOTHER.digest)))))[0] == "untrusted"
        assert result(attached(payload(), signature=""))[0] == "untrusted"

    def test_faulty_ones_do_not_affect_a_valid_one(self) -> None:
        signed = MODEL
        for content in (b"[]", payload(ANOTHER.digest), payload()):
            signed = attached(content, model=signed)
        assert result(signed) == ("valid", "")

    def test_there_is_a_limit(self) -> None:
        scratch = BlobFolder.scratch()
        layers = tuple(
            scratch.put(payload(reference=f"r{number}.example/tiny"), SIMPLE, {attachments.COSIGN_PAYLOAD: ""})
            for number in range(64)
        )
        config = scratch.put(b"{}", "application/vnd.oci.image.config.v1+json")
        many = scratch.put(manifest.encode(attachments.CosignManifest(config=config, layers=layers)), manifest.MANIFEST)
        full = many.model_copy(update={"artifact_type": attachments.COSIGN_SIGNATURE})
        signed = attached(payload(), model=MODEL.with_attached(scratch, [full]))
        assert result(signed)[0] == "untrusted"
        assert len(cosign.describe(signed)) == 64

    def test_a_large_attachment_is_not_copied(self, tmp_path: Path) -> None:
        large = attached(bytes(5 << 20), DSSE)
        assert "more than 4 MiB" in result(large)[1]
        large.save(tmp_path / "tiny.ingot")
        assert (tmp_path / "tiny.ingot").stat().st_size < 1 << 20

    def test_a_key_on_another_curve_does_not_sign(self) -> None:
        large = PrivateKey(ec.generate_private_key(ec.SECP384R1()))
        with pytest.raises(InvalidArgument, match="a key on P-384 cannot sign for cosign"):
            cosign.sign(MODEL, Reference("tiny"), large)


def test_a_rule_accepts_cosign_only_if_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "cosign.pub").write_bytes(KEY.public.pem)
    signed = attached(payload())
    for formats, accepted in (("", False), ('formats = ["cosign"]', True), ('formats = ["ingot", "oms"]', False)):
        (tmp_path / "t.toml").write_text(f'[[rule]]\nnames = "**"\nkeys = ["cosign.pub"]\n{formats}\n')
        policy = Policy.load(tmp_path / "t.toml")
        if accepted:
            assert policy.check(signed, Reference("team/tiny")).format == "cosign"
        else:
            with pytest.raises(Untrusted, match="it is unsigned"):
                policy.check(signed, Reference("team/tiny"))
    ours = MODEL.with_signature(signing.sign(MODEL, "tiny", KEY))
    (tmp_path / "t.toml").write_text('[[rule]]\nnames = "**"\nkeys = ["cosign.pub"]\nformats = ["cosign"]\n')
    with pytest.raises(Untrusted, match="formats: cosign"):
        Policy.load(tmp_path / "t.toml").check(ours, Reference("team/tiny"))
