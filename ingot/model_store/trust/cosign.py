"""Cosign's signatures and attestations of an archive, made with a key.

Up to version 2, a signature is a JSON payload that names a digest and a reference, with the signature of its bytes in
an annotation; an attestation is a DSSE envelope around an in-toto statement. From version 3 on both are statements in a
Sigstore bundle. Only statements of cosign's predicate for signatures and of Ingot's own count as signatures, since
others, such as the report of a scan, do not say that the model may be used. Certificates and entries of transparency
logs are not verified.

Anyone who can write to a registry can attach anything, so these are bounded and parsed strictly too. Format:
https://github.com/sigstore/cosign/blob/main/specs/SIGNATURE_SPEC.md and BUNDLE_SPEC.md
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from ingot._version import __version__
from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store.blobs.blobs import read
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import attachments
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.evidence import now
from ingot.model_store.references import Reference
from ingot.model_store.trust import dsse, signing
from ingot.model_store.trust.dsse import Lenient, decode, encode, parse
from ingot.model_store.trust.keys import PrivateKey, PublicKey
from ingot.model_store.trust.signing import MAX_ENVELOPE_BYTES, PREDICATE_TYPE, Claim, Finding

SIGN_PREDICATE: Final = "https://sigstore.dev/cosign/sign/v1"
_SIGNATURES = (PREDICATE_TYPE, SIGN_PREDICATE)
_TYPE = "cosign container image signature"
_FORM = "cosign's format"
_Text = Annotated[str, Field(max_length=1000, pattern=r"\A[ -~]*\z")]  # shown before verification


class _Identity(Lenient):
    reference: _Text = Field(alias="docker-reference")


class _Image(Lenient):
    digest: _Text = Field(alias="docker-manifest-digest")


class _Critical(BaseModel):
    # An unknown critical field could restrict the signature.
    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", strict=True)

    type: Literal["cosign container image signature"]
    identity: _Identity
    image: _Image


class _Payload(Lenient):
    critical: _Critical


class _Subject(Lenient):
    name: _Text = ""  # bundles of cosign have none
    digest: dict[str, _Text]


class _Statement(Lenient):
    type: Literal["https://in-toto.io/Statement/v1", "https://in-toto.io/Statement/v0.1"] = Field(alias="_type")
    predicate_type: _Text
    subject: tuple[_Subject, ...] = Field(min_length=1, max_length=1, strict=False)


@dataclass(frozen=True)
class _Statements:
    """The content of one layer: the signed bytes, their signatures, and the name and digest that they claim."""

    signed: bytes
    signatures: tuple[bytes, ...]
    name: str
    digest: str
    predicate: str = PREDICATE_TYPE


def sign(archive: Archive, reference: Reference, key: PrivateKey) -> Archive:
    """Return an archive with a signature and an attestation as versions 1 and 2 of cosign attach them, and a bundle.

    Args:
        archive: the archive to sign.
        reference: the name to sign, with the registry of an archive in a registry.
        key: the signer's, on P-256.

    Raises:
        InvalidArgument: the key is on another curve, for which versions of cosign use different hashes.
    """
    if key.public.curve != "P-256":
        raise InvalidArgument(
            f"a key on {key.public.curve} cannot sign for cosign; use one on P-256: ingot trust keygen"
        )
    place = f"{reference.registry.netloc}/" if reference.registry else ""
    payload = {
        "critical": {
            "identity": {"docker-reference": f"{place}{reference.name}"},
            "image": {"docker-manifest-digest": archive.digest},
            "type": _TYPE,
        },
        "optional": {"creator": f"ingot-{__version__}", "timestamp": int(datetime.fromisoformat(now()).timestamp())},
    }
    content = json.dumps(payload, separators=(",", ":")).encode()
    added = BlobFolder.scratch()
    by = {attachments.COSIGN_PAYLOAD: encode(key.sign(content))}
    signature = attachments.make_cosign(added, attachments.COSIGN_SIGNATURE, content, attachments.SIMPLE_SIGNING, by)
    envelope = signing.sign(archive, reference.name, key)
    about = {attachments.COSIGN_PAYLOAD: "", "predicateType": PREDICATE_TYPE}
    attestation = attachments.make_cosign(added, attachments.COSIGN_ATTESTATION, envelope, attachments.ENVELOPE, about)
    bundle = attachments.make_bundle(added, archive.descriptor, _bundle(archive, reference, key), SIGN_PREDICATE)
    return archive.with_attached(added, [signature, attestation, bundle])


def _bundle(archive: Archive, reference: Reference, key: PrivateKey) -> bytes:
    """Return a signature as of version 3."""
    name = signing.subject_name(reference.name)
    statement = dsse.statement(name, archive.descriptor.hex, SIGN_PREDICATE, {})
    return dsse.bundle(statement, key, encode(bytes.fromhex(key.public.keyid)))


def check(archive: Archive, name: str, keys: Mapping[str, PublicKey]) -> Finding:
    """Look for an accepted signature or attestation of an archive under a name.

    Args:
        archive: the archive.
        name: the name by which it was found.
        keys: the accepted keys, by key id.
    """
    faults: list[str] = []
    untrusted = False
    for content in _contents(archive):
        if isinstance(content, InvalidArchive):
            faults.append(str(content))
            continue
        keyid = _signer(content, keys)
        if keyid is None:
            untrusted = True
            continue
        fault = _mismatch(content, archive, name)
        if not fault:
            return Finding("valid", keyid, format="cosign")
        faults.append(fault)
    if untrusted:
        faults.append("no accepted key made its cosign signatures")
    result: signing.Result = "untrusted" if untrusted else "invalid" if faults else "unsigned"
    return Finding(result, faults=tuple(dict.fromkeys(faults)))


def describe(archive: Archive) -> list[Claim]:
    """Return the unverified contents of an archive's cosign signatures and attestations."""
    return [
        Claim(fault=str(content), format="cosign")
        if isinstance(content, InvalidArchive)
        else Claim(name=_last(content.name), format="cosign")
        for content in _contents(archive)
    ]


