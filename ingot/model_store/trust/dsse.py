"""DSSE v1 envelopes around in-toto statements, and Sigstore bundles around envelopes: shared by all signatures.

Anyone can attach a signature, so documents are parsed strictly: no duplicate names, no conversion of types, and only
canonical base64, so that equal signatures are equal bytes.

Specifications: https://github.com/secure-systems-lab/dsse and https://github.com/in-toto/attestation
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from ingot.errors import InvalidArchive
from ingot.model_store.format.attachments import BUNDLE
from ingot.model_store.trust.keys import PrivateKey

PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"
STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
_MAX_SIGNATURES = 8
_Kind = TypeVar("_Kind", bound=BaseModel)


class Lenient(BaseModel):
    """A part of a document of other tools, whose unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", strict=True, alias_generator=to_camel)


class Signature(Lenient):
    """One signature of an envelope. Its key id is not read: its form differs between implementations."""

    sig: str = Field(max_length=200)


class Envelope(Lenient):
    """A signed statement."""

    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: tuple[Signature, ...] = Field(min_length=1, max_length=_MAX_SIGNATURES, strict=False)

    @property
    def content(self) -> bytes:
        """The statement. Raises InvalidArchive if it is not base64."""
        return decode(self.payload, "payload")

    @property
    def signed(self) -> tuple[bytes, ...]:
        """The signatures. Raises InvalidArchive if one is not base64."""
        return tuple(decode(item.sig, "sig") for item in self.signatures)


class Bundle(Lenient):
    """A Sigstore bundle, without the verification material, which names the signer."""

    media_type: Literal["application/vnd.dev.sigstore.bundle.v0.3+json"]
    dsse_envelope: Envelope


def statement(name: str, sha256: str, predicate_type: str, predicate: Mapping[str, Any]) -> bytes:
    """Return an in-toto statement about one subject, a name with a digest in hex."""
    return _dump(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": sha256}}],
            "predicateType": predicate_type,
            "predicate": predicate,
        }
    )


def envelope(payload: bytes, key: PrivateKey, keyid: str) -> dict[str, Any]:
    """Return a signed statement as JSON has it."""
    signature = {"keyid": keyid, "sig": encode(key.sign(encoding(payload)))}
    return {"payload": encode(payload), "payloadType": PAYLOAD_TYPE, "signatures": [signature]}


def seal(payload: bytes, key: PrivateKey) -> bytes:
    """Return the envelope of a statement with the signer's key id."""
    return _dump(envelope(payload, key, key.public.keyid))


def bundle(payload: bytes, key: PrivateKey, hint: str) -> bytes:
    """Return the Sigstore bundle of a statement; ``hint`` identifies the key."""
    # sigstore's library for Python requires the field tlogEntries.
    material = {"publicKey": {"hint": hint}, "tlogEntries": []}
    return _dump({"mediaType": BUNDLE, "verificationMaterial": material, "dsseEnvelope": envelope(payload, key, "")})


def encoding(payload: bytes, kind: str = PAYLOAD_TYPE) -> bytes:
    """Return the signed bytes: DSSE's pre-authentication encoding, which includes the type."""
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)


def parse(kind: type[_Kind], raw: bytes, what: str, form: str = "Ingot's format") -> _Kind:
    """Parse a JSON document strictly: no duplicate names, no unknown fields unless ``kind`` allows them, no conversion.

    Raises:
        InvalidArchive: it is not of that kind; the message calls it ``what``, and its format ``form``.
    """
    try:
        return kind.model_validate(json.loads(raw.decode(), object_pairs_hook=_unique))
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in fault["loc"])[:80]
        raise InvalidArchive(f"{what} is not in {form}: {path!r}: {fault['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidArchive(f"{what} is not valid JSON: {error}") from error


def encode(content: bytes) -> str:
    """Return base64."""
    return base64.b64encode(content).decode()


def decode(text: str, what: str) -> bytes:
    """Decode canonical base64.

    Raises:
        InvalidArchive: it is not that; the message calls it ``what``.
    """
    try:
        content = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise InvalidArchive(f"a signature's '{what}' is not base64: {error}") from error
    if encode(content) != text:
        raise InvalidArchive(f"a signature's '{what}' is not canonical base64")
    return content


def _dump(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:40]!r} occurs twice")
        found[name] = value
    return found
