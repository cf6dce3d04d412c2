from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import InvalidArgument
from ingot.model_store import Archive, Store
from ingot.model_store.format import attachments, manifest
from ingot.model_store.references import attachments_tag
from ingot.model_store.trust import dsse, signing
from ingot.model_store.trust.keys import PublicKey
from ingot.model_store.trust.signing import Claim, Finding
from tests.model_store.samples import archive
from tests.model_store.signers import KEY, OTHER, dump, encode, envelope, statement
from tests.support import RequireTool

FIRST, SECOND = archive(b"one"), archive(b"two")
KEYS = {KEY.public.keyid: KEY.public}
RIGHT = dump(statement(FIRST))


def check(envelope: bytes, subject: Archive = FIRST, name: str = "tiny", keys: dict[str, PublicKey] = KEYS) -> Finding:
    return signing.check(subject.with_signature(envelope), name, keys)


def fault(envelope: bytes, **how: Any) -> str:
    """Check that a signature does not hold, and return why."""
    finding = check(envelope, **how)
    assert finding.result == "invalid"
    assert finding.signed_by is None
    return finding.faults[0]


class TestSigning:
    @pytest.mark.parametrize("name", ["tiny", "team/tiny", "other/team/tiny"])
    def test_it_is_valid_wherever_the_model_has_its_name(self, name: str) -> None:
        finding = check(signing.sign(FIRST, "team/tiny", KEY), name=name)
        assert (finding.result, finding.signed_by, finding.faults) == ("valid", KEY.public.keyid, ())

    def test_it_does_not_change_the_archive(self) -> None:
        assert FIRST.with_signature(signing.sign(FIRST, "tiny", KEY)).digest == FIRST.digest

    def test_it_states_a_given_time_and_is_then_always_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
        first = signing.sign(FIRST, "tiny", KEY)
        assert first == signing.sign(FIRST, "tiny", KEY)
        assert check(first).created == "1970-01-02T00:00:00Z"

    def test_a_malformed_time_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
        with pytest.raises(InvalidArgument, match="SOURCE_DATE_EPOCH"):
            signing.sign(FIRST, "tiny", KEY)

    def test_it_is_dsse_around_an_in_toto_statement(self) -> None:
        content = json.loads(signing.sign(FIRST, "tiny", KEY))
        assert set(content) == {"payload", "payloadType", "signatures"}
        assert content["payloadType"] == "application/vnd.in-toto+json"
        said = json.loads(base64.b64decode(content["payload"]))
        assert said["_type"] == "https://in-toto.io/Statement/v1"
        assert said["subject"] == [{"name": "tiny", "digest": {"sha256": FIRST.descriptor.hex}}]

    def test_openssl_verifies_it_too(self, require_tool: RequireTool, tmp_path: Path) -> None:
        content = json.loads(signing.sign(FIRST, "tiny", KEY))
        payload = base64.b64decode(content["payload"])
        kind = content["payloadType"].encode()
        signed = b" ".join([b"DSSEv1", str(len(kind)).encode(), kind, str(len(payload)).encode(), payload])
        (tmp_path / "signed").write_bytes(signed)
        (tmp_path / "sig").write_bytes(base64.b64decode(content["signatures"][0]["sig"]))
        (tmp_path / "pub").write_bytes(KEY.public.pem)
        command = [require_tool("openssl"), "dgst", "-sha256", "-verify", "pub", "-signature", "sig", "signed"]
        assert subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout == b"Verified OK\n"

    def test_it_travels_in_a_file_and_through_a_store(self, tmp_path: Path) -> None:
        FIRST.with_signature(signing.sign(FIRST, "tiny", KEY)).save(tmp_path / "a.ingot")
        store = Store(tmp_path / "store")
        store.push(Archive.open(tmp_path / "a.ingot"), "team/tiny:1")
        assert signing.check(store.get("team/tiny:1"), "team/tiny", KEYS).result == "valid"

    def test_it_is_attached_to_a_stored_archive(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        store.push(FIRST, "tiny:1")
        store.push(SECOND, "tiny:2")
        store.attach(store.get("tiny:1").with_signature(signing.sign(FIRST, "tiny", KEY)), "tiny")
        assert signing.check(store.get("tiny:1"), "tiny", KEYS).result == "valid"
        assert signing.check(store.get("tiny:2"), "tiny", KEYS).result == "unsigned"
        assert list(store.tags("tiny")) == ["1", "2"]


class TestWhatIsSigned:
    def test_nothing(self) -> None:
        assert signing.check(FIRST, "tiny", KEYS) == Finding("unsigned")

    def test_a_key_that_is_not_accepted_counts_for_nothing(self) -> None:
        finding = check(signing.sign(FIRST, "tiny", OTHER))
        assert finding.result == "untrusted"
        assert finding.faults == (f"it is signed by {OTHER.public.keyid[:16]}..., whose key is not accepted",)

    def test_another_archive_does_not_inherit_it(self) -> None:
        assert "signed for another archive" in fault(signing.sign(FIRST, "tiny", KEY), subject=SECOND)

    def test_another_name_does_not_inherit_it(self) -> None:
        message = fault(signing.sign(FIRST, "spam", KEY), name="team/fraud")
        assert message == "it is signed for another name, 'spam' and not 'fraud'"

    @pytest.mark.parametrize("name", ["team-evil/tin", "tinyy", "tiny/evil"])
    def test_the_whole_last_part_of_the_name_counts(self, name: str) -> None:
        assert "another name" in fault(signing.sign(FIRST, "tiny", KEY), name=name)


class TestTampering:
    def test_a_changed_payload(self) -> None:
        changed = envelope(RIGHT, payload=encode(dump(statement(SECOND))))
        assert "does not match its payload" in fault(dump(changed), subject=SECOND)

    def test_a_changed_signature(self) -> None:
        signature = KEY.sign(b"something else")
        changed = envelope(RIGHT, signatures=[{"keyid": KEY.public.keyid, "sig": encode(signature)}])
        assert "does not match its payload" in fault(dump(changed))

    def test_a_key_id_that_is_borrowed(self) -> None:
        borrowed = envelope(RIGHT, OTHER)
        borrowed["signatures"][0]["keyid"] = KEY.public.keyid
        assert "does not match its payload" in fault(dump(borrowed))

    def test_a_payload_that_was_signed_as_another_type(self) -> None:
        changed = envelope(RIGHT, kind="text/plain", payloadType=dsse.PAYLOAD_TYPE)
        assert "does not match its payload" in fault(dump(changed))

    def test_another_type_of_payload_is_refused(self) -> None:
        assert "'payloadType'" in fault(dump(envelope(RIGHT, kind="text/plain")))


ENVELOPE = envelope(RIGHT)
SIGNATURE = ENVELOPE["signatures"][0]
TEXT = ENVELOPE["payload"].rstrip("=")
BROKEN = {
    "empty": (b"", "is not valid JSON"),
    "no JSON": (b"\x00\xff", "is not valid JSON"),
    "another encoding": (json.dumps(ENVELOPE).encode("utf-16"), "is not valid JSON"),
    "a byte order mark": (b"\xef\xbb\xbf" + dump(ENVELOPE), "is not valid JSON"),
    "cut short": (dump(ENVELOPE)[:-2], "is not valid JSON"),
    "a list": (b"[]", "is not in Ingot's format"),
    "nested too deeply": (b"[" * 60_000, "is not valid JSON"),
    "a number of many digits": (b'{"payload":' + b"9" * 10_000 + b"}", "is not valid JSON"),
    "a name twice": (dump(ENVELOPE)[:-1] + b',"payload":"e30="}', "'payload' occurs twice"),
    "a field more": (dump({**ENVELOPE, "expires": "now"}), "'expires'"),
    "a field less": (dump({"payload": "", "signatures": [SIGNATURE]}), "'payloadType'"),
    "a field by Python's name": (
        dump({"payload": "", "payload_type": dsse.PAYLOAD_TYPE, "signatures": [SIGNATURE]}),
        "'payloadType'",
    ),
    "no signature": (dump({**ENVELOPE, "signatures": []}), "'signatures'"),
    "two signatures": (dump({**ENVELOPE, "signatures": [SIGNATURE, SIGNATURE]}), "'signatures'"),
    "no key id": (dump({**ENVELOPE, "signatures": [{"sig": SIGNATURE["sig"]}]}), "keyid"),
    "a key id that drives terminals": (
        dump({**ENVELOPE, "signatures": [{**SIGNATURE, "keyid": "\x1b[31m" + "a" * 59}]}),
        "keyid",
    ),
    "a key id with a line's end": (
        dump({**ENVELOPE, "signatures": [{**SIGNATURE, "keyid": KEY.public.keyid + "\n"}]}),
        "keyid",
    ),
    "a huge signature": (dump({**ENVELOPE, "signatures": [{**SIGNATURE, "sig": "A" * 1000}]}), "sig"),
    "a number for a payload": (dump({**ENVELOPE, "payload": 1}), "'payload'"),
    "no base64": (dump({**ENVELOPE, "payload": "%%%%"}), "'payload' is not base64"),
    "base64 with spaces": (dump({**ENVELOPE, "payload": TEXT[:4] + " " + TEXT[4:]}), "'payload' is not base64"),
    "base64 without padding": (dump({**ENVELOPE, "payload": "QQ"}), "'payload' is not base64"),
    "base64 that is not canonical": (dump({**ENVELOPE, "payload": "QR=="}), "'payload' is not canonical base64"),
    "base64 for addresses": (dump({**ENVELOPE, "payload": "-_8="}), "'payload' is not"),
}
UNACCEPTABLE = {
    "another statement": statement(FIRST, _type="https://in-toto.io/Statement/v0.1"),
    "another predicate": statement(FIRST, predicateType="https://slsa.dev/provenance/v1"),
    "no subject": statement(FIRST, subject=[]),
    "two subjects": statement(FIRST, subject=statement(FIRST)["subject"] + statement(SECOND)["subject"]),
    "another digest": statement(FIRST, subject=[{"name": "tiny", "digest": {"sha512": "a" * 128}}]),
    "two digests": statement(
        FIRST, subject=[{"name": "tiny", "digest": {"sha256": FIRST.descriptor.hex, "sha512": "a" * 128}}]
    ),
    "a condition that is not known": statement(
        FIRST, predicate={"created": "2026-01-02T03:04:05Z", "tool": "ingot-9", "expires": "2026-01-03"}
    ),
    "a time that drives terminals": statement(FIRST, predicate={"created": "\x1b[31m", "tool": "ingot-1"}),
}


class TestMalformed:
    @pytest.mark.parametrize("case", BROKEN)
    def test_an_envelope_that_is_not_of_the_form_is_refused(self, case: str) -> None:
        content, message = BROKEN[case]
        assert message in fault(content)

    @pytest.mark.parametrize("case", UNACCEPTABLE)
    def test_a_statement_that_is_not_of_the_form_is_refused(self, case: str) -> None:
        assert "is not in Ingot's format" in fault(dump(envelope(dump(UNACCEPTABLE[case]))))

    def test_a_statement_with_a_name_twice_is_refused(self) -> None:
        twice = RIGHT[:-1] + b',"subject":[]}'
        assert "'subject' occurs twice" in fault(dump(envelope(twice)))

    @pytest.mark.matrix
    def test_a_million_subjects_are_not_even_read(self) -> None:
        subjects = statement(FIRST)["subject"] * 10**6
        assert "has more than 4 MiB" in fault(dump(envelope(dump(statement(FIRST, subject=subjects)))))
        assert "over the 64 KiB limit" in fault(dump(envelope(dump(statement(FIRST, subject=subjects[:1000])))))

    @given(st.binary(max_size=200) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(dump))
    @pytest.mark.matrix
    def test_no_bytes_make_the_reader_fail(self, content: bytes) -> None:
        assert check(content).result == "invalid"

    @pytest.mark.matrix
    @given(st.integers(0, len(dump(ENVELOPE)) - 1), st.integers(1, 255))
    def test_no_single_byte_can_be_changed(self, position: int, flip: int) -> None:
        content = bytearray(dump(ENVELOPE))
        content[position] ^= flip
        # An unknown key id makes it another signer's; a changed space does not change the content.
        assert check(bytes(content)).result != "valid" or json.loads(content) == ENVELOPE


class TestSeveral:
    def test_one_signature_of_an_accepted_key_is_enough(self) -> None:
        signed = FIRST
        for content in (b"nonsense", signing.sign(FIRST, "tiny", OTHER), signing.sign(SECOND, "tiny", KEY)):
            signed = signed.with_signature(content)
        assert signing.check(signed, "tiny", KEYS).result == "invalid"
        signed = signed.with_signature(signing.sign(FIRST, "tiny", KEY))
        assert signing.check(signed, "tiny", KEYS).result == "valid"

    def test_a_signature_damaged_on_disk_does_not_affect_the_others(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        bad, good = signing.sign(FIRST, "tiny", OTHER), signing.sign(FIRST, "tiny", KEY)
        store.push(FIRST.with_signature(bad).with_signature(good), "tiny:1")
        (damaged,) = [path for path in store.blobs.folder.iterdir() if path.read_bytes() == bad]
        damaged.chmod(0o644)
        damaged.write_bytes(b"x" * len(bad))
        assert signing.check(store.get("tiny:1"), "tiny", KEYS).result == "valid"
        damaged.unlink()
        assert signing.check(store.get("tiny:1"), "tiny", KEYS).result == "valid"

    @pytest.mark.matrix
    def test_more_than_can_be_read_are_not_attached(self, tmp_path: Path) -> None:
        signed = FIRST
        for number in range(attachments.MAX_ATTACHMENTS):
            signed = signed.with_signature(b"%d" % number)
        with pytest.raises(InvalidArgument, match="has the maximum of 64 signatures"):
            signed.with_signature(b"one more")
        store = Store(tmp_path / "store")
        store.push(signed, "tiny:1")
        with pytest.raises(InvalidArgument, match="would have over 64 signatures"):
            store.attach(FIRST.with_signature(b"one more"), "tiny")
        assert len(store.get("tiny:1").attached) == 64

    def test_attachments_of_other_tools_are_left_alone(self, tmp_path: Path) -> None:
        store = Store(tmp_path / "store")
        store.push(FIRST.with_signature(signing.sign(FIRST, "tiny", KEY)), "tiny:1")
        tag = attachments_tag(FIRST.digest)
        theirs = store.blobs.put(b'{"from": "another tool"}', manifest.MANIFEST)
        theirs = theirs.model_copy(update={"artifact_type": "application/vnd.dev.sigstore.bundle.v0.3+json"})
        with store.of("tiny").locked() as change:
            listing = attachments.merge([theirs], store.get("tiny:1").attached)
            change.replace(tag, store.blobs.put(manifest.encode(listing), manifest.INDEX), "push")
        assert signing.check(store.get("tiny:1"), "tiny", KEYS).result == "valid"


class TestDescribe:
    def test_it_reports_claims_and_their_signers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
        signed = FIRST.with_signature(signing.sign(FIRST, "team/tiny", OTHER))
        assert signing.describe(signed) == [Claim(OTHER.public.keyid, "tiny", "1970-01-01T00:00:00Z")]

    def test_an_unreadable_one_is_reported_too(self) -> None:
        (claim,) = signing.describe(FIRST.with_signature(b"\x1b[31m"))
        assert (claim.keyid, claim.name, claim.created) == ("", "", "")
        assert "is not valid JSON" in claim.fault
        assert "\x1b" not in claim.fault

    def test_unsigned(self) -> None:
        assert signing.describe(FIRST) == []