def _signer(content: _Statements, keys: Mapping[str, PublicKey]) -> str | None:
    for keyid, key in keys.items():
        if any(key.verify(signature, content.signed) for signature in content.signatures):
            return keyid
    return None


def _mismatch(content: _Statements, archive: Archive, name: str) -> str:
    """Return why verified content is not a signature of an archive under a name; empty if it is."""
    if content.digest != archive.digest:
        return f"it is signed for another archive, {content.digest[:19]}..."
    if content.predicate not in _SIGNATURES:
        return f"an attestation of the type '{content.predicate[:80]}' is not a signature"
    # A statement without a name signs the archive, and so the name in it.
    signed = _last(content.name or archive.name)
    if signed != signing.subject_name(name):
        return f"it is signed for another name, '{signed}' and not '{signing.subject_name(name)}'"
    return ""


def _last(reference: str) -> str:
    """Return the last part of the name in a reference, without tag and digest."""
    return reference.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _contents(archive: Archive) -> Iterator[_Statements | InvalidArchive]:
    """Yield each signature and attestation, or its fault: a damaged one does not affect the others."""
    count = 0
    for descriptor in archive.attached:
        if descriptor.artifact_type == attachments.SIGNATURE:
            continue
        try:
            layers = attachments.load(archive.blobs, descriptor, archive.descriptor).layers
        except InvalidArchive as error:
            yield error
            continue
        for layer in layers:
            count += 1
            if count > attachments.MAX_ATTACHMENTS:
                return
            try:
                yield _read(archive, layer)
            except InvalidArchive as error:
                yield error


def _read(archive: Archive, layer: Descriptor) -> _Statements:
    if layer.size > MAX_ENVELOPE_BYTES:
        raise InvalidArchive(f"a cosign signature has {layer.size} bytes, over the 64 KiB limit")
    content = read(archive.blobs, layer)
    if layer.media_type == attachments.SIMPLE_SIGNING:
        critical = parse(_Payload, content, "a cosign signature", _FORM).critical
        signature = decode(layer.annotations.get(attachments.COSIGN_PAYLOAD, ""), "annotation")
        return _Statements(content, (signature,), critical.identity.reference, critical.image.digest)
    if layer.media_type in (attachments.ENVELOPE, attachments.BUNDLE):
        if layer.media_type == attachments.BUNDLE:
            envelope = parse(dsse.Bundle, content, "a bundle", _FORM).dsse_envelope
        else:
            envelope = parse(dsse.Envelope, content, "an attestation", _FORM)
        payload = envelope.content
        statement = parse(_Statement, payload, "the statement of an attestation", _FORM)
        subject = statement.subject[0]
        digest = f"sha256:{subject.digest.get('sha256', '')}"
        signed = dsse.encoding(payload)
        return _Statements(signed, envelope.signed, subject.name, digest, statement.predicate_type)
    raise InvalidArchive(f"a cosign signature has the unknown type '{layer.media_type[:80]}'")
