"""Signatures of archives: a statement by a key's owner that a digest is the model of a name.

A signature is a DSSE v1 envelope around an in-toto v1 statement with one subject: the last component of the model's
name, and the archive's digest. It is attached to the archive and not part of it; :mod:`ingot.model_store.trust.policy`
decides which signers are accepted.

Anyone who can write to a registry can attach anything. So attachments are bounded and parsed strictly before use,
statements without an accepted signature are ignored, and one accepted signature suffices. Specification:
docs/reference/archive-format.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from ingot._version import __version__
from ingot.errors import InvalidArchive
from ingot.model_store.blobs.blobs import read
from ingot.model_store.format import attachments
from ingot.model_store.format.archive import Archive
from ingot.model_store.format.evidence import now
from ingot.model_store.trust import dsse
from ingot.model_store.trust.dsse import decode, encoding, parse
from ingot.model_store.trust.keys import PrivateKey, PublicKey

PREDICATE_TYPE: Final = "urn:ingot:signature:v1"
MAX_ENVELOPE_BYTES = 64 << 10

Result = Literal["valid", "unsigned", "untrusted", "invalid"]
"""The result of checking an archive's signatures.

``valid``: an accepted key signed the archive. ``unsigned``: the archive has no signatures. ``untrusted``: only other
keys signed the archive. ``invalid``: a signature names an accepted key but does not verify, or cannot be read.
"""

_Hex = Annotated[str, Field(pattern=r"\A[0-9a-f]{64}\z")]
# Shown before verification: they must not contain terminal escapes.
_Name = Annotated[str, Field(pattern=r"\A[a-z0-9][a-z0-9._-]{0,254}\z")]
_Time = Annotated[str, Field(pattern=r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z\z")]
_Tool = Annotated[str, Field(pattern=r"\A[A-Za-z0-9.+_-]{1,64}\z")]


class _Strict(BaseModel):
    # Unknown fields are refused: an older reader must not overlook one that restricts the signature.
    model_config = ConfigDict(frozen=True, defer_build=True, extra="forbid", strict=True, alias_generator=to_camel)


class _Signature(_Strict):
    keyid: _Hex
    sig: str = Field(max_length=200)


class _Envelope(_Strict):
    """DSSE. Each signer attaches one envelope with one signature, so their number bounds the work."""

    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: tuple[_Signature, ...] = Field(min_length=1, max_length=1, strict=False)


class _Digests(_Strict):
    sha256: _Hex


class _Subject(_Strict):
    name: _Name
    digest: _Digests


class _Predicate(_Strict):
    created: _Time
    tool: _Tool


class _Statement(_Strict):
    type: Literal["https://in-toto.io/Statement/v1"] = Field(alias="_type")
    subject: tuple[_Subject, ...] = Field(min_length=1, max_length=1, strict=False)
    predicate_type: Literal["urn:ingot:signature:v1"]
    predicate: _Predicate


@dataclass(frozen=True)
class Claim:
    """The unverified content of one signature; ``fault`` is why it cannot be read."""

    keyid: str = ""
    name: str = ""
    created: str = ""
    fault: str = ""
    format: str = "ingot"


@dataclass(frozen=True)
class Finding:
    """The result of checking an archive's signatures.

    ``signed_by`` and ``created`` are key id and time of the valid one, ``format`` is its format. ``faults`` are the
    problems of the others, in the order of attachment.
    """

    result: Result
    signed_by: str | None = None
    created: str | None = None
    faults: tuple[str, ...] = ()
    format: str = "ingot"


def subject_name(name: str) -> str:
    """Return the name of a model in signatures: the last component of its name, which copies preserve."""
    return name.rpartition("/")[2]


def sign(archive: Archive, name: str, key: PrivateKey) -> bytes:
    """Return the envelope of a signature, for :meth:`~ingot.model_store.format.archive.Archive.with_signature`.

    ``SOURCE_DATE_EPOCH`` overrides its time.

    Args:
        archive: the archive to sign. Its blobs are not read, as the digest covers them.
        name: the model's name.
        key: the signer's key.

    Raises:
        InvalidArgument: ``SOURCE_DATE_EPOCH`` is not a number of seconds.
    """
    predicate = {"created": now(), "tool": f"ingot-{__version__}"}
    statement = dsse.statement(subject_name(name), archive.descriptor.hex, PREDICATE_TYPE, predicate)
    return dsse.seal(statement, key)


def check(archive: Archive, name: str, keys: Mapping[str, PublicKey]) -> Finding:
    """Look for an accepted signature of an archive under a name.

    Args:
        archive: the archive.
        name: the name by which it was found.
        keys: the accepted keys, by key id.
    """
    results: list[Result] = []
    faults: list[str] = []
    for content in _contents(archive):
        try:
            envelope, payload = _open(content)
            keyid = envelope.signatures[0].keyid
            if keyid not in keys:
                results.append("untrusted")
                faults.append(f"it is signed by {keyid[:16]}..., whose key is not accepted")
                continue
            statement = _verified(envelope, payload, keys[keyid])
            _check_subject(statement.subject[0], archive, name)
        except InvalidArchive as error:
            results.append("invalid")
            faults.append(str(error))
        else:
            return Finding("valid", keyid, statement.predicate.created)
    result: Result = "invalid" if "invalid" in results else "untrusted" if results else "unsigned"
    return Finding(result, faults=tuple(dict.fromkeys(faults)))


def describe(archive: Archive) -> list[Claim]:
    """Return the unverified contents of an archive's signatures; see :func:`check` for verified ones."""
    return [_claim(content) for content in _contents(archive)]


def _contents(archive: Archive) -> Iterator[bytes | InvalidArchive]:
    """Yield each envelope, or its fault: a damaged one does not affect the others."""
    for descriptor in archive.attached:
        if descriptor.artifact_type != attachments.SIGNATURE:
            continue
        try:
            document = attachments.load(archive.blobs, descriptor, archive.descriptor)
            layer = document.layers[0]
            if layer.size > MAX_ENVELOPE_BYTES:
                raise InvalidArchive(f"a signature has {layer.size} bytes, over the 64 KiB limit")
            yield read(archive.blobs, layer)
        except InvalidArchive as error:
            yield error


def _open(content: bytes | InvalidArchive) -> tuple[_Envelope, bytes]:
    if isinstance(content, InvalidArchive):
        raise content
    envelope = parse(_Envelope, content, "a signature")
    return envelope, decode(envelope.payload, "payload")


def _verified(envelope: _Envelope, payload: bytes, key: PublicKey) -> _Statement:
    """Return the statement of an envelope after verifying its signature."""
    if not key.verify(decode(envelope.signatures[0].sig, "sig"), encoding(payload)):
        raise InvalidArchive(f"the signature of {key.keyid[:16]}... does not match its payload, which was changed")
    return parse(_Statement, payload, f"the statement of {key.keyid[:16]}...")


def _check_subject(subject: _Subject, archive: Archive, name: str) -> None:
    if subject.digest.sha256 != archive.descriptor.hex:
        raise InvalidArchive(f"it is signed for another archive, sha256:{subject.digest.sha256[:12]}...")
    if subject.name != subject_name(name):
        raise InvalidArchive(f"it is signed for another name, '{subject.name}' and not '{subject_name(name)}'")


def _claim(content: bytes | InvalidArchive) -> Claim:
    try:
        envelope, payload = _open(content)
        statement = parse(_Statement, payload, "its statement")
    except InvalidArchive as error:
        return Claim(fault=str(error))
    return Claim(envelope.signatures[0].keyid, statement.subject[0].name, statement.predicate.created)
